"""The disk tier: blocks and states in files that survive a restart. A file holds what one save added to a conversation.

A file whose beginning lies in other files is of no use without them: when one goes, what is built on it goes too.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import time
import uuid
from collections import OrderedDict
from collections.abc import Callable
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llamamg import N_ROWS
from llamamg.statefile import Header, StateFileError, StateInfo, check_identity, write_state_file
from llamamg.statefile.write import remove_leftovers
from llamamg_plugins.async_cache_folder import SUFFIX, BadFile, Entry, Stored, list_folder, unlink
from llamamg_plugins.async_cache_handles import OpenFiles
from llamamg_plugins.async_cache_node import Node, State
from llamamg_plugins.async_cache_tree import Tree
from llamamg_plugins.async_cache_writer import DiskThread

log = logging.getLogger(__name__)


class Disk:
    """Files of one folder. `load` may run on any thread; all else on the engine's, and the folder is changed on its own."""

    def __init__(
        self, folder: Path, n_bytes_max: int, tree: Tree, *, identity: str, planes: Any, model: str,
        ended: Callable[[], None] = lambda: None,
    ) -> None:  # fmt: skip
        self._folder, self._n_bytes_max, self._tree = folder, n_bytes_max, tree
        self._identity, self._planes, self._model = identity, planes, model
        self.entries: OrderedDict[Entry, None] = OrderedDict()  # the one used last at the end
        self.n_bytes = self.n_written = self.n_evicted = self.n_bad = self.n_unwritten = 0
        self._is_failing = False  # the last file could not be written
        self._files = OpenFiles(identity, planes)
        self._thread = DiskThread(ended)

    # -- start and stop

    def start(self) -> None:
        """Look at what is there. Raises OSError when the folder cannot be used."""
        self._folder.mkdir(parents=True, exist_ok=True)
        remove_leftovers(self._folder)
        listing = list_folder(self._folder)
        self.n_bad += listing.n_damaged
        for entry in listing.others:
            self._account(entry)
        for header, tokens, entry in listing.found:
            try:
                check_identity(header, self._identity, self._planes, N_ROWS)
            except StateFileError:
                self._account(entry)  # another model's: not to be read, and the oldest go first all the same
                continue
            if self._attach(header, tokens, entry) or listing.n_unread:  # what it is built on may be readable next time
                self._account(entry)
            else:
                unlink(entry.path)
        self.entries = OrderedDict.fromkeys(sorted(self.entries, key=listing.t_used.__getitem__))
        self._thread.start()
        self._shrink()

    def stop(self) -> None:
        """Write what is queued for a moment longer, then nothing more."""
        self._thread.stop()
        self._files.close_all()

    def _account(self, entry: Entry) -> None:
        self.entries[entry] = None
        self.n_bytes += entry.n_bytes

    def _attach(self, header: Header, tokens: NDArray[np.int32], entry: Entry) -> bool:
        """Make a file's blocks known; False when what they are built on is missing."""
        path, n = self._tree.find(tokens[: header.start])
        if n != header.start or header.start % N_ROWS or any(len(node.tokens) != N_ROWS for node in path):
            return False
        parent = path[-1] if path else self._tree.root
        for i, at in enumerate(range(header.start, header.n_tokens, N_ROWS)):
            part = tokens[at : at + N_ROWS]
            node = self._tree.add(parent, part, None, Stored(entry, i, header.n_block_bytes))
            if node.stored is not None and node.stored.entry is entry:
                entry.nodes.append(node)
            parent = node
            for j, info in enumerate(header.states):
                if node.start < info.n_tokens <= node.end and info.n_tokens not in node.states:
                    state = State(info.n_tokens, info.pos_min, info.pos_max, None)
                    state.stored = Stored(entry, j, info.n_bytes, is_state=True)
                    self._tree.add_state(node, state)
                    entry.states.append((node, state))
        return True

    # -- writing

    def write(self, path: list[Node]) -> None:
        """Queue what of a saved path is neither on disk nor queued."""
        self.drain()
        first = next((i for i, node in enumerate(path) if node.stored is None and not node.is_written), len(path))
        fresh = path[first:]
        if not fresh or any(_is_unfit(node) for node in fresh):
            return
        tokens = np.concatenate([node.tokens for node in path])
        states = [(node, state) for node in fresh for state in node.states.values() if state.data is not None]
        header = Header(
            self._identity,
            self._planes,
            N_ROWS,
            fresh[0].start,
            len(tokens),
            tuple(StateInfo(s.n_tokens, s.pos_min, s.pos_max, len(s.data)) for _, s in states if s.data is not None),
            self._model,
            created=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        )
        # Never a name that was there: blocks know where in which file they lie.
        entry = Entry(self._folder / f"{uuid.uuid4().hex}{SUFFIX}", header.n_file_bytes())
        if entry.n_bytes > self._n_bytes_max:
            return
        sizes = [len(node.tokens) for node in fresh]
        records = [node.block.view for node in fresh if node.block is not None]
        records += [state.data for _, state in states if state.data is not None]
        self._tree.pin(path)  # what it is built on must not go either
        for node in fresh:
            node.is_written = True

        bases = [used.path for used in _files_of(path)]

        def job() -> None:
            write_state_file(entry.path, header, tokens, records, lambda: self._thread.is_stopping)
            _touch(bases)  # a conversation that never leaves its slot is not read from here

        def then(error: Exception | None) -> None:
            self._tree.unpin(path)
            for node in fresh:
                node.is_written = False
            if error is None:
                self._written(entry, path, first, sizes, states)
            elif not self._thread.is_stopping:
                self._unwritten(entry, error)

        self._thread.queue(job, then)

    def _written(
        self, entry: Entry, path: list[Node], first: int, sizes: list[int], states: list[tuple[Node, State]]
    ) -> None:
        self.n_written += entry.n_bytes
        self._is_failing = False
        if first and path[first - 1].stored is None:  # that could not be written, or went since
            self._delete(entry)
            return
        n_block_bytes = N_ROWS * sum(n_bytes * n_columns for _, n_bytes, n_columns in self._planes)
        for i, (node, size) in enumerate(zip(path[first:], sizes, strict=True)):
            if node.parent is not None and len(node.tokens) == size:
                node.stored = Stored(entry, i, n_block_bytes)
                entry.nodes.append(node)
        for j, (node, state) in enumerate(states):
            if state.data is not None:
                state.stored = Stored(entry, j, len(state.data), is_state=True)
                entry.states.append((node, state))
        self._account(entry)
        self._use(path)
        self._shrink()

    def _unwritten(self, entry: Entry, error: Exception) -> None:
        self.n_unwritten += 1
        if not self._is_failing:
            log.warning("a prompt could not be kept in %s: %s (said once until it can be again)", self._folder, error)
        self._is_failing = True
        is_full = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)
        if is_full and self.n_bytes > entry.n_bytes:
            self._n_bytes_max = self.n_bytes - entry.n_bytes  # so much is free when the next file comes
            log.warning(
                "%s may have %.3f GB until the next start: the disk is full", self._folder, self._n_bytes_max / 1e9
            )
            self._shrink()

    def drain(self) -> None:
        """Take note of what was written."""
        self._thread.drain()

    @property
    def n_pending(self) -> int:
        """Changes of the folder, queued or under way."""
        return self._thread.n_pending

    # -- reading

    @property
    def n_read(self) -> int:
        """Bytes read."""
        return self._files.n_read

    def load(self, stored: Stored, memory: NDArray[np.uint8]) -> None:
        """Fill memory with a record, on any thread. Raises BadFile."""
        try:
            with self._files.reading(stored.entry, stored.n_bytes) as file:
                (file.read_state if stored.is_state else file.read_block)(stored.index, memory)
        except (StateFileError, OSError) as error:
            raise BadFile(stored.entry, error) from error

    def failed(self, error: BadFile) -> None:
        """A `load` could not be done: a damaged file goes; one that cannot be read stays, for the next start."""
        if error.is_damaged:
            self.n_bad += 1
            self.forget(error.entry)
        elif not error.is_passing:
            self._detach(error.entry)

    def touch(self, path: list[Node]) -> None:
        """The files of a path were used just now."""
        self._use(path)
        paths = [entry.path for entry in _files_of(path)]
        self._thread.queue(lambda: _touch(paths))

    def _use(self, path: list[Node]) -> None:
        for entry in _files_of(path):
            self.entries.move_to_end(entry)

    # -- going

    def forget(self, entry: Entry) -> None:
        """Delete a file and what is built on it."""
        for going in self._detach(entry):
            del self.entries[going]
            self.n_bytes -= going.n_bytes
            self._delete(going)

    def _detach(self, entry: Entry) -> list[Entry]:
        """The tree knows nothing of a file any more, nor of what is built on it; all these files."""
        going, gone, lost = [entry], dict[Entry, None](), list[Node]()
        while going:
            entry = going.pop()
            if entry in gone or entry not in self.entries:
                continue
            gone[entry] = None
            self._files.close(entry)
            for node, state in entry.states:
                if state.stored is None or state.stored.entry is not entry:  # another file may have it too
                    continue
                state.stored = None
                if state.data is None and node.states.get(state.n_tokens) is state:
                    del node.states[state.n_tokens]
            for node in entry.nodes:
                if node.stored is not None and node.stored.entry is entry:
                    node.stored = None
                    lost.append(node)
                    going += [child.stored.entry for child in node.children if child.stored is not None]
            entry.nodes, entry.states = [], []
        for node in lost:
            if node.block is None and node.parent is not None:
                self._drop(node)
        return list(gone)

    def _drop(self, node: Node) -> None:
        """Remove what is nowhere any more, with all behind it; what somebody still reads stays, and is found no more."""
        below = [node]
        for each in below:  # grows meanwhile
            below += each.children
        for each in reversed(below):
            if each.is_leaf and each.n_pins == 0 and not each.is_growing:
                self._tree.remove(each)

    def _shrink(self) -> None:
        """The files unused for longest go until the rest fits."""
        if self.n_bytes <= self._n_bytes_max:
            return
        used = self._used()
        while self.n_bytes > self._n_bytes_max:
            entry = next((entry for entry in self.entries if entry not in used), None)
            if entry is None:
                return
            self.n_evicted += 1
            self.forget(entry)

    def _used(self) -> set[Entry]:
        """Files with a block that somebody reads or writes, or with a state of it, or that such a block is built on."""
        used = {node.stored.entry for node in self._tree.pinned if node.stored is not None}
        for node in self._tree.pinned:
            used.update(state.stored.entry for state in node.states.values() if state.stored is not None)
        return used

    def _delete(self, entry: Entry) -> None:
        self._thread.queue(lambda: unlink(entry.path))


def _is_unfit(node: Node) -> bool:
    """Whether a block cannot be written now."""
    return node.block is None or node.is_growing or node.is_written or node.parent is None


def _files_of(path: list[Node]) -> list[Entry]:
    """Its files, those that others are built on last."""
    return list(dict.fromkeys(node.stored.entry for node in reversed(path) if node.stored is not None))


def _touch(paths: list[Path]) -> None:
    """They were used just now, each a little later than the one before it: clocks of files are coarse."""
    now = time.time_ns()
    for i, path in enumerate(paths):
        with contextlib.suppress(OSError):
            os.utime(path, ns=(now + i, now + i))
