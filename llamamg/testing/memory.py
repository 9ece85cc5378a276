"""Sequence memory without a library."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from llamamg.handover import HandoverError
from llamamg.kvcache import ON_DEVICE, PARTIAL_ONLY, KVCache, Removal
from llamamg.layout import Layout, one_context


class FakeKV(KVCache):
    """Sequence memory as sets of positions, with the rules of a plain, or of a hybrid, cache. Misuse is an AssertionError."""

    def __init__(
        self,
        n_seq: int,
        *,
        hybrid: bool = False,
        n_rs_seq: int = 0,
        snapshots: bool = True,
        layout: Layout | None = None,
    ) -> None:
        self.layout = layout or one_context(n_seq)
        n_ids = self.layout.prefill.stop or n_seq
        self.held: dict[int, list[int]] = {i: [] for i in range(n_ids)}
        self.rows: dict[int, list[int]] = {i: [] for i in range(n_ids)}  # cells as they are in memory, cut off or not
        self.cells_are_positions = True
        self.transfers: list[tuple[int, int]] = []
        self.fail_transfer: Callable[[int, int], bool] = lambda source, target: False
        self.computing: set[int] = set()  # contexts that are in flight: nobody may touch their memory
        self.in_batch: set[int] = set()  # sequences of the last batch
        self.n_swa, self.n_rs_seq, self.can_shift = 0, n_rs_seq, not hybrid
        self.removal = Removal.PART if not hybrid else Removal.BOUNDED if n_rs_seq else Removal.FULL
        self.copies: list[tuple[int, int]] = []
        self.uncopied: list[tuple[int, int]] = []  # of them, those whose cells the next decode of their context copies
        self.settled: list[int] = []  # contexts that a decode of nobody's settled
        self.can_snapshot = snapshots  # on the device
        self._snapshots = {}
        self.cut: set[int] = set()  # a recurrent state goes back at the next decode, and once only
        self.n_written: dict[int, int] = {}  # states of its last tokens that the last decode of a sequence left

    def put(self, seq_id: int, pos0: int, tokens: list[int]) -> None:
        """What a decode does; positions must follow each other."""
        assert pos0 == len(self.held[seq_id]), (
            f"sequence {seq_id} holds {len(self.held[seq_id])} tokens, got position {pos0}"
        )
        self.held[seq_id].extend(tokens)
        self.rows[seq_id][pos0 : pos0 + len(tokens)] = tokens
        self.cut.discard(seq_id)
        self.n_written[seq_id] = len(tokens)

    def _touch(self, seq_id: int) -> None:
        context = self.layout.context(seq_id)
        assert context not in self.computing, f"context {context} computes and its sequence {seq_id} is touched"

    def _check_copied(self, seq_id: int, is_written: bool) -> None:
        """What a copy is still to write must not be read, and what it is to read or write must not be written."""
        ends = {id_ for pair in self.uncopied for id_ in (pair if is_written else pair[1:])}
        assert seq_id not in ends, f"the next decode copies cells of sequence {seq_id}, and they are touched before"

    def decoded(self, context: int) -> None:
        """A context begins to decode: cells of moved sequences are copied."""
        self.uncopied = [pair for pair in self.uncopied if self.layout.context(pair[0]) != context]

    def copy_now(self, seq_id: int) -> bool:
        if self.held[seq_id]:
            return False
        self.decoded(self.layout.context(seq_id))
        self.settled.append(self.layout.context(seq_id))
        return True

    def remove(self, seq_id: int, p0: int, p1: int = -1) -> bool:
        # The only context is computed by whoever calls this: what an idle sequence holds may go whole then.
        if self.layout.n_contexts > 1 or p0 > 0 or p1 >= 0 or seq_id in self.in_batch:
            self._touch(seq_id)
        n = len(self.held[seq_id])
        begin, end = max(p0, 0), n if p1 < 0 else min(p1, n)
        if self.removal is not Removal.PART and 0 < begin < n:
            if begin < n - self.n_rs_seq or seq_id in self.cut:
                return False
            assert n - begin < self.n_written[seq_id], (
                f"sequence {seq_id} goes back by {n - begin} tokens to a state that its last decode did not write"
            )
            self.cut.add(seq_id)
        if begin == 0 and end == n:
            self.cut.discard(seq_id)
        del self.held[seq_id][begin:end]
        return True

    def copy(self, source: int, target: int) -> None:
        self._touch(source)
        assert self.layout.context(source) == self.layout.context(target)
        assert source not in self.cut, (
            f"sequence {source} goes back at its next decode, and libllama would not copy that"
        )
        self.held[target] = list(self.held[source])
        self.rows[target] = list(self.held[source])
        self.copies.append((source, target))
        self.uncopied.append((source, target))

    def shift(self, seq_id: int, p0: int, p1: int, delta: int) -> None:
        assert self.can_shift

    def pos_min(self, seq_id: int) -> int:
        self._touch(seq_id)
        n = len(self.held[seq_id])
        return n - 1 if self.removal is not Removal.PART or n == 0 else 0

    def pos_max(self, seq_id: int) -> int:
        return len(self.held[seq_id]) - 1

    def clear(self) -> None:
        for tokens in self.held.values():
            tokens.clear()

    def save(self, seq_id: int, flags: int = 1) -> NDArray[np.uint8] | None:
        self._touch(seq_id)
        if flags & ON_DEVICE and not self.can_snapshot:
            return None
        if not flags & PARTIAL_ONLY or self.n_swa:  # a recurrent state goes with a move at once
            self._check_copied(seq_id, is_written=False)
        return np.array(self.held[seq_id], np.int32).view(np.uint8)

    def size(self, seq_id: int, flags: int = 0) -> int:
        return 4 * len(self.held[seq_id])

    def restore(self, seq_id: int, data: NDArray[np.uint8], flags: int = 1) -> bool:
        self._touch(seq_id)
        self._check_copied(seq_id, is_written=True)
        self.held[seq_id] = data.view(np.int32).tolist()
        self.rows[seq_id] = list(self.held[seq_id])
        self.cut.discard(seq_id)
        self.n_written[seq_id] = 0
        return True

    def transfer(self, source: int, target: int, swap_bytes_max: int = 0) -> bool:
        """As ContextsKV's."""
        assert self.layout.context(source) != self.layout.context(target)
        if self.fail_transfer(source, target):
            self.held[target] = []
            raise HandoverError("told to fail")
        self._check_copied(source, is_written=False)
        self._check_copied(target, is_written=True)
        self.transfers.append((source, target))
        swap = 0 < 4 * len(self.held[target]) <= swap_bytes_max
        self.held[source], self.held[target] = (self.held[target] if swap else []), self.held[source]
        for seq_id in (source, target):
            self.rows[seq_id] = list(self.held[seq_id])
        self.cut = (self.cut - {source, target}) | ({target} if source in self.cut else set())
        return swap
