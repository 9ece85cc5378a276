"""The disk tier: blocks and states in files that survive a restart. A file holds what one save added to a conversation.

A file whose beginning lies in other files is of no use without them: when one goes, what is built on it goes too.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import threading
import uuid
from collections.abc import Callable
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llamamg import N_ROWS
from llamamg.statefile import (
    Header,
    NoStateFile,
    OtherVersion,
    StateFile,
    StateFileError,
    StateInfo,
    check_identity,
    write_state_file,
)
from llamamg.statefile.write import remove_leftovers
from llamamg_plugins.async_cache_folder import NAME, SUFFIX, BadFile, Entry, Stored
from llamamg_plugins.async_cache_tree import Node, State, Tree

log = logging.getLogger(__name__)
N_OPEN_MAX = 32
END_S = 0.6  # what is written by then when the server ends is kept


class Disk:
    """Files of one folder. `load` may run on any thread; all else on the engine thread, writing on a thread of its own."""

    def __init__(self, folder: Path, n_bytes_max: int, tree: Tree, *, identity: str, planes: Any, model: str) -> None:
        self._folder, self._n_bytes_max, self._tree = folder, n_bytes_max, tree
        self._identity, self._planes, self._model = identity, planes, model
        self.entries: list[Entry] = []
        self.n_bytes = self.n_written = self.n_read = self.n_evicted = self.n_bad = 0
        self._lock = threading.Lock()  # of Entry.file
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._done: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._stopping = False
        self._n_jobs = 0
        self._thread = threading.Thread(target=self._run, name="llamamg-disk", daemon=True)

    # -- start and stop

    def start(self) -> None:
        """Look at what is there. Raises OSError when the folder cannot be used."""
        self._folder.mkdir(parents=True, exist_ok=True)
        remove_leftovers(self._folder)
        found, n_unread = [], 0
        for path in sorted(path for path in self._folder.iterdir() if NAME.fullmatch(path.name)):
            try:
                entry = Entry(path, path.stat().st_size, path.stat().st_mtime)
                with StateFile(path) as file:
                    found.append((file.header, file.tokens(), entry))
            except (NoStateFile, OSError) as error:  # not ours, or not readable just now: neither is damage
                log.warning("%s is left alone: %s", path, error)
                n_unread += 1
            except OtherVersion as error:
                log.warning("%s is not used: %s", path, error)
                self._account(entry)
            except StateFileError as error:
                log.warning("%s is deleted: %s", path, error)
                self.n_bad += 1
                self._unlink(path)
        for header, tokens, entry in sorted(found, key=lambda item: (item[0].start, item[2].t_used)):
            try:
                check_identity(header, self._identity, self._planes, N_ROWS)
            except StateFileError:
                self._account(entry)  # another model's: not to be read, and the oldest go first all the same
                continue
            if self._attach(header, tokens, entry) or n_unread:  # what it is built on may be readable next time
                self._account(entry)
            else:
                self._unlink(entry.path)
        self._shrink()
        self._thread.start()

    def stop(self) -> None:
        """Write what is queued for a moment longer, then nothing more."""
        self._jobs.put(None)
        if self._thread.ident is not None:
            self._thread.join(END_S)
        self._stopping = True
        if self._thread.ident is not None:
            self._thread.join(0.3)
        self.drain()
        for entry in self.entries:
            self._close(entry)

    def _account(self, entry: Entry) -> None:
        self.entries.append(entry)
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
                    entry.states.append(state)
        return True

    # -- writing

    def write(self, path: list[Node]) -> None:
        """Queue what of a saved path is not on disk."""
        self.drain()
        first = next((i for i, node in enumerate(path) if node.stored is None), len(path))
        fresh = path[first:]
        if not fresh or any(node.block is None or node.is_growing or node.parent is None for node in fresh):
            return
        tokens = np.concatenate([node.tokens for node in path])
        states = [state for node in fresh for state in node.states.values() if state.data is not None]
        header = Header(
            self._identity,
            self._planes,
            N_ROWS,
            fresh[0].start,
            len(tokens),
            tuple(StateInfo(s.n_tokens, s.pos_min, s.pos_max, len(s.data)) for s in states if s.data is not None),
            self._model,
            created=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        )
        if header.n_file_bytes() > self._n_bytes_max:
            return
        sizes = [len(node.tokens) for node in fresh]
        views = [node.block.view for node in fresh if node.block is not None]
        data = [state.data for state in states]
        for node in fresh:
            node.n_pins += 1
            node.is_written = True
        # Never a name that was there: blocks know where in which file they lie.
        entry = Entry(self._folder / f"{uuid.uuid4().hex}{SUFFIX}", header.n_file_bytes(), 0.0)
        self._n_jobs += 1

        def job() -> None:
            error: Exception | None = None
            try:
                write_state_file(entry.path, header, tokens, [*views, *data], lambda: self._stopping)
                entry.t_used = entry.path.stat().st_mtime
            except Exception as failed:
                error = failed
            self._done.put(lambda: self._written(entry, fresh, sizes, states, error))

        self._jobs.put(job)

    def _written(
        self, entry: Entry, nodes: list[Node], sizes: list[int], states: list[State], error: Exception | None
    ) -> None:
        self._n_jobs -= 1
        for node in nodes:
            node.n_pins -= 1
            node.is_written = False
        if error is not None:
            if not self._stopping:
                log.warning("a prompt could not be kept in %s: %s", self._folder, error)
            return
        n_block_bytes = N_ROWS * sum(n_bytes * n_columns for _, n_bytes, n_columns in self._planes)
        for i, (node, size) in enumerate(zip(nodes, sizes, strict=True)):
            if node.parent is not None and len(node.tokens) == size:
                node.stored = Stored(entry, i, n_block_bytes)
                entry.nodes.append(node)
        for j, state in enumerate(states):
            if state.data is not None:
                state.stored = Stored(entry, j, len(state.data), is_state=True)
                entry.states.append(state)
        self._account(entry)
        self.n_written += entry.n_bytes
        self._shrink()

    def drain(self) -> None:
        """Take note of what was written."""
        while True:
            try:
                self._done.get_nowait()()
            except queue.Empty:
                return

    @property
    def n_pending(self) -> int:
        """Files queued or being written."""
        return self._n_jobs

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()

    # -- reading

    def load(self, stored: Stored, memory: NDArray[np.uint8]) -> None:
        """Fill memory with a record, on any thread. Raises BadFile."""
        entry = stored.entry
        try:
            with self._lock:
                if entry.file is None:
                    self._make_room_for_handles()
                    entry.file = StateFile(entry.path)
                    check_identity(entry.file.header, self._identity, self._planes, N_ROWS)
                file = entry.file
            if stored.is_state:
                file.read_state(stored.index, memory)
            else:
                file.read_block(stored.index, memory)
        except (StateFileError, OSError) as error:
            raise BadFile(entry, error) from error
        self.n_read += stored.n_bytes

    def _make_room_for_handles(self) -> None:
        opened = [entry for entry in self.entries if entry.file is not None]
        if len(opened) < N_OPEN_MAX:
            return
        for entry in opened:
            if not any(node.n_pins for node in entry.nodes) and entry.file is not None:
                entry.file.close()
                entry.file = None

    def touch(self, path: list[Node]) -> None:
        """The files of a path were used just now."""
        for entry in {id(n.stored.entry): n.stored.entry for n in path if n.stored is not None}.values():
            with contextlib.suppress(OSError):
                os.utime(entry.path)
                entry.t_used = entry.path.stat().st_mtime

    # -- going

    def forget(self, entry: Entry) -> None:
        """Delete a file and what is built on it."""
        going, lost, has_lost_states = [entry], [], False
        while going:
            entry = going.pop()
            if entry not in self.entries:
                continue
            self.entries.remove(entry)
            self.n_bytes -= entry.n_bytes
            self._close(entry)
            self._unlink(entry.path)
            for state in entry.states:
                if state.stored is not None and state.stored.entry is entry:  # another file may have it too
                    state.stored = None
                    has_lost_states = True
            for node in entry.nodes:
                if node.stored is not None and node.stored.entry is entry:
                    node.stored = None
                    lost.append(node)
                    going += [child.stored.entry for child in _children(node) if child.stored is not None]
        for node in self._tree.nodes() if has_lost_states else ():  # a state may lie in another file than its block
            for at, state in list(node.states.items()):
                if state.data is None and state.stored is None:
                    del node.states[at]
        for node in lost:
            if node.block is None and node.parent is not None:
                self._drop(node)

    def _drop(self, node: Node) -> None:
        """Remove what is nowhere any more, with all behind it; what somebody still reads stays, and is found no more."""
        below = [node]
        for each in below:  # grows meanwhile
            below += _children(each)
        for each in reversed(below):
            if each.is_leaf and each.n_pins == 0 and not each.is_growing:
                self._tree.remove(each)

    def _shrink(self) -> None:
        """The files unused for longest go until the rest fits."""
        if self.n_bytes <= self._n_bytes_max:
            return
        used = self._used()
        for entry in sorted(self.entries, key=lambda entry: entry.t_used):
            if self.n_bytes <= self._n_bytes_max:
                return
            if id(entry) not in used and entry in self.entries:
                self.n_evicted += 1
                self.forget(entry)

    def _used(self) -> set[int]:
        """Files with a block that somebody reads or writes, or that such a block is built on."""
        used, seen = set(), set()
        for node in self._tree.nodes():
            if not (node.n_pins or node.is_growing):
                continue
            each: Node | None = node
            while each is not None and id(each) not in seen:
                seen.add(id(each))
                if each.stored is not None:
                    used.add(id(each.stored.entry))
                each = each.parent
        return used

    def _close(self, entry: Entry) -> None:
        with self._lock:
            if entry.file is not None:
                entry.file.close()
                entry.file = None

    def _unlink(self, path: Path) -> None:
        with contextlib.suppress(OSError):
            path.unlink()


def _children(node: Node) -> list[Node]:
    return [*node.full.values(), *node.partial]
