"""Files of the disk tier that are kept open for reading. Any thread may read, and none has a file closed under it."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from llamamg import N_ROWS
from llamamg.statefile import StateFile, check_identity
from llamamg_plugins.async_cache_folder import Entry

N_OPEN_MAX = 32  # beside those that are being read


@dataclass(slots=True, eq=False)
class _Open:
    file: StateFile
    n_readers: int = 0
    is_wanted: bool = True  # False: to be closed by its last reader


class OpenFiles:
    """`reading` opens a file, or takes it as it was left open by the last reader."""

    def __init__(self, identity: str, planes: Any) -> None:
        self._identity, self._planes = identity, planes
        self._lock = threading.Lock()  # never held while a disk is waited for
        self._open: OrderedDict[Entry, _Open] = OrderedDict()  # the one used last at the end
        self.n_read = 0  # bytes

    @contextmanager
    def reading(self, entry: Entry, n_bytes: int) -> Iterator[StateFile]:
        """Its file, of which `n_bytes` will be read. Raises StateFileError, OSError."""
        opened = self._begin(entry, None) or self._begin(entry, self._opened(entry))
        assert opened is not None
        try:
            yield opened.file
            with self._lock:
                self.n_read += n_bytes
        finally:
            with self._lock:
                opened.n_readers -= 1
                self._close_spare()
            self._close_unwanted(opened)

    def close(self, entry: Entry) -> None:
        """Its file goes, as soon as nobody reads it."""
        with self._lock:
            opened = self._open.pop(entry, None)
            if opened is not None:
                opened.is_wanted = False
        if opened is not None:
            self._close_unwanted(opened)

    def close_all(self) -> None:
        """Nothing will be read any more."""
        for entry in list(self._open):
            self.close(entry)

    def __contains__(self, entry: Entry) -> bool:
        return entry in self._open

    def _opened(self, entry: Entry) -> StateFile:
        file = StateFile(entry.path)
        try:
            check_identity(file.header, self._identity, self._planes, N_ROWS)
        except BaseException:
            file.close()
            raise
        return file

    def _begin(self, entry: Entry, file: StateFile | None) -> _Open | None:
        """Count one reader more; None when it is not open and no `file` was opened for it."""
        with self._lock:
            opened = self._open.get(entry)
            if opened is None:
                if file is None:
                    return None
                opened = self._open[entry] = _Open(file)
            elif file is not None:  # another thread was faster
                file.close()
            opened.n_readers += 1
            self._open.move_to_end(entry)
            return opened

    def _close_spare(self) -> None:
        """Of the files that nobody reads the oldest ones go."""
        spare = [entry for entry, opened in self._open.items() if not opened.n_readers]
        for entry in spare[: max(0, len(spare) - N_OPEN_MAX)]:
            self._open.pop(entry).file.close()

    def _close_unwanted(self, opened: _Open) -> None:
        if not opened.is_wanted and not opened.n_readers:
            opened.file.close()
