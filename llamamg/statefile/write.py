"""Writing a state file: under a temporary name, then renamed, so that a name always means a whole file."""

from __future__ import annotations

import contextlib
import os
import struct
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np

from llamamg.statefile.checksum import CHECKSUMS, CHUNK_BYTES, checksums
from llamamg.statefile.format import WORD, Header, StateFileError
from llamamg.statefile.lock import try_lock

TEMPORARY = ".part"


def write_state_file(
    path: Path,
    header: Header,
    tokens: Any,
    records: Iterable[Any],
    stopped: Callable[[], bool] = lambda: False,
) -> int:
    """Write blocks and states (`records`, contiguous arrays of bytes) behind the tokens; bytes written.

    Raises OSError with nothing left behind: the folder is read-only, the disk is full. `stopped` ends it early (OSError).
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}{TEMPORARY}")
    sums: list[int] = []
    sizes = header.records()
    try:
        with temporary.open("wb") as file:
            try_lock(file.fileno())  # as long as it is open nobody takes it for a leftover
            file.write(header.encode())
            n_written = 0
            for size, record in zip(sizes, _all(header, tokens, records), strict=True):
                view = memoryview(record).cast("B")
                if len(view) != size:
                    raise ValueError(f"a record has {len(view)} bytes instead of {size}")
                for at in range(0, size, CHUNK_BYTES):
                    if stopped():
                        raise OSError("writing was stopped")
                    file.write(view[at : at + CHUNK_BYTES])
                sums += checksums(header.checksum, view)
                n_written += size
            table = struct.pack(f"<{len(sums)}Q", *sums)
            file.write(table + WORD.pack(CHECKSUMS[header.checksum](table)))
            file.flush()
            os.fsync(file.fileno())
            n_written = file.tell()
        os.replace(temporary, path)
        _sync_folder(path.parent)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise
    return n_written


def _all(header: Header, tokens: Any, records: Iterable[Any]) -> Iterable[Any]:
    yield np.ascontiguousarray(tokens, "<i4")
    yield from records


def _sync_folder(folder: Path) -> None:
    """The new name itself must survive a power cut; not every file system can do that."""
    with contextlib.suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def remove_leftovers(folder: Path) -> int:
    """Delete what writers left that were killed; how many files. What is being written stays, also by this process."""
    n = 0
    for path in folder.glob(f".*{TEMPORARY}"):
        with contextlib.suppress(OSError):
            if not _is_being_written(path):
                path.unlink()
                n += 1
    return n


def _is_being_written(path: Path) -> bool:
    """Its writer holds a lock on it: ids of processes say nothing where each container counts its own."""
    handle = os.open(path, os.O_RDWR | getattr(os, "O_NONBLOCK", 0))
    try:
        locked = try_lock(handle)
    finally:
        os.close(handle)
    if locked is not None:
        return not locked
    pid = path.name.removesuffix(TEMPORARY).rpartition(".")[2]
    return not pid.isdigit() or _is_alive(int(pid))


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True


def confined(folder: Path, name: str) -> Path:
    """The file `name` in a folder. Raises StateFileError for anything that is not a plain name of a file there."""
    bad = not name or name in (".", "..") or len(name.encode()) > 200 or name.startswith(".")
    if bad or any(c in name for c in '/\\:*?"<>|') or any(ord(c) < 32 or ord(c) == 127 for c in name):
        raise StateFileError("Invalid filename")
    path = folder / name
    if path.is_symlink():
        raise StateFileError("Invalid filename")
    return path
