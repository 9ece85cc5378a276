"""The folder of the disk tier: one server has it, and what its files are."""

from __future__ import annotations

import errno
import re
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

from llamamg import PluginError
from llamamg.statefile import FolderInUse, FolderLock, NoStateFile, OtherVersion, StateFileError
from llamamg_plugins.async_cache_node import Node, State

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
