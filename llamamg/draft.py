"""Drafted tokens: how many may be proposed, and how the memory goes back when they are rejected."""

from __future__ import annotations

from collections.abc import Callable

from llamamg.batch import Row
from llamamg.kvcache import KVCache, Removal
from llamamg.sequence import Sequence


class Rollback:
    """Takes rejected tokens out of a sequence. A state that cannot be cut goes back by the context's own states, or by a snapshot.

    After a snapshot came back, the accepted tokens behind it are computed again at the head of the sequence's next row.
    """

    def __init__(self, kv: KVCache, is_settled: Callable[[int], bool]) -> None:
        """`is_settled`: whether no decode will copy cells about in a context."""
        self._kv, self._is_settled = kv, is_settled
        # Tokens that go back without a snapshot.
        self._n_direct = 1 << 30 if kv.removal is Removal.PART else kv.n_rs_seq

    def prepare(self, sequence: Sequence, pos0: int, n_again: int, n_draft: int) -> int:
        """Before a row is planned that begins at `pos0` with `n_again` old tokens: how many may be drafted behind them.

        Takes a snapshot where that is needed. Not in front of old tokens: they would be computed again and again.
        """
        seq_id = sequence.slot.seq_id
        self._kv.forget_snapshot(seq_id)
        if n_draft <= self._n_direct:
            return n_draft
        # A sequence that was moved has its window's rows only after the next decode.
        is_whole = not self._kv.n_swa or self._is_settled(sequence.slot.context)
        if n_again == 0 and is_whole and self._kv.snapshot(seq_id, pos0):
            return n_draft
        return self._n_direct

    def accepted(self, row: Row) -> None:
        """All of a draft was right."""
        self._kv.forget_snapshot(row.sequence.slot.seq_id)

    def reject(self, row: Row, n_kept: int) -> bool:
        """Keep the first `n_kept` tokens of a computed row; False when the sequence cannot go back at all."""
        sequence, slot = row.sequence, row.sequence.slot
        keep = row.pos0 + n_kept
        if len(row) - n_kept <= self._n_direct and self._kv.remove(slot.seq_id, keep, -1):
            self._kv.forget_snapshot(slot.seq_id)
            sequence.goes_back = self._kv.removal is not Removal.PART
        elif self._kv.go_back(slot.seq_id, row.pos0):
            sequence.replay_from = row.pos0
        else:
            return False
        slot.tokens.keep(keep)
        sequence.n_past = keep
        return True

    def take_back(self, row: Row) -> bool:
        """Remove what a failed batch left of a row; False when the sequence cannot be cut there."""
        seq_id = row.sequence.slot.seq_id
        # States to go back to are written by a decode that ends well; libllama goes to those of an earlier one and says nothing.
        if self._kv.removal is not Removal.BOUNDED and (
            self._kv.pos_max(seq_id) < row.pos0 or self._kv.remove(seq_id, row.pos0, -1)
        ):
            return True
        # The row is tried again, and may have to go back again.
        return self._kv.go_back(seq_id, row.pos0) and self._kv.snapshot(seq_id, row.pos0)

    def forget(self, sequence: Sequence) -> None:
        """The sequence leaves its slot, which claims only what is in the memory."""
        slot = sequence.slot
        self._kv.forget_snapshot(slot.seq_id)
        slot.goes_back = sequence.goes_back
        if sequence.replay_from >= 0:
            slot.tokens.keep(sequence.replay_from)


def begin_row(sequence: Sequence) -> tuple[int, list[int]]:
    """Position and first tokens of a decoding sequence's next row: what is to be computed again, and the sampled one."""
    tokens, pos0 = sequence.slot.tokens, sequence.replay_from
    if pos0 < 0:
        return len(tokens), [sequence.last_token]
    sequence.replay_from = -1
    return pos0, [*tokens.view()[pos0:].tolist(), sequence.last_token]
