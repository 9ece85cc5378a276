"""The cells of a stand-in memory, and copies of its states."""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from llamamg.blocks import N_ROWS, BlockLayout, Cells, Fence, Plane, StateCopy
from llamamg.errors import NativeError
from llamamg.testing.memory import FakeKV

UNKNOWN = -7  # what a cell holds that nobody has filled


class FakeCells(Cells):
    """The cells of a FakeKV: one plane, whose rows are the tokens themselves. `slow` runs before each copy."""

    def __init__(self, kv: FakeKV) -> None:
        self.kv, self.reason, self.layout = kv, "", BlockLayout(((26, 4, 1),))
        self.slow: Callable[[], None] = lambda: None
        self.appending = True
        self.n_state_bytes_max = 0
        self.detached: weakref.WeakSet[FakeStateCopy] = weakref.WeakSet()

    def planes(self, seq_id: int) -> list[Plane]:
        """One in host memory."""
        return [Plane(0, 4, 1 << 20, 1, "", 26)]

    def find(self, seq_id: int, pos: int, n: int) -> NDArray[np.int32]:
        """Cells are positions."""
        if pos + n > len(self.kv.held[seq_id]):
            raise NativeError(f"sequence {seq_id} does not hold positions {pos} to {pos + n - 1}")
        return np.arange(pos, pos + n, dtype=np.int32)

    def place(self, seq_id: int, pos: int, tokens: NDArray[np.int32]) -> NDArray[np.int32]:
        """Rows of nobody, until they are copied in."""
        self.kv.put(seq_id, pos, [UNKNOWN] * len(tokens))
        return np.arange(pos, pos + len(tokens), dtype=np.int32)

    def adopt(self, seq_id: int, tokens: NDArray[np.int32]) -> int:
        """A few."""
        self.kv.put(seq_id, 0, [UNKNOWN] * min(len(tokens), 100))
        return min(len(tokens), 100)

    def copy(self, seq_id: int, to_host: bool, planes: range, cell: int, n: int, block: int, row: int) -> None:
        """Rows of four bytes."""
        self.slow()
        rows = np.ctypeslib.as_array((ctypes.c_int32 * N_ROWS).from_address(block))[row : row + n]
        held = self.kv.held[seq_id]
        if to_host:
            rows[:] = self.kv.rows[seq_id][cell : cell + n]
        else:
            held[cell : cell + n] = self.kv.rows[seq_id][cell : cell + n] = rows.tolist()

    def appends(self, seq_id: int, pos: int, n: int) -> bool:
        """Cells are positions."""
        return self.appending

    def fence(self, seq_id: int) -> Fence | None:
        """Nothing is computed asynchronously."""
        return None

    def limit_states(self, n_bytes: int, n_left: int) -> None:
        """Remember it."""
        self.n_state_bytes_max = n_bytes

    def state_bytes(self) -> int:
        """Those of living copies."""
        return sum(copy.n_bytes for copy in self.detached)

    def memory_free(self) -> list[int]:
        """In main memory."""
        return []

    def save_state(self, seq_id: int) -> StateCopy:
        """The tokens again."""
        return FakeStateCopy(self, seq_id, len(self.kv.held[seq_id]))

    def load_state(self, seq_id: int, state: NDArray[np.uint8]) -> StateCopy:
        """Checks that the state belongs to the cells, unless it is detached."""
        return FakeStateCopy(self, seq_id, len(state) // 4, to_host=False)


class FakeStateCopy(StateCopy):
    """A state of a FakeKV, which is its tokens."""

    def __init__(self, cells: FakeCells, seq_id: int, n: int, to_host: bool = True) -> None:
        self.n_bytes, self._seq_id, self._cells, self._to_host = 4 * n, seq_id, cells, to_host
        self._own: NDArray[np.uint8] | None = None  # memory of its own
        self.closed = False

    def copy(self, state: NDArray[np.uint8], begin: int, end: int) -> None:
        """To or from the sequence, or what it was when this was detached."""
        self.copy_at(state.ctypes.data + begin, begin, end)

    def copy_at(self, address: int, begin: int, end: int) -> None:
        """As `copy`."""
        self._cells.slow()
        there = np.ctypeslib.as_array((ctypes.c_uint8 * (end - begin)).from_address(address))
        if self._own is None:
            mine = np.array(self._cells.kv.held[self._seq_id], np.int32).view(np.uint8)
            assert len(mine) == self.n_bytes, "the state does not belong to the cells"
        else:
            mine = self._own
        if self._to_host:
            there[:] = mine[begin:end]
        elif self._own is not None:
            self._own[begin:end] = there

    def detach(self) -> bool:
        """While they fit."""
        if self.n_bytes + self._cells.state_bytes() > self._cells.n_state_bytes_max:
            return False
        held = self._cells.kv.held[self._seq_id]
        self._own = np.array(held, np.int32).view(np.uint8) if self._to_host else np.zeros(self.n_bytes, np.uint8)
        self._cells.detached.add(self)
        return True

    def put(self, seq_id: int) -> None:
        """Checks that it belongs to the cells, and forgets those behind it."""
        assert self._own is not None
        kv, n = self._cells.kv, self.n_bytes // 4
        if kv.held[seq_id][:n] != self._own.view(np.int32).tolist():
            raise NativeError("this state is of another sequence")
        del kv.held[seq_id][n:]
        kv.cut.discard(seq_id)

    def close(self) -> None:
        """Remember that."""
        self.closed = True
