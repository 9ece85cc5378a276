"""What to do when libllama cannot compute a batch: make room, try smaller, and fail only those who were in it."""

from __future__ import annotations

from collections import deque

from llamamg.batch import Batch, Row
from llamamg.decisions import Fail, Retry, Shrink
from llamamg.errors import BatchError, KVFull
from llamamg.hookcalls import HookCalls
from llamamg.request import Failed
from llamamg.runner import ABORTED
from llamamg.scheduler import Scheduler
from llamamg.sequence import SequenceState


class Recovery:
    """Puts retries at the front of `pending`."""

    def __init__(self, scheduler: Scheduler, calls: HookCalls, pending: deque[Batch]) -> None:
        self._scheduler, self._calls, self._pending = scheduler, calls, pending
        self._retried: set[int] = set()  # ids of batches that are a retry after a compute error

    def alive(self, batch: Batch) -> bool:
        """Drop rows whose sequence has ended since they were planned; False when none is left."""
        ended = [row for row in batch.rows if row.sequence.state is SequenceState.FINISHED]
        if ended:
            for row in ended:
                # Planned, and never to be computed: the slot must not claim them.
                row.sequence.slot.tokens.keep(row.pos0)
            batch.rows = [row for row in batch.rows if row.sequence.state is not SequenceState.FINISHED]
        return bool(batch.rows)

    def succeeded(self, batch: Batch) -> None:
        """Forget a retry that worked."""
        self._retried.discard(id(batch))

    def recover(self, batch: Batch, error: BatchError) -> None:
        """Decide what happens to a batch that was not computed."""
        decision = self._calls.first("batch_failed", batch, error) if self._calls.hooks.batch_failed else None
        self._scheduler.stats.n_kv_retries += 1
        if not isinstance(error, KVFull) and not self._undo(batch, error):
            return
        if isinstance(decision, Fail) or error.code == ABORTED:
            self._fail(batch, error)
        elif isinstance(decision, Retry):
            self._again(batch, error, decision.n_parts)
        elif isinstance(decision, Shrink):
            self._shrink(batch, error, decision.n_tokens)
        elif isinstance(error, KVFull) and self._scheduler.clear_idle(batch.group):
            self._pending.appendleft(batch)
        else:
            self._again(batch, error, 2)

    def _undo(self, batch: Batch, error: BatchError) -> bool:
        """Some of a batch may have been computed before the error: take it back, or fail those who cannot go back."""
        lost = [row for row in batch.rows if not self._scheduler.take_back(row)]
        if lost:
            self._fail(Batch(lost, batch.group), error)
        return self.alive(batch)

    def _again(self, batch: Batch, error: BatchError, n_parts: int) -> None:
        was_retry = id(batch) in self._retried
        self._retried.discard(id(batch))
        # No room is worth halving down to one token; a compute error is tried once more and no further.
        if batch.n_tokens < 2 or (was_retry and not isinstance(error, KVFull)):
            self._fail(batch, error)
            return
        parts = [batch]
        while len(parts) < n_parts:
            largest = max(parts, key=lambda part: part.n_tokens)
            halves = [half for half in largest.halves() if half.rows]
            if len(halves) < 2:
                break
            at = parts.index(largest)
            parts[at : at + 1] = halves
        if len(parts) == 1:
            # What cannot be halved is one row with a draft, which is verified whole or not at all.
            self._drop_draft(batch.rows[0])
        self._retried.update(id(part) for part in parts)
        self._pending.extendleft(reversed(parts))

    def _drop_draft(self, row: Row) -> None:
        sequence = row.sequence
        n = len(row) - row.n_logits + 1
        sequence.slot.tokens.keep(row.pos0 + n)
        sequence.n_past = row.pos0 + n
        row.tokens, row.n_logits = row.tokens[:n], 1

    def _shrink(self, batch: Batch, error: BatchError, n_tokens: int) -> None:
        freed = 0
        while freed < n_tokens:
            before = sum(len(slot.tokens) for slot in self._scheduler.slots)
            if not self._scheduler.clear_idle(batch.group):
                break
            freed += before - sum(len(slot.tokens) for slot in self._scheduler.slots)
        if freed:
            self._pending.appendleft(batch)
        else:
            self._again(batch, error, 2)

    def _fail(self, batch: Batch, error: BatchError) -> None:
        message = "Context size has been exceeded." if isinstance(error, KVFull) else str(error)
        for sequence in {id(row.sequence): row.sequence for row in batch.rows}.values():
            if sequence.state is not SequenceState.FINISHED:
                self._scheduler.fail(sequence, Failed(500, "server_error", message))
