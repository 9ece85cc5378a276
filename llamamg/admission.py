"""From the queue into a slot: who is next, which slot, and how much of it can be reused."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

from llamamg.batch import StepState
from llamamg.checkpoint import CheckpointPolicy
from llamamg.decisions import Defer, Reject
from llamamg.hookcalls import HookCalls
from llamamg.kvcache import KVCache
from llamamg.output import TextStream
from llamamg.request import Failed, Request, Timings
from llamamg.restoring import Restorer
from llamamg.sampler import Sampler
from llamamg.sequence import Sequence
from llamamg.slot import Slot
from llamamg.transfer import Transfer
from llamamg.transfer.job import ALL

COPY_S_MAX = 5.0  # for which a request lets others' tokens be saved first; to compute them again takes longer


@dataclass(slots=True, eq=False)
class Waiting:
    """A queued request with its sampler, which was built off the engine thread."""

    request: Request
    sampler: Sampler
    behind: Transfer | None = None  # what is copied out of the slot it would get, where it waits for that
    until: int = 0  # token up to which it does
    latest: dict[Transfer, float] = field(default_factory=dict)  # until when it waits for each, in perf_counter seconds


class Admission:
    """The queue. Lower `priority` first, then arrival; a request for a busy slot lets others pass."""

    def __init__(
        self,
        slots: list[Slot],
        kv: KVCache,
        checkpoints: CheckpointPolicy,
        calls: HookCalls,
        *,
        n_ctx_slot: int,
        similarity: float,
        n_batch: int,
        moves_prompts: bool,
        is_settled: Callable[[int], bool],
    ) -> None:
        """`moves_prompts`: they may be computed in another context.

        `is_settled`: whether no decode will copy cells about in a context.
        """
        self.queue: list[Waiting] = []
        self._slots, self._kv, self._checkpoints, self._calls = slots, kv, checkpoints, calls
        self._n_ctx_slot, self._similarity, self._is_settled = n_ctx_slot, similarity, is_settled
        self._n_batch, self._moves_prompts = n_batch, moves_prompts
        self.restorer = Restorer(kv, calls, self._changing)

    def add(self, waiting: Waiting) -> None:
        """Queue a request behind those that go before it."""
        key = (waiting.request.priority, waiting.request.id)
        at = len(self.queue)
        while at and (self.queue[at - 1].request.priority, self.queue[at - 1].request.id) > key:
            at -= 1
        self.queue.insert(at, waiting)

    def remove(self, request_id: int) -> Waiting | None:
        """Take a request out of the queue; None when it is not there."""
        for i, waiting in enumerate(self.queue):
            if waiting.request.id == request_id:
                return self.queue.pop(i)
        return self.restorer.remove(request_id)

    @property
    def waiting(self) -> list[Waiting]:
        """All that have no sequence yet: those whose slot is being filled, then the queue."""
        return [restoring.waiting for restoring in self.restorer.under_way] + self.queue

    def admit(self, state: StepState, free: Seq[int] = (0,)) -> tuple[list[Sequence], list[tuple[Waiting, Failed]]]:
        """Move requests into idle slots of the `free` contexts; the sequences that begin, and the requests turned away.

        A request for which a slot of another context is best waits for that.
        """
        begun: list[Sequence] = []
        refused: list[tuple[Waiting, Failed]] = []
        if self.restorer.under_way:
            begun += [self._begin(r.waiting, r.slot) for r in self.restorer.finished(free)]
        i, awaited = 0, set()
        while i < len(self.queue) and any(not slot.busy for slot in self._slots):
            waiting = self.queue[i]
            if waiting.request.id_slot >= 0 and self._slots[waiting.request.id_slot % len(self._slots)].busy:
                i += 1
                continue
            decision = self._calls.first("admit", waiting.request, state) if self._calls.hooks.admit else None
            if isinstance(decision, Defer):
                break
            if isinstance(decision, Reject):
                self.queue.pop(i)
                refused.append((waiting, Failed(503, "unavailable_error", decision.reason)))
                continue
            slot = self.choose(waiting.request, free)
            if slot.context not in free or slot.id in awaited:
                i += 1
                continue
            if not self._may_begin(waiting, slot):
                awaited.add(slot.id)
                i += 1
                continue
            self.queue.pop(i)
            if not slot.restoring:
                begun.append(self._begin(waiting, slot))
        return begun, refused

    def _may_begin(self, waiting: Waiting, slot: Slot) -> bool:
        """Whether the slot is the request's, perhaps after it was filled; False where what it holds is to be saved first."""
        copying, hooks = slot.copying, self._calls.hooks
        if copying is None and not hooks.find_prefix:
            return True
        now = time.perf_counter()
        may_wait = copying is not None and bool(hooks.slot_released) and now < waiting.latest.get(copying, math.inf)
        if may_wait and copying is not None and copying is waiting.behind and not copying.is_past(waiting.until):
            return False
        n_common, n_own = self._own(slot, waiting.request)
        # Where cells are positions each step overwrites its own: the copy only has to be ahead of the first one.
        overwrites = self._kv.cells_are_positions and not self._moves_prompts
        until = n_own + self._n_batch if overwrites else ALL
        is_later = may_wait and slot.loses(n_own, until)
        # Not where the next decode would copy other cells over what is put there.
        if not is_later and hooks.find_prefix and waiting.request.cache_prompt and self._is_settled(slot.context):
            is_later = self.restorer.offer(waiting, slot, n_common, n_own, may_wait)
            until = ALL
        if is_later and copying is not None:
            waiting.latest.setdefault(copying, now + COPY_S_MAX)
            waiting.behind, waiting.until = copying, until
        return not is_later

    def _begin(self, waiting: Waiting, slot: Slot) -> Sequence:
        request = waiting.request
        sequence = Sequence(request, slot, waiting.sampler, TextStream(request.stop), n_predict=request.n_predict)
        n_past = self._reuse(slot, request)
        slot.tokens.keep(n_past)
        slot.sequence = sequence
        sequence.n_past, sequence.goes_back = n_past, slot.goes_back and n_past > 0
        slot.goes_back = False
        sequence.t_start = time.perf_counter()
        sequence.timings = Timings(cache_n=n_past, queue_ms=1e3 * (sequence.t_start - request.arrival))
        return sequence

    def choose(self, request: Request, free: Seq[int] = (0,)) -> Slot:
        """The slot named by the request, else a plugin's choice, else the longest common prefix, else the least recently used."""
        if request.id_slot >= 0:
            return self._slots[request.id_slot % len(self._slots)]
        if self._calls.hooks.select_slot:
            chosen = self._calls.first("select_slot", request, self._slots, check=_refuse_busy)
            if chosen is not None:
                return chosen  # type: ignore[no-any-return]
        idle = [slot for slot in self._slots if not slot.busy]
        if self._similarity > 0 and len(request.prompt):
            best, best_similarity = None, self._similarity
            for slot in idle:
                similarity = slot.tokens.common_prefix(request.prompt) / len(request.prompt)
                if similarity > best_similarity:
                    best, best_similarity = slot, similarity
            if best is not None:
                return best
        return least_recently_used([slot for slot in idle if slot.context in free] or idle)

    def _own(self, slot: Slot, request: Request) -> tuple[int, int]:
        """Tokens of the prompt that the slot holds, and how many of these it can reuse."""
        n_common = slot.tokens.common_prefix(request.prompt) if request.cache_prompt else 0
        return n_common, self._checkpoints.reusable(slot, n_common, len(request.prompt))

    def _reuse(self, slot: Slot, request: Request) -> int:
        """Prepare the slot's memory for the prompt; how many of its tokens need not be computed again."""
        n_past, n_own = self._own(slot, request)
        if n_own == len(request.prompt) and n_own > 0:
            n_own -= 1
        self._changing(slot, n_own, at_once=not self._kv.cells_are_positions)
        n_past = self._checkpoints.rewind(slot, n_past, len(request.prompt))
        if n_past == len(request.prompt) and n_past > 0:
            n_past -= 1  # at least one token must be computed, or there are no logits to sample from
        if not self._kv.remove(slot.seq_id, n_past, -1):
            self._kv.remove(slot.seq_id, -1, -1)
            slot.checkpoints = []
            n_past = 0
        return n_past

    def _changing(self, slot: Slot, n_kept: int, at_once: bool = True) -> None:
        """Where cells are positions, what goes stays until a step overwrites it: the scheduler makes way then."""
        if self._calls.hooks.slot_changing:
            self._calls.each("slot_changing", slot, n_kept)
        if at_once:
            slot.cut(n_kept)


def least_recently_used(idle: Seq[Slot]) -> Slot:
    """The slot unused for the longest time; of equals the last, as llama-server has it."""
    best = idle[0]
    for slot in idle[1:]:
        if slot.t_last_used <= best.t_last_used:
            best = slot
    return best


def _refuse_busy(slot: Slot) -> str | None:
    return f"slot {slot.id} is busy" if slot.busy else None
