"""Computing without a model: a Python function says which token comes next."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from llamamg.batch import Batch
from llamamg.errors import BatchError
from llamamg.handover import HandoverError
from llamamg.runner import Done, Output, Runner
from llamamg.sequence import Sequence
from llamamg.testing.memory import FakeKV

NextToken = Callable[[Sequence, list[int]], int]


def count_up(sequence: Sequence, so_far: list[int]) -> int:
    """A stand-in model: the next token is one more than the last, kept among the printable ones."""
    return 32 + (so_far[-1] + 1 - 32) % 95


@dataclass(slots=True)
class FakeRunner(Runner):
    """Computes batches with `next_token`. `batches` records the shapes; `fail` may raise a BatchError for a batch."""

    kv: FakeKV
    next_token: NextToken = count_up
    n_batch: int = 64
    n_ubatch: int = 16
    # rows of (seq_id, pos0, n_tokens, n_logits)
    batches: list[list[tuple[int, int, int, int]]] = field(default_factory=list)
    fail: Callable[[Batch], BatchError | None] = lambda batch: None
    elapsed_s: Callable[[Batch], float] = lambda batch: 0.001  # what a batch is said to have taken
    closed: bool = False
    aborted: bool = False
    pick: Callable[[int], int] = lambda n: 0  # which of n flights ends first
    n_most: int = 0  # flights at once, so far
    _in_flight: list[Any] = field(default_factory=list)

    @property
    def n_contexts(self) -> int:  # type: ignore[override]
        return self.kv.layout.n_contexts

    @property
    def n_in_flight(self) -> int:
        return len(self._in_flight)

    def is_free(self, context: int) -> bool:
        return context not in self.kv.computing

    def _fly(self, contexts: tuple[int, ...], flight: Any) -> None:
        for context in contexts:
            assert context not in self.kv.computing, f"context {context} gets a second flight"
            self.kv.computing.add(context)
        self._in_flight.append((contexts, flight))
        self.n_most = max(self.n_most, len(self._in_flight))

    def run(self, contexts: tuple[int, ...], job: Callable[[], Any], finished: Callable[[Any, Any], None]) -> None:
        self._fly(contexts, (job, finished))

    def start(self) -> None:
        """Nothing is held back."""

    def settle(self) -> None:
        """Nothing runs on threads."""

    def wake(self) -> None:
        """Nobody waits."""

    def submit(self, batch: Batch) -> None:
        assert batch.rows
        assert batch.n_tokens <= self.n_batch
        for row in batch.rows:
            assert self.kv.layout.context(row.sequence.slot.seq_id) == batch.group == row.sequence.slot.context
        error = self.fail(batch)
        if error is not None and self.n_contexts == 1:
            raise error
        if error is not None:
            self._fly((batch.group,), Done(batch, [], 0.001, error))
            return
        self.kv.decoded(batch.group)
        for row in batch.rows:
            self.kv.put(row.sequence.slot.seq_id, row.pos0, [int(t) for t in row.tokens])
        self.kv.in_batch = {row.sequence.slot.seq_id for row in batch.rows}
        self.batches.append([(row.sequence.slot.seq_id, row.pos0, len(row), row.n_logits) for row in batch.rows])
        self._fly((batch.group,), batch)

    def collect(self) -> Done | None:
        if not self._in_flight:
            return None
        contexts, flight = self._in_flight.pop(self.pick(len(self._in_flight)))
        self.kv.computing.difference_update(contexts)
        if isinstance(flight, Done):
            return flight
        if isinstance(flight, tuple):
            self._job(*flight)
            return None
        batch: Batch = flight
        return Done(batch, [self._output(row) for row in batch.rows if row.n_logits], self.elapsed_s(batch))

    def _job(self, job: Callable[[], Any], finished: Callable[[Any, Any], None]) -> None:
        try:
            result = job()
        except HandoverError as error:
            finished(None, error)
        else:
            finished(result, None)

    def _output(self, row: Any) -> Output:
        held = self.kv.held[row.sequence.slot.seq_id]
        tokens: list[int] = []
        draft = list(row.tokens)[len(row) - row.n_logits + 1 :]
        for i in range(row.n_logits):
            tokens.append(self.next_token(row.sequence, held[: row.pos0 + len(row) - row.n_logits + i + 1]))
            if i >= len(draft) or tokens[-1] != draft[i]:
                break
        return Output(row, tokens)

    def abort(self) -> None:
        self.aborted = True

    def close(self) -> None:
        self.closed = True
