"""One process at a time in a folder of state files. The lock goes with the process, however that ends."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

try:
    import fcntl
except ImportError:  # not on Windows: there nobody is kept out
    fcntl = None  # type: ignore[assignment]

NAME = ".lock"


def try_lock(handle: int) -> bool | None:
    """Lock an open file, until it is closed: False when somebody has it, also this process; None where there are no locks."""
    if fcntl is None:
        return None
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True


class FolderInUse(RuntimeError):
    """Another process has the folder; the sentence says which one."""


class FolderLock:
    """Takes a folder. Raises FolderInUse, or OSError when nothing can be written there."""

    def __init__(self, folder: Path) -> None:
        self._handle = os.open(folder / NAME, os.O_RDWR | os.O_CREAT | getattr(os, "O_CLOEXEC", 0), 0o644)
        try:
            self._take(folder)
        except BaseException:
            self.release()
            raise

    def _take(self, folder: Path) -> None:
        locked = try_lock(self._handle)
        if locked is False:
            owner = os.pread(self._handle, 32, 0).decode("ascii", "replace").strip()
            raise FolderInUse(f"{folder} is in use by process {owner or '(unknown)'}")
        if locked:
            os.ftruncate(self._handle, 0)
            os.pwrite(self._handle, str(os.getpid()).encode(), 0)

    def release(self) -> None:
        """Give the folder up."""
        if self._handle >= 0:
            with contextlib.suppress(OSError):
                os.close(self._handle)
            self._handle = -1
