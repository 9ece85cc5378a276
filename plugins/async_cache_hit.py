"""Restoring: blocks of a path are copied into the cells of a slot, piece by piece, while others decode."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llamamg import N_ROWS, Cells, Copier, Piece, PlaceWork, Slot, StateWork, Transfer, Workers
from llamamg_plugins.async_cache_blocks import Block
from llamamg_plugins.async_cache_kept import KeptStates
from llamamg_plugins.async_cache_node import Node, State, Tokens
from llamamg_plugins.async_cache_save import checkpoints
from llamamg_plugins.async_cache_tree import Tree

PLACE_S, PLACE_ALONE_S = 0.001, 0.02  # time for cells in one step, beside others and with nobody there
N_PLACE = 2 * N_ROWS
N_APPEND = (
    32  # blocks that copies are made of at once, or as many as one copy has, where nothing has to be asked about cells
)
Load = Callable[[Any, NDArray[np.uint8]], None]  # fills memory from disk; raises when the file is not what it was


class Hit:
    """`tokens` that a path of blocks begins with. Blocks that are only on disk are read on the way.

    It is in `under_way` from start to end: then `go_on_beside` is to be called where there is time.
    """

    def __init__(
        self, path: list[Node], tokens: Tokens, state: State | None, tree: Tree, cells: Cells, kv: Any,
        copier: Copier, workers: Workers, kept: KeptStates, load: Load, ended: Callable[[Hit], None],
        is_alone: Callable[[], bool], under_way: list[Hit],
    ) -> None:  # fmt: skip
        self._is_alone, self._under_way = is_alone, under_way
        self.path, self.n_tokens, self.state = path, len(tokens), state
        self._tree, self._cells, self._kv, self._kept = tree, cells, kv, kept
        self._copier, self._workers, self._load, self._ended = copier, workers, load, ended
        self.transfer: Transfer | None = None
        self.failed: Exception | None = None
        self.n_kept = 0
        self._n_placed = 0
        self._has_begun = False
        self._appends = False  # cells will be positions, and a thread gives them out
        self._tokens = tokens
        self._is_ahead = False  # copies are being made where there is time for it
        self._fresh: dict[int, Block] = {}  # blocks being read, by the index of their node in the path
        self._state_data: NDArray[np.uint8] | None = None
        self._state_wanted = state is not None
        self._reading: Transfer | None = None  # of the state, from disk
        self._staging: Transfer | None = None  # of the state, to its devices
        self._staged: Any = None

    # -- as PrefixHit's

    starts_early = True

    def start(self, slot: Slot, n_kept: int) -> None:
        """Pin the blocks, and begin to read what is only on disk."""
        self._under_way.append(self)
        self.slot, self.n_kept, self._n_placed = slot, n_kept, n_kept
        self.transfer = Transfer(slot.seq_id, False, self._cells.fence(slot.seq_id))
        self._tree.pin(self.path)
        state = self.state
        if state is not None and state.data is None and not state.is_on_device:
            self._reading = Transfer(slot.seq_id, to_host=False)
            stored = state.stored  # its file may go meanwhile
            self._workers.add(self._reading, [_Read(lambda: self._read_state(stored))])
            self._reading.seal()
        elif state is not None:
            self._state_data = state.data

    def ready(self) -> bool:
        """Give out more cells, and say whether everything is copied."""
        assert self.transfer is not None
        self._try(self._go_on)
        self.failed = self.failed or self.transfer.error
        if self.failed is not None:
            self.transfer.seal()
            return self.transfer.is_over
        return self.transfer.is_over and not self._state_wanted

    def go_on_beside(self, within_s: float) -> None:
        """Make more copies, where that touches nothing of the library's: a batch may be on its way."""
        self._try(lambda: self._go_on_beside(within_s))

    def restore(self, slot: Slot) -> None:
        """Give the slot its snapshots; after a failure, empty it."""
        self._close()
        if self.failed is not None:
            self.n_tokens = 0
            self._kv.remove(slot.seq_id, -1, -1)
        elif self._kv.needs_checkpoints:
            slot.checkpoints = checkpoints(self.path, self.n_tokens)
        self._ended(self)

    def abandon(self) -> None:
        """Stop copying; what is read from disk by then is kept."""
        for transfer in (self.transfer, self._reading, self._staging):
            if transfer is not None:
                transfer.abandon()
                transfer.seal()
                transfer.wait(1.0)
        self._close()
        self.n_tokens = 0
        self._ended(self)

    # -- inside

    def _try(self, act: Callable[[], None]) -> None:
        assert self.transfer is not None
        if self.failed is None:
            try:
                act()
            except Exception as error:  # no room in the cache, or a state that libllama refuses
                self.failed = error
                self.transfer.abandon()
                self.transfer.seal()

    def _go_on_beside(self, within_s: float) -> None:
        self._append()
        if self._appends:
            self._place(within_s)
            self._is_ahead = True

    def _go_on(self) -> None:
        assert self.transfer is not None
        self._append()
        is_alone = self._is_alone()
        if is_alone or not self._is_ahead:
            self._place(PLACE_ALONE_S if is_alone else PLACE_S)
        self._is_ahead = False
        if self._state_wanted and self.transfer.error is None:
            self._state_wanted = not self._state_is_put()

    def _place(self, within_s: float) -> None:
        """Make copies of the next blocks."""
        assert self.transfer is not None
        until = time.perf_counter() + within_s
        n_append = N_ROWS * self._copier.n_blocks * -(-N_APPEND // self._copier.n_blocks)
        while self._n_placed < self.n_tokens and time.perf_counter() < until:
            n_most = n_append if self._appends else N_PLACE
            end = min(self.n_tokens, self._n_placed - self._n_placed % N_ROWS + n_most)
            if self._appends:
                where = np.arange(self._n_placed, end, dtype=np.int32)
            else:
                where = self._cells.place(self.slot.seq_id, self._n_placed, self._tokens[self._n_placed : end])
            pieces = list(self._pieces(self._n_placed, where))
            self._n_placed = end
            self._workers.add(self.transfer, self._copier.works(self.slot.seq_id, False, pieces))
        if self._n_placed == self.n_tokens:
            self.transfer.seal()

    def _append(self) -> None:
        """Where cells will be positions: give them out on the threads that copy, in front of the works that fill them."""
        assert self.transfer is not None
        if self._has_begun:
            return
        self._has_begun = True
        seq_id, begin, n = self.slot.seq_id, self.n_kept, self.n_tokens - self.n_kept
        self._appends = n > 0 and self._cells.appends(seq_id, begin, n)
        self._is_ahead = self._appends
        if self._appends:
            self._workers.add(self.transfer, [PlaceWork(self._cells, seq_id, self._tokens, begin)])

    def _pieces(self, pos: int, where: NDArray[np.int32]) -> Any:
        end = pos + len(where)
        blocks = range(pos // N_ROWS, -(-end // N_ROWS))
        # At once for all of them: what goes lay together, and so will what comes.
        self._tree.make_room(sum(self.path[i].block is None for i in blocks) * self._cells.layout.n_block_bytes)
        for i in blocks:
            node = self.path[i]
            a, b = max(pos, node.start), min(end, node.end)
            block, prepare = node.block, None
            if block is None:
                block = self._fresh[i] = self._tree.fresh_block()

                def prepare(node: Node = node, block: Block = block) -> None:
                    self._load(node.stored, block.view)

            yield Piece(a, where[a - pos : b - pos], block.address, a - node.start, prepare=prepare)

    # -- the state

    def _state_is_put(self) -> bool:
        """Bring the state to its devices beside the rows, and put it into the sequence behind them; True once that is done.

        Between two batches: a decode of others may swap the rows of recurrent states.
        """
        assert self.transfer is not None
        state = self.state
        if state is not None and state.is_on_device and state.kept is not None:
            if not self.transfer.is_over:
                return False
            if state.kept.put(self.slot.seq_id):
                self._kept.used(state.kept)
                return True
            self._state_data = state.kept.host_bytes()
        if not _is_done(self._reading):
            return False
        data = self._state_data
        if data is None:
            raise RuntimeError("the state is not there any more")
        if self._kept.n_bytes_max and self._staging is None:
            self._stage(data)
        if not self.transfer.is_over or not _is_done(self._staging):
            return False
        if self._staged is not None:
            self._staged.put(self.slot.seq_id)
            return True
        copying = self._cells.load_state(self.slot.seq_id, data)
        try:
            copying.copy(data, 0, copying.n_bytes)
        finally:
            copying.close()
        return True

    def _stage(self, data: NDArray[np.uint8]) -> None:
        self._staging = Transfer(self.slot.seq_id, to_host=False)
        copying = self._cells.load_state(self.slot.seq_id, data)
        if self._kept.detach(copying):
            self._staged = copying
            self._workers.add(self._staging, [StateWork(self._copier, copying, False, data, lambda data: None)])
        self._staging.seal()

    def _read_state(self, stored: Any) -> None:
        data = np.empty(stored.n_bytes, np.uint8)
        self._load(stored, data)
        self._state_data = data

    def _close(self) -> None:
        """Everything is copied or will not be: nobody uses the blocks."""
        if self in self._under_way:
            self._under_way.remove(self)
        is_good = self.failed is None and self.transfer is not None and self.transfer.limit > 0
        for i, block in self._fresh.items():
            if is_good and self.path[i].block is None:
                self.path[i].block = block
            else:
                self._tree.give_block(block)
        self._fresh = {}
        self._staged = None
        state, data = self.state, self._state_data
        if is_good and state is not None and state.data is None and data is not None:
            self._tree.hold(state, data)
        self._tree.unpin(self.path)
        self._tree.make_room(0)


def _is_done(transfer: Transfer | None) -> bool:
    """Whether nothing is under way. Raises what went wrong."""
    if transfer is None:
        return True
    if transfer.is_over and transfer.error is not None:
        raise transfer.error
    return transfer.is_over


class _Read:
    """A work that reads from disk and touches no sequence."""

    start, end, n_chunks, n_bytes = 0, 1 << 62, 1, 0

    def __init__(self, read: Callable[[], None]) -> None:
        self._read = read

    def copy(self, chunk: int, limit: int) -> None:
        """All of it."""
        self._read()

    def finish(self, limit: int) -> None:
        """Nothing is left."""
