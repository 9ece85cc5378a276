"""The sequence memory of a context: cutting, copying, shifting, and snapshots of what cannot be cut."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from enum import Enum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llamamg.statebytes import with_streams

PARTIAL_ONLY = 1  # llama.h: only the recurrent state and sliding windows
ON_DEVICE = 2  # llama.h: tensors stay on their devices, one snapshot for each sequence


class Removal(Enum):
    """How far a sequence can be cut back."""

    PART = "part"  # anywhere: plain KV cache
    FULL = "full"  # only whole: recurrent and hybrid models keep one state for each sequence
    BOUNDED = "bounded"  # by up to n_rs_seq tokens


def _nothing(seq_id: int) -> None:
    """Removing is all there is to do."""


class KVCache:
    """Sequence operations of one context. Only the thread that decodes may call them.

    `empty` may take the cells of a sequence that goes whole, faster than the library does.
    """

    cells_are_positions = (
        False  # a stream of its own for each sequence: what is cut off stays in memory until overwritten
    )

    def __init__(self, llama: Any, context: Any, *, is_recurrent: bool, n_swa: int) -> None:
        self._llama, self.context = llama, context
        self._memory = llama.llama_get_memory(context)
        self.n_swa, self.is_recurrent = n_swa, is_recurrent
        self.n_streams: int = llama.llama_n_seq_max(context)  # if the cache is not unified
        self.can_shift = bool(llama.llama_memory_can_shift(self._memory))
        self.n_rs_seq: int = llama.llama_n_rs_seq(context)  # tokens a recurrent state can go back
        self.empty: Callable[[int], None] = _nothing
        self._snapshots: dict[int, tuple[int, NDArray[np.uint8]]] = {}  # on the devices; here is where they lie
        if self.n_rs_seq > 0:
            self.removal = Removal.BOUNDED
        else:
            self.removal = Removal.FULL if is_recurrent else Removal.PART

    @property
    def needs_checkpoints(self) -> bool:
        """Whether going back in a sequence takes a snapshot."""
        return self.removal is not Removal.PART or self.n_swa > 0

    def local(self, seq_id: int) -> int:
        """What the context itself calls a sequence id."""
        return seq_id

    def remove(self, seq_id: int, p0: int, p1: int = -1) -> bool:
        """Forget positions [p0, p1) of a sequence; False when this memory cannot be cut there."""
        if p0 <= 0 and p1 < 0:
            self.empty(seq_id)
        return bool(self._llama.llama_memory_seq_rm(self._memory, seq_id, p0, p1))

    def copy(self, source: int, target: int) -> None:
        """Make `target` hold what `source` holds."""
        self._llama.llama_memory_seq_cp(self._memory, source, target, -1, -1)

    def copy_now(self, seq_id: int) -> bool:
        """Decode a token in a sequence that is empty and stays so: libllama copies cells of `copy` at the next decode only.

        False when it was not empty, and nothing was done.
        """
        if self.pos_max(seq_id) >= 0:
            return False
        batch = self._llama.llama_batch_init(1, 0, 1)
        try:
            batch.n_tokens, batch.token[0], batch.pos[0], batch.logits[0] = 1, 0, 0, 0
            batch.n_seq_id[0], batch.seq_id[0][0] = 1, seq_id
            self._llama.llama_decode(self.context, batch)  # copies come first, so they are made when it fails too
            self.remove(seq_id, -1, -1)
        finally:
            self._llama.llama_batch_free(batch)
        return True

    def shift(self, seq_id: int, p0: int, p1: int, delta: int) -> None:
        """Move positions [p0, p1) by `delta`."""
        self._llama.llama_memory_seq_add(self._memory, seq_id, p0, p1, delta)

    def pos_min(self, seq_id: int) -> int:
        """Smallest position that can still be attended to or continued; -1 when empty."""
        return int(self._llama.llama_memory_seq_pos_min(self._memory, seq_id))

    def pos_max(self, seq_id: int) -> int:
        """Largest position held; -1 when empty."""
        return int(self._llama.llama_memory_seq_pos_max(self._memory, seq_id))

    def clear(self) -> None:
        """Forget everything."""
        self._llama.llama_memory_clear(self._memory, True)

    def save(self, seq_id: int, flags: int = PARTIAL_ONLY) -> NDArray[np.uint8] | None:
        """A sequence's state as bytes in host memory; None when there is none. Waits for the device."""
        size = self._llama.llama_state_seq_get_size_ext(self.context, seq_id, flags)
        if size == 0:
            return None
        data = np.empty(size, np.uint8)
        pointer = data.ctypes.data_as(ctypes.POINTER(ctypes.c_uint8))
        n = self._llama.llama_state_seq_get_data_ext(self.context, pointer, size, seq_id, flags)
        return data[:n] if n else None

    def save_for(self, seq_id: int, n_streams: int) -> NDArray[np.uint8] | None:
        """All of a sequence's state, for a context of `n_streams` sequences. Raises OddState."""
        data = self.save(seq_id, 0)
        if data is None or n_streams == self.n_streams:
            return data
        partial = self.save(seq_id, PARTIAL_ONLY)
        if partial is None:
            return None
        return with_streams(data, partial, seq_id, self.n_streams, n_streams, partial_is_kv=not self.is_recurrent)

    def size(self, seq_id: int, flags: int = 0) -> int:
        """Bytes that `save` would take."""
        return int(self._llama.llama_state_seq_get_size_ext(self.context, seq_id, flags))

    def restore(self, seq_id: int, data: NDArray[np.uint8], flags: int = PARTIAL_ONLY) -> bool:
        """Put a saved state back; False when libllama refuses it."""
        pointer = data.ctypes.data_as(ctypes.POINTER(ctypes.c_uint8))
        return bool(self._llama.llama_state_seq_set_data_ext(self.context, pointer, len(data), seq_id, flags))

    def snapshot(self, seq_id: int, n_tokens: int) -> bool:
        """Copy what cannot be cut of a sequence of `n_tokens`, on its devices, in place of an earlier copy; False when refused."""
        data = self.save(seq_id, PARTIAL_ONLY | ON_DEVICE)
        self.forget_snapshot(seq_id)
        if data is not None:
            self._snapshots[seq_id] = (n_tokens, data)
        return data is not None

    def go_back(self, seq_id: int, n_tokens: int) -> bool:
        """Make a sequence what it was when its snapshot was taken at `n_tokens`; False without that one. It is gone then."""
        taken_at, data = self._snapshots.pop(seq_id, (-1, None))
        # libllama ends the process when it is asked for a snapshot it does not have.
        return (
            data is not None
            and taken_at == n_tokens
            and self.restore(seq_id, data, PARTIAL_ONLY | ON_DEVICE)
            and self.remove(seq_id, n_tokens, -1)
        )

    def forget_snapshot(self, seq_id: int) -> None:
        """A snapshot is not needed any more."""
        self._snapshots.pop(seq_id, None)
