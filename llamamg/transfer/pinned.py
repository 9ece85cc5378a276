"""Page-locked memory: what a GPU reads and writes at full speed, beside its kernels."""

from __future__ import annotations

import bisect
import queue
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from llamamg.blocks import Bytes


class Pinned:
    """Page-locked arrays, and which addresses lie in them. `cupy` is the module; tests give a stand-in."""

    def __init__(self, cupy: Any, bounce_bytes: int) -> None:
        self._cupy, self.bounce_bytes = cupy, bounce_bytes
        self._starts: list[int] = []
        self._ends: list[int] = []
        self._bounces: queue.LifoQueue[Bytes] = queue.LifoQueue()

    def allocate(self, n_bytes: int) -> Bytes:
        """An array that keeps its memory alive; its addresses are known from now on."""
        array = self._memory(n_bytes)
        start = int(array.ctypes.data)
        at = bisect.bisect(self._starts, start)
        self._starts.insert(at, start)
        self._ends.insert(at, start + n_bytes)
        return array

    def area(self, address: int) -> int:
        """Which piece of page-locked memory an address lies in; -1: none. One copy must not reach into two of them."""
        at = bisect.bisect(self._starts, address) - 1
        return self._starts[at] if at >= 0 and address < self._ends[at] else -1

    def reserve(self, n_bounces: int) -> None:
        """Make buffers now for so many threads: page-locking memory takes long and may hold the driver up."""
        for _ in range(n_bounces):
            self._bounces.put(self._memory(self.bounce_bytes))

    def _memory(self, n_bytes: int) -> Bytes:
        return np.frombuffer(self._cupy.cuda.alloc_pinned_memory(n_bytes), np.uint8, n_bytes)

    @contextmanager
    def bounce(self) -> Iterator[Bytes]:
        """A buffer on the way to and from memory that is not page-locked."""
        try:
            buffer = self._bounces.get_nowait()
        except queue.Empty:
            self.reserve(1)
            buffer = self._bounces.get()
        try:
            yield buffer
        finally:
            self._bounces.put(buffer)
