"""Host memory for cached blocks: slabs of many blocks, so that blocks saved together lie together."""

from __future__ import annotations

import heapq
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

SLAB_BYTES = 64 << 20


class Block:
    """Room for one block; `address` is that of its first byte."""

    __slots__ = ("_slab", "address", "index", "n_bytes")

    def __init__(self, index: int, slab: Slab, at: int, n_bytes: int) -> None:
        self.index, self._slab, self.n_bytes = index, slab, n_bytes
        self.address = slab.address + at

    @property
    def view(self) -> NDArray[np.uint8]:
        """Its bytes."""
        at = self.address - self._slab.address
        return self._slab.array[at : at + self.n_bytes]


class Slab:
    """Memory of many blocks."""

    __slots__ = ("address", "array")

    def __init__(self, array: NDArray[np.uint8]) -> None:
        self.array, self.address = array, int(array.ctypes.data)


class BlockPool:
    """Blocks of `n_bytes`. The first `n_pinned_bytes` come from `pinned`, which gives page-locked memory."""

    def __init__(
        self,
        n_bytes: int,
        n_bytes_max: int,
        *,
        pinned: Callable[[int], NDArray[np.uint8]] | None = None,
        n_pinned_bytes: int = 0,
    ) -> None:
        self.n_bytes = max(1, n_bytes)
        self._n_slab = max(1, min(SLAB_BYTES, n_bytes_max) // self.n_bytes)
        self._free: list[int] = []  # a heap: low indexes first keeps neighbours together
        self._slabs: list[Slab] = []
        self.n_used = 0
        if pinned is not None:
            for _ in range(min(n_pinned_bytes, n_bytes_max) // (self._n_slab * self.n_bytes)):
                self._add(pinned(self._n_slab * self.n_bytes))

    def _add(self, memory: NDArray[np.uint8]) -> None:
        first = len(self._slabs) * self._n_slab
        self._slabs.append(Slab(memory))
        for index in range(first, first + self._n_slab):
            heapq.heappush(self._free, index)

    def take(self) -> Block:
        """A block of unknown content. Raises MemoryError."""
        if not self._free:
            self._add(np.empty(self._n_slab * self.n_bytes, np.uint8))
        index = heapq.heappop(self._free)
        self.n_used += 1
        slab, at = divmod(index, self._n_slab)
        return Block(index, self._slabs[slab], at * self.n_bytes, self.n_bytes)

    def give(self, block: Block) -> None:
        """Take it back."""
        heapq.heappush(self._free, block.index)
        self.n_used -= 1
