"""The folder of the disk tier: one server has it, and what its files are."""

from __future__ import annotations

import contextlib
import errno
import logging
import re
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from llamamg import PluginError
from llamamg.statefile import FolderInUse, FolderLock, Header, NoStateFile, OtherVersion, StateFile, StateFileError
from llamamg_plugins.async_cache_node import Node, State

log = logging.getLogger(__name__)
SAY_S = 3.0  # between two words about a start that takes long
SUFFIX = ".llmg"
# What is called otherwise, e.g. a saved slot, is somebody's own.
NAME = re.compile(rf"[0-9a-f]{{32}}{re.escape(SUFFIX)}")


def lock_folder(folder: Path) -> FolderLock:
    """Make a folder, if it is not there, and take it. Raises PluginError."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
        return FolderLock(folder)
    except OSError as error:
        raise PluginError(f"--cache-disk {folder} cannot be used: {error.strerror or error}") from error
    except FolderInUse as error:
        raise PluginError(
            f"--cache-disk {error}: give each server a folder of its own, or end that process first"
        ) from error


@dataclass(slots=True, eq=False)
class Entry:
    """One file."""

    path: Path
    n_bytes: int
    nodes: list[Node] = field(default_factory=list)
    states: list[tuple[Node, State]] = field(default_factory=list)


@dataclass(slots=True)
class Listing:
    """What lies in a folder when the server starts."""

    found: list[tuple[Header, NDArray[np.int32], Entry]] = field(default_factory=list)  # what others are built on first
    others: list[Entry] = field(default_factory=list)  # of other versions
    t_used: dict[Entry, int] = field(default_factory=dict)
    n_unread: int = 0  # files that may be good
    n_damaged: int = 0  # files that were deleted


def list_folder(folder: Path) -> Listing:
    """Open every file of the tier; damaged ones are deleted. Raises OSError when the folder cannot be read."""
    listing = Listing()
    paths, t_said = sorted(path for path in folder.iterdir() if NAME.fullmatch(path.name)), time.monotonic()
    for i, path in enumerate(paths):
        if time.monotonic() > t_said + SAY_S:
            log.warning("%s: %d of %d files looked at", folder, i, len(paths))
            t_said = time.monotonic()
        try:
            status = path.stat()
            entry = Entry(path, status.st_size)
            listing.t_used[entry] = status.st_mtime_ns
            with StateFile(path) as file:
                listing.found.append((file.header, file.tokens(), entry))
        except (NoStateFile, OSError) as error:  # not ours, or not readable just now: neither is damage
            log.warning("%s is left alone: %s", path, error)
            listing.n_unread += 1
        except OtherVersion as error:
            log.warning("%s is not used: %s", path, error)
            listing.others.append(entry)
        except StateFileError as error:
            log.warning("%s is deleted: %s", path, error)
            listing.n_damaged += 1
            unlink(path)
    listing.found.sort(key=lambda item: (item[0].start, listing.t_used[item[2]]))
    return listing


def unlink(path: Path) -> None:
    """Delete a file, if it is there and may be deleted."""
    with contextlib.suppress(OSError):
        path.unlink()


@dataclass(frozen=True, slots=True)
class Stored:
    """A record of a file."""

    entry: Entry
    index: int
    n_bytes: int
    is_state: bool = False


class BadFile(Exception):
    """A file cannot be read; `entry` says which one, `why` is a StateFileError or an OSError."""

    def __init__(self, entry: Entry, why: Exception) -> None:
        super().__init__(f"{entry.path.name}: {why}")
        self.entry, self.why = entry, why

    @property
    def is_damaged(self) -> bool:
        """Whether that will stay so: the file is ours and damaged, or gone."""
        if isinstance(self.why, StateFileError):
            return not isinstance(self.why, (NoStateFile, OtherVersion))
        return isinstance(self.why, FileNotFoundError)

    @property
    def is_passing(self) -> bool:
        """Whether that has to do with this process and not with the file: too many are open, no memory."""
        return isinstance(self.why, OSError) and self.why.errno in (errno.EMFILE, errno.ENFILE, errno.ENOMEM)
