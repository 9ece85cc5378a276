"""What each step computes. With no plugin on, the batches are llama-server's: decode rows first, then prompts in slot order."""

from __future__ import annotations

import time
from collections.abc import Callable
from collections.abc import Sequence as Seq
from typing import Protocol

from llamamg.admission import Admission, Waiting
from llamamg.arrange import Arranger, Runs
from llamamg.batch import Batch, Plan, Row, StepState
from llamamg.checkpoint import CheckpointPolicy
from llamamg.completion import Completion
from llamamg.draft import Rollback
from llamamg.hookcalls import HookCalls
from llamamg.hooks import Hook
from llamamg.kvcache import KVCache
from llamamg.layout import Layout
from llamamg.moves import Moves
from llamamg.placing import Placing, by_seq_id
from llamamg.request import Event, Failed, FinishReason, Request, Started
from llamamg.rows import Rows
from llamamg.runner import Done
from llamamg.sequence import Sequence, SequenceState
from llamamg.slot import Slot
from llamamg.stats import ItlWindow, Stats
from llamamg.staying import Staying


class Watcher(Protocol):
    """Told when a request gets a slot and when it leaves it (the slot still holds its tokens)."""

    def began(self, sequence: Sequence) -> None: ...
    def released(self, sequence: Sequence, reason: FinishReason) -> None: ...


class Flying(Runs, Protocol):
    """What is needed of the runner."""

    def is_free(self, context: int) -> bool: ...


class Scheduler:
    """Policy and bookkeeping; it never computes anything. All of it runs on the engine thread.

    `outbox` collects (request id, event) pairs until the engine delivers them.
    """

    def __init__(
        self,
        slots: list[Slot],
        kv: KVCache,
        calls: HookCalls,
        completion: Completion,
        admission: Admission,
        checkpoints: CheckpointPolicy,
        arranger: Arranger,
        stats: Stats,
        runner: Flying,
        layout: Layout,
        *,
        n_prompt_local: int,
        n_batch: int,
        n_ubatch: int,
        n_draft_max: int,
        quarantine: Callable[[Hook, Exception], None],
    ) -> None:
        self.slots, self.stats = slots, stats
        self.outbox: list[tuple[int, Event]] = completion.outbox
        self.state = StepState(n_batch, n_ubatch, slots=slots, itl=ItlWindow(), groups=layout.groups)
        self._kv, self._calls, self._completion, self._admission = kv, calls, completion, admission
        self._arranger, self._quarantine = arranger, quarantine
        self._n_batch, self._rollback = n_batch, Rollback(kv, arranger.is_settled)
        self._rows = Rows(
            calls, completion, checkpoints, self._rollback, stats, n_batch=n_batch, n_draft_max=n_draft_max
        )
        self._running: dict[int, Sequence] = {}
        self._runner, self._layout = runner, layout
        self.moves = Moves(
            slots,
            kv,
            layout,
            runner,
            stats,
            n_prompt_local=n_prompt_local,
            fail=self.fail,
            moved=self._note,
            is_settled=arranger.is_settled,
        )
        self.moves.changing = arranger.changing = self.changing
        self._placing = Placing(
            slots, calls, arranger, self.moves, layout, self._show, self._rows.undrafted, Staying(slots, kv, calls)
        )
        self._leaving: list[Sequence] = []  # ended while a batch of theirs was in flight
        self.watcher: Watcher | None = None

    # -- requests

    def submit(self, waiting: Waiting) -> None:
        """Queue a request."""
        self._calls.each("request_arrived", waiting.request)
        self._admission.add(waiting)

    def cancel(self, request_id: int) -> None:
        """Forget a request, queued or running. What its slot holds stays for reuse."""
        waiting = self._admission.remove(request_id)
        if waiting is not None:
            self._drop(waiting)
        elif (sequence := self._running.get(request_id)) is not None:
            self.release(sequence, FinishReason.CANCELLED)

    def fail(self, sequence: Sequence, failed: Failed) -> None:
        """End a running sequence with an error; the slot's memory is given up, since nobody knows what is in it."""
        self.outbox.append((sequence.request.id, failed))
        self.release(sequence, FinishReason.FAILED)
        self.clear(sequence.slot)

    def release(self, sequence: Sequence, reason: FinishReason) -> None:
        """Take a sequence out of its slot."""
        slot = sequence.slot
        sequence.finish, sequence.state = reason, SequenceState.FINISHED
        self._running.pop(sequence.request.id, None)
        if self.watcher is not None:
            self.watcher.released(sequence, reason)
        self._rollback.forget(sequence)
        if self._calls.hooks.slot_released:
            self._calls.each("slot_released", slot, sequence, reason)
        if self._runner.is_free(slot.context):
            self._completion.closed(sequence)
        else:
            self._leaving.append(sequence)  # its sampler may be at work
        slot.last = self._completion.view(slot)
        slot.sequence = None
        slot.t_last_used = time.perf_counter()
        self._placing.note(slot)
        self.moves.leave(slot)

    def clear(self, slot: Slot) -> None:
        """Empty an idle slot."""
        self.changing(slot)
        self._kv.remove(slot.seq_id, -1, -1)
        slot.tokens.keep(0)
        slot.checkpoints = []

    def changing(self, slot: Slot) -> None:
        """Tell plugins that everything a slot holds is about to move or go."""
        if self._calls.hooks.slot_changing:
            self._calls.each("slot_changing", slot, 0)
        slot.cut(0)

    def take_back(self, row: Row) -> bool:
        """Remove what a failed batch left of a row in the cache; False when the sequence cannot be cut there."""
        return self._rollback.take_back(row)

    def clear_idle(self, context: int) -> bool:
        """Give up the cached tokens of the idle slot of a context unused for the longest time; False when none has any."""
        idle = [slot for slot in self.slots if not slot.busy and len(slot.tokens) and slot.context == context]
        if idle:
            self.clear(min(idle, key=lambda slot: slot.t_last_used))
        return bool(idle)

    @property
    def kv(self) -> KVCache:
        """The sequence memory."""
        return self._kv

    @property
    def running(self) -> list[Sequence]:
        """Sequences in slots."""
        return list(self._running.values())

    @property
    def n_waiting(self) -> int:
        """Queued requests."""
        return len(self._admission.queue) + len(self._admission.restorer.under_way)

    def waiting_requests(self) -> list[Request]:
        """Queued requests in order."""
        return [waiting.request for waiting in self._admission.waiting]

    def fail_waiting(self, failed: Failed) -> None:
        """Turn every queued request away."""
        for waiting in self._admission.waiting:
            self.outbox.append((waiting.request.id, failed))
            self._admission.remove(waiting.request.id)
            self._drop(waiting)

    def is_settled(self, context: int) -> bool:
        """Whether all cells of a context are where they belong; if not, its next decode copies those of moved sequences."""
        return self._arranger.is_settled(context)

    # -- steps

    def plan(self, free: Seq[int] = (0,)) -> Plan:
        """Admit what fits and choose this step's rows: one batch for each of the contexts that are free."""
        state = self._refresh()
        if self._placing.due:
            self._placing.ask(state, free)
        if self.n_waiting:
            self._admit(state, free)
            state = self._refresh()
        if self.moves.wanted:
            free = self.moves.start(free)
        plan = Plan()
        for context in free:
            if self._layout.n_contexts > 1:
                self._show(state, (context,))
            batch = self._rows.choose(state, context)
            if batch.rows:
                plan.batches.append(batch)
            elif not self.is_settled(context):
                self._arranger.settle(context, self._runner)
        if plan.batches and self._calls.hooks.plan_step:
            if self._layout.n_contexts > 1:
                self._show(state, free)
            self._let_plugins_rearrange(state, plan)
        return plan

    def make_room(self) -> bool:
        """A step's batches are submitted: do what was put off until then. Whether cells became free."""
        restorer = self._admission.restorer
        return bool(restorer.under_way) and restorer.make_room()

    def commit(self, done: Done) -> None:
        """Book a computed batch: the sequences advance, their events go to the outbox."""
        stats, now = self.stats, time.perf_counter()
        stats.n_decode += 1
        stats.n_busy_sum += len(self._running)
        self.returned(done.batch)
        self._arranger.give_back(done.batch.group)
        for row in done.batch.rows:
            if row.is_prompt and row.sequence.state is SequenceState.PREFILL:
                self._completion.prompt_advanced(row, now)
        for output in done.outputs:
            sequence = output.row.sequence
            if sequence.state is SequenceState.FINISHED:
                continue  # cancelled while it was computed
            if -1 in output.tokens:
                self.fail(
                    sequence, Failed(500, "server_error", "the sampler chose no token: the logits are not finite")
                )
                continue
            if not self._rows.verify(sequence, output.row, len(output.tokens)):
                self.fail(sequence, Failed(500, "server_error", "rejected tokens could not be taken back"))
                continue
            reason = self._completion.tokens(sequence, output, now, self.state.itl)
            if reason is not None:
                self.release(sequence, reason)
            elif output.row.is_prompt:
                self.moves.leave(sequence.slot)
        if self._calls.hooks.step_done and done.outputs:
            self._calls.each("step_done", self.state, done.outputs)

    def returned(self, batch: Batch) -> None:
        """A batch is not in flight any more: close those of its context that ended meanwhile."""
        if self._leaving:
            gone = [sequence for sequence in self._leaving if self._runner.is_free(sequence.slot.context)]
            self._leaving = [sequence for sequence in self._leaving if sequence not in gone]
            for sequence in gone:
                self._completion.closed(sequence)

    def close(self) -> None:
        """Nothing is in flight and nothing will be."""
        for sequence in self._leaving:
            self._completion.closed(sequence)
        self._leaving = []

    # -- inside a step

    def _is_used(self, context: int) -> bool:
        return any(slot.sequence is not None and slot.context == context for slot in self.slots)

    def _note(self, slot: Slot) -> None:
        self._placing.note(slot)

    def _show(self, state: StepState, contexts: Seq[int]) -> None:
        """Reduce the lists of `state` to what may be computed in these contexts."""
        running = sorted(self._running.values(), key=by_seq_id)
        ready = [s for s in running if s.slot.context in contexts and not s.slot.moving]
        state.decoding = [s for s in ready if s.state is SequenceState.DECODE]
        state.prefilling = [s for s in ready if s.state is SequenceState.PREFILL and s.n_prompt_left > 0]
        state.step += 1  # what a hook said for another context is not for this one

    def _refresh(self) -> StepState:
        state = self.state
        running = (
            sorted(self._running.values(), key=by_seq_id) if len(self._running) > 1 else list(self._running.values())
        )
        state.decoding = [s for s in running if s.state is SequenceState.DECODE]
        state.prefilling = [s for s in running if s.state is SequenceState.PREFILL and s.n_prompt_left > 0]
        state.waiting = self.waiting_requests() if self.n_waiting else []
        state.step += 1
        state.n_users, state.n_decoding = len(running), len(state.decoding)
        self.stats.n_requests_processing = len(running)
        self.stats.n_requests_deferred = len(state.waiting)
        return state

    def _admit(self, state: StepState, free: Seq[int]) -> None:
        # What idle slots held is put back after the decode that copies a moved sequence's cells: a request that wants it
        # waits. Where nobody is left to decode, the request's own prompt does that.
        free = [context for context in free if self.is_settled(context) or not self._is_used(context)]
        self._admission.restorer.may_defer = self._layout.n_contexts == 1 and bool(self._running)
        begun, refused = self._admission.admit(state, free)
        for waiting, failed in refused:
            self.outbox.append((waiting.request.id, failed))
            self._drop(waiting)
        for sequence in begun:
            self._running[sequence.request.id] = sequence
            if self.watcher is not None:
                self.watcher.began(sequence)
            self._placing.note(sequence.slot)
            self.stats.n_prompt_cached += sequence.n_past
            self.outbox.append((sequence.request.id, Started(sequence.slot.id, sequence.n_past)))
            if sequence.n_prompt == 0:
                self._completion.finish(sequence, FinishReason.LIMIT)
                self.release(sequence, FinishReason.LIMIT)
                continue
            if sequence.request.return_progress:
                self._completion.progress(sequence)
            self.moves.begin(sequence)

    def _let_plugins_rearrange(self, state: StepState, plan: Plan) -> None:
        plan.seal()
        for function in self._calls.hooks.plan_step:
            before = [(batch, list(batch.rows)) for batch in plan.batches]
            try:
                function(state, plan)
                plan.check(self._n_batch)
            except Exception as error:
                plan.batches = [batch for batch, _ in before]
                for batch, rows in before:
                    batch.rows = rows
                self._quarantine(function, error)

    def _drop(self, waiting: Waiting) -> None:
        waiting.sampler.close()
        self._completion.dropped(waiting.request)
