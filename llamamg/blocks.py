"""How the tokens of a sequence lie in memory, on a device and on the host. Importing this loads nothing native.

A plane is the keys, values or index keys of one layer; a cell holds one token in every plane. What does not grow with the
tokens (recurrent states, sliding windows) is copied as a state.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

N_ROWS = 256  # tokens of a block
Bytes = NDArray[np.uint8]
Indexes = NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Plane:
    """`data` is the address of cell 0 on `device` ("" for host memory). With several columns it is transposed: each column
    is a run of `n_cells` elements of `n_bytes`."""

    data: int
    n_bytes: int
    n_cells: int
    n_columns: int
    device: str
    type: int

    @property
    def n_row_bytes(self) -> int:
        """Bytes of one token."""
        return self.n_bytes * self.n_columns


@dataclass(frozen=True, slots=True)
class BlockLayout:
    """How a block of N_ROWS tokens lies in host memory: plane after plane, each as on the device.

    `planes` are (ggml type, bytes of a cell or element, columns). Only blocks of equal layouts are interchangeable.
    """

    planes: tuple[tuple[int, int, int], ...]

    @property
    def n_row_bytes(self) -> int:
        """Bytes of one token in all planes."""
        return sum(n_bytes * n_columns for _, n_bytes, n_columns in self.planes)

    @property
    def n_block_bytes(self) -> int:
        """Bytes of a block."""
        return N_ROWS * self.n_row_bytes


class StateCopy(Protocol):
    """A state of `n_bytes` on its way; copies may run on any thread, `close` once nobody copies any more.

    Its rows in the sequence may be swapped by the next batch: copy all of it before, or `detach` it.
    """

    n_bytes: int

    def copy(self, state: Bytes, begin: int, end: int) -> None:
        """Copy the bytes [begin, end) of the state to or from `state`. Raises NativeError."""

    def copy_at(self, address: int, begin: int, end: int) -> None:
        """As `copy`, where the byte `begin` lies at `address` of main memory. Raises NativeError."""

    def detach(self) -> bool:
        """Give it memory of its own on its devices, between two batches; False, and nothing is done, when there is no room.

        One that was saved is copied there at once; one that is loaded waits there for `put`. Raises NativeError.
        """

    def put(self, seq_id: int) -> None:
        """Put a detached state into a sequence whose cells are there. Raises NativeError: then remove the sequence."""

    def close(self) -> None:
        """Forget it."""


class Fence(Protocol):
    """A mark behind what a context has been given to compute so far."""

    def wait(self) -> None:
        """Wait until that is computed, on any thread."""


class Cells(Protocol):
    """The cells of an engine's contexts. `copy` and StateCopy.copy may run on any thread; all else where the context decodes.

    `reason` says why nothing can be copied; "": it can.
    """

    reason: str
    layout: BlockLayout

    def planes(self, seq_id: int) -> list[Plane]:
        """Where a sequence's rows lie, as long as the context lives. Raises NativeError where that cannot be said."""

    def find(self, seq_id: int, pos: int, n: int) -> Indexes:
        """The cells of positions [pos, pos + n). Raises NativeError when the sequence does not have each of them once."""

    def appends(self, seq_id: int, pos: int, n: int) -> bool:
        """Whether `place` will give cells [pos, pos + n), and may run on any thread while the sequence is nobody else's."""

    def place(self, seq_id: int, pos: int, tokens: Indexes) -> Indexes:
        """Cells for more tokens of a sequence that ends before `pos`; their rows are to be copied in. Raises NativeError."""

    def adopt(self, seq_id: int, tokens: Indexes) -> int:
        """Where `appends`: `place` the first tokens of an empty sequence, as many as is quick; how many. Raises NativeError."""

    def copy(self, seq_id: int, to_host: bool, planes: range, cell: int, n: int, block: int, row: int) -> None:
        """Copy `n` neighbouring cells to or from rows [row, row + n) of the block at address `block`. Raises NativeError."""

    def fence(self, seq_id: int) -> Fence | None:
        """A mark behind what the sequence's context has been given to compute; None where nothing has to be waited for."""

    def limit_states(self, n_bytes: int, n_left: int) -> None:
        """Detached states may take so many bytes over all devices, and leave `n_left` on each."""

    def state_bytes(self) -> int:
        """Bytes that detached states have on devices."""

    def memory_free(self) -> list[int]:
        """Free bytes of each device that rows lie on; none when they are in main memory."""

    def save_state(self, seq_id: int) -> StateCopy:
        """Begin to save what does not grow; the data is that of KVCache.save. Raises NativeError."""

    def load_state(self, seq_id: int, state: Bytes) -> StateCopy:
        """Begin to put a saved state back into a sequence whose cells are there. Raises NativeError: then remove it."""


def runs(cells: Seq[int] | Indexes) -> list[tuple[int, int, int]]:
    """Cells as runs of neighbours: (index of the first one in `cells`, its cell, how many)."""
    values = np.asarray(cells)
    if not len(values):
        return []
    starts = np.concatenate(([0], np.flatnonzero(np.diff(values) != 1) + 1))
    ends = np.append(starts[1:], len(values))
    return [(int(a), int(values[a]), int(b - a)) for a, b in zip(starts, ends, strict=True)]
