"""Saving: what a slot holds and the tree does not is copied to the host, beside the decodes of other sequences."""

from __future__ import annotations

import logging
import queue
import time
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llamamg import N_ROWS, Cells, Checkpoint, Copier, KeptState, Piece, Slot, Transfer, Workers
from llamamg_plugins.async_cache_blocks import Block
from llamamg_plugins.async_cache_kept import KeptStates
from llamamg_plugins.async_cache_node import Node, State, Tokens
from llamamg_plugins.async_cache_tree import Tree

log = logging.getLogger(__name__)
N_PUBLISH = 64  # blocks taken into the tree in one step: about half a millisecond
N_PREPARE = 32  # blocks that copies are made of at once, or as many as one copy has: about 0.2 ms


@dataclass(slots=True, eq=False)
class _Part:
    """A block being filled: rows from `row` on; `grows` is the node it belongs to already."""

    tokens: Tokens  # of the whole block, as it will be
    row: int
    block: Block
    grows: Node | None = None
    n_done: int = -1  # rows copied, once they are


@dataclass(slots=True, eq=False)
class Save:
    """One slot being saved."""

    transfer: Transfer
    slot: Slot
    tokens: Tokens
    parent: Node  # what the first part is built on
    parts: list[_Part] = field(default_factory=list)
    states: list[State] = field(default_factory=list)
    pinned: list[Node] = field(default_factory=list)
    path: list[Node] = field(default_factory=list)
    cells: NDArray[np.int32] | None = None  # of the tokens from `first` on; None before that is known
    first: int = 0  # token that is not in the tree
    at: int = 0  # where the next part begins
    grows: Node | None = None  # what the first part becomes a part of
    n_published: int = 0
    is_short: bool = False  # a block was cut, so nothing can be built on it
    has_rows: bool = False

    @property
    def is_over(self) -> bool:
        """Whether nothing more will be copied."""
        return self.transfer.is_over and self.is_settled

    @property
    def is_settled(self) -> bool:
        """Whether all states are in main memory, or will never be."""
        return all(state.kept is None or state.kept.is_settled for state in self.states)


class Saver:
    """`drain` and all else on the engine thread; copies end on others and leave word in a queue."""

    def __init__(self, cells: Cells, kv: Any, tree: Tree, copier: Copier, workers: Workers, kept: KeptStates) -> None:
        self._cells, self._kv, self._tree, self._copier, self._workers = cells, kv, tree, copier, workers
        self._kept = kept
        self._done: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._running: list[Save] = []
        self._unprepared: list[Save] = []  # of these, those whose copies are not all made
        self.saved: Callable[[list[Node]], None] = lambda path: None  # told when a slot is saved: its blocks
        self.n_saved = 0  # slots of which something was copied
        self.n_cut = 0  # of these, those whose next user came before the end
        self.n_failed = 0
        self.n_bytes = 0

    def save(self, slot: Slot, tokens: Tokens) -> Save:
        """Begin to save `tokens`, which the slot holds. What has to be copied is found by `prepare`, before the slot changes."""
        self.prepare(slot)
        transfer = Transfer(slot.seq_id, True, self._cells.fence(slot.seq_id), slot.copying)
        save = Save(transfer, slot, tokens, self._tree.root)
        save.states = [_state(c) for c in slot.checkpoints if c.n_tokens <= len(tokens)]
        if len(tokens):
            self._take_state(slot, save, len(tokens))
        self._running.append(save)
        self._unprepared.append(save)
        slot.copying = transfer
        return save

    def _take_state(self, slot: Slot, save: Save, n_tokens: int) -> None:
        """The state as it is now: a decode of others may swap the rows in which recurrent states lie."""
        if not self._kv.needs_checkpoints or any(state.n_tokens == n_tokens for state in save.states):
            return
        pos = (self._kv.pos_min(slot.seq_id), self._kv.pos_max(slot.seq_id))
        save.states.append(_state_of(self._kept.take(slot.seq_id), n_tokens, *pos))

    def prepare(self, slot: Slot | None = None, within_s: float = 1e9) -> None:
        """Make the copies of what is to be saved, of one slot or of all, as many as there is time for."""
        until = time.perf_counter() + within_s
        for save in self._unprepared.copy():
            if slot is not None and save.slot is not slot:
                continue
            try:
                if not self._prepare(save, until):
                    return
            except MemoryError:
                log.warning("no memory for the cache of prompts: slot %d is saved in part", save.slot.id)
            except BaseException:
                save.transfer.abandon()
                self._prepared(save)
                raise
            self._prepared(save)

    def _prepared(self, save: Save) -> None:
        self._unprepared.remove(save)
        save.transfer.seal()

    def _prepare(self, save: Save, until: float) -> bool:
        """Whether all its copies are made."""
        if save.cells is None:
            self._look(save)
        assert save.cells is not None
        n = len(save.cells) + save.first
        n_step = -(-N_PREPARE // self._copier.n_blocks) * self._copier.n_blocks
        while save.at < n and time.perf_counter() < until:
            pieces = self._pieces(save, min(n, save.at + n_step * N_ROWS))
            if not pieces:
                return True  # no memory: the beginning is worth having too
            if not save.has_rows:
                save.has_rows = True
                self.n_saved += 1
            self._workers.add(save.transfer, self._copier.works(save.transfer.seq_id, True, pieces))
        return save.at >= n

    def _look(self, save: Save) -> None:
        """What of it is in the tree, and where the rest lies."""
        tokens = save.tokens
        path, first = self._tree.find(tokens)
        if path:
            last = path[-1]
            if first == len(tokens):
                save.parent = last
            elif first < last.end or (
                len(last.tokens) < N_ROWS and (last.is_growing or last.is_written or last.block is None)
            ):
                path.pop()  # it goes on differently: a block of its own
                first, save.parent = last.start, last.parent or self._tree.root
            elif len(last.tokens) < N_ROWS:
                save.grows, save.parent = last, last.parent or self._tree.root
            else:
                save.parent = last
        self._tree.touch(path)
        save.path, save.first = path, first
        for node in path:
            self._pin(save, node)
        # What a cut left: the slot may hold something else behind it.
        n = max(0, min(len(tokens), save.transfer.limit) - first)
        grows = save.grows if n else None
        save.grows, save.at = grows, first if grows is None else grows.start
        save.cells = self._cells.find(save.transfer.seq_id, first, n) if n else np.empty(0, np.int32)
        if grows is not None:
            grows.is_growing = True  # from here on: another save may be looked at before its part is made

    def _pieces(self, save: Save, end: int) -> list[Piece]:
        """The next parts, up to token `end` or to where there is no memory."""
        tokens, first, cells = save.tokens, save.first, save.cells
        assert cells is not None
        pieces = []
        # At once for all of them: what goes lay together, and so will what comes.
        self._tree.make_room(-(-(end - save.at) // N_ROWS) * self._cells.layout.n_block_bytes)
        while save.at < end:
            at = save.at
            part_tokens = tokens[at : min(at + N_ROWS, first + len(cells))]
            row = max(0, first - at)
            if save.grows is not None and at == save.grows.start:
                assert save.grows.block is not None
                part = _Part(part_tokens, row, save.grows.block, save.grows)
            else:
                block = self._tree.take_block()
                if block is None:
                    break
                part = _Part(part_tokens, row, block)
            save.parts.append(part)
            where = cells[at + row - first : at + len(part_tokens) - first]
            pieces.append(Piece(at + row, where, part.block.address, row, partial(self._copied, save, part)))
            save.at += N_ROWS
        return pieces

    def _copied(self, save: Save, part: _Part, n: int) -> None:
        """On a thread that copies."""

        def note() -> None:
            part.n_done = n

        self._done.put(note)

    def drain(self, n_most: int = 1 << 30) -> None:
        """Take into the tree what has been copied, at most so many blocks of each slot."""
        self._take()
        for save in list(self._running):
            is_over = save.is_over
            if is_over:
                self._take()  # what its last copies left word of
            if self._publish(save, n_most) and is_over:
                self._running.remove(save)
                self._finish(save)

    def _take(self) -> None:
        while True:
            try:
                self._done.get_nowait()()
            except queue.Empty:
                return

    def _publish(self, save: Save, n_most: int) -> bool:
        """Blocks become a part of the tree in their order, whichever thread was the first. False when some are left."""
        n_before = save.n_published
        while save.n_published < len(save.parts) and not save.is_short:
            part = save.parts[save.n_published]
            if part.n_done < 0:
                break
            if save.n_published - n_before >= n_most:
                return False
            save.n_published += 1
            tokens = part.tokens[: part.row + part.n_done]
            if part.grows is not None:
                part.grows.is_growing = False
                self._tree.grow(part.grows, tokens)
                node = part.grows
            else:
                node = self._tree.add(save.parent, tokens, part.block)
                self._pin(save, node)
                save.path.append(node)
            save.parent = node
            save.is_short = len(tokens) < len(part.tokens)
        if save.n_published > n_before:
            self._tree.touch(save.path)
        return True

    def _finish(self, save: Save) -> None:
        self.n_cut += save.is_short or save.n_published < len(save.parts)
        if save.transfer.error is not None:
            self.n_failed += 1
        self.n_bytes += save.transfer.n_bytes
        if save.grows is not None and not save.n_published:
            save.grows.is_growing = False
        for part in save.parts[save.n_published :]:
            if part.grows is None:
                self._tree.give_block(part.block)
        self._attach(save)
        self._unpin(save)
        if save.has_rows:
            self.saved(save.path)

    def _attach(self, save: Save) -> None:
        """States belong to the block of the last token they have seen."""
        for state in save.states:
            if state.data is None and state.kept is not None:
                state.data = state.kept.data
            if state.data is None:
                continue  # its copy failed, or was dropped
            node = next((node for node in save.path if node.start < state.n_tokens <= node.end), None)
            if node is not None:
                self._tree.add_state(node, state)

    @property
    def n_running(self) -> int:
        """Slots being saved."""
        return len(self._running)

    def stop(self) -> None:
        """Copy nothing more."""
        for save in self._running:
            save.transfer.abandon()
            save.transfer.seal()
            for state in save.states:
                if state.kept is not None:
                    state.kept.host_bytes()
        self._unprepared = []
        self.drain()

    def _pin(self, save: Save, node: Node) -> None:
        self._tree.pin([node])
        save.pinned.append(node)

    def _unpin(self, save: Save) -> None:
        self._tree.unpin(save.pinned)
        save.pinned = []


def _state(c: Checkpoint) -> State:
    if isinstance(c.data, KeptState):
        return _state_of(c.data, c.n_tokens, c.pos_min, c.pos_max)
    return State(c.n_tokens, c.pos_min, c.pos_max, c.data)


def _state_of(kept: KeptState, n_tokens: int, pos_min: int, pos_max: int) -> State:
    return State(n_tokens, pos_min, pos_max, kept.data, kept=kept)


def checkpoints(path: Seq[Node], n: int) -> list[Checkpoint]:
    """The states of a path up to `n` tokens that are in memory, as a slot keeps them."""
    states = [state for node in path for at, state in sorted(node.states.items()) if at <= n]
    return [Checkpoint(s.n_tokens, s.pos_min, s.pos_max, -1, s.kept or s.data) for s in states if s.data is not None]
