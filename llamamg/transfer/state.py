"""A detached state on its way to main memory, or from there."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from llamamg.blocks import Bytes, StateCopy
from llamamg.transfer.job import ALL, Copier


class StateWork:
    """Copies all of a state, in a transfer that nobody cuts. `done` gets the memory, on the thread that copies."""

    def __init__(
        self, copier: Copier, copying: StateCopy, to_host: bool, data: Bytes | None, done: Callable[[Bytes], None]
    ) -> None:
        self.start, self.end, self.n_bytes = 0, ALL, copying.n_bytes
        self._copying: StateCopy | None = copying
        self._copier, self._to_host, self._data, self._done = copier, to_host, data, done
        self.n_chunks = -(-copying.n_bytes // copier.state_chunk_bytes)

    def copy(self, chunk: int, limit: int) -> None:
        """As Work's."""
        assert self._copying is not None
        if self._data is None:
            self._data = np.empty(self.n_bytes, np.uint8)
        size = self._copier.state_chunk_bytes
        begin, end = chunk * size, min((chunk + 1) * size, self.n_bytes)
        self._copier.copy_state(self._copying, int(self._data.ctypes.data), begin, end, self._to_host)

    def finish(self, limit: int) -> None:
        """As Work's."""
        assert self._data is not None
        self._done(self._data)
        self._copying = self._data = None  # a thread may hold on to this until its next work
