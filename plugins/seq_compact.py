"""Keep busy slots on consecutive sequence ids, so that one step of all of them is one ubatch.

With a KV cache of one stream per slot, llama.cpp gathers sequences into a ubatch only while their ids follow each
other: busy ids 0, 2, 4 take three passes through the model, 0, 1, 2 take one. Where one pass is not the faster way, as
with plain models on few cores of a CPU, the ids stay as they are; the times of the steps so far say so.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

from llamamg import Batch, Config, Guard, Options, Request, Slot, StepState, Unavailable, hookimpl, plugin
from llamamg_plugins.pass_times import PassTimes, runs_of

PATIENCE = 16  # steps to wait for times before it is tried


@plugin(
    name="seq-compact",
    summary="moves and places sequences so that busy slots have consecutive sequence ids",
    helps="several sessions that end at different times, one KV stream per slot",
    hurts="the step that moves a long sequence",
    guard=Guard.same_tokens(),
    toggle="step",
    effect="moves",
    cli_switches=("--seq-compact", "--no-seq-compact"),
    cli_env="LLAMA_ARG_SEQ_COMPACT",
)
class SeqCompact:
    """Repairs gaps when the set of busy slots changes; avoids new ones when a request has no cached prefix to go to."""

    def __init__(self, always: bool = False) -> None:
        self.effect = 0
        self.always = always
        self.similarity = 0.10  # a common prefix above this share of the prompt is worth keeping; `configure` sets it
        self._times = PassTimes()
        self._n_asked: dict[int, int] = {}  # by context: steps with gaps since the last move whose times are unknown
        self._moved: set[int] = set()  # contexts whose next step copies cells, so its time says nothing
        self._drafting: set[int] = set()  # contexts whose last step had drafts, so its time says nothing either
        self._flying: dict[int, bool] = {}  # contexts that compute, and whether a prompt
        self._disturbed: set[int] = set()  # contexts beside whose step another one's prompt was computed: nor does that

    @hookimpl
    def register_options(self, options: Options) -> None:
        """It decides by measured times unless told otherwise."""
        options.add(
            "always",
            type=bool,
            default=False,
            help="move whenever ids have gaps, also where steps were not slower for them: for measuring",
        )

    @hookimpl
    def configure(self, config: Config) -> None:
        """One slot, or one stream for all, cannot have gaps."""
        context = config.context
        if context.n_parallel == 1:
            raise Unavailable("there is one slot, so its sequence id is always consecutive")
        if context.kv_unified or (context.kv_unified is None and context.n_parallel < 0):
            raise Unavailable(
                "the KV cache is unified, so ubatches do not depend on sequence ids (use --parallel N --no-kv-unified)"
            )
        self.similarity = config.generation.slot_prompt_similarity

    @hookimpl
    def batch_submitted(self, batch: Batch) -> None:
        """Know which steps share their devices with a prompt."""
        context, is_prompt = batch.group, any(row.is_prompt for row in batch.rows)
        self._flying.pop(context, None)
        self._disturbed.discard(context)
        if is_prompt:
            self._disturbed.update(self._flying)
        elif any(self._flying.values()):
            self._disturbed.add(context)
        self._flying[context] = is_prompt

    @hookimpl
    def batch_failed(self, batch: Batch) -> None:
        """It is not computed any more."""
        self._flying.pop(batch.group, None)

    @hookimpl
    def batch_done(self, batch: Batch, elapsed_s: float) -> None:
        """Learn from steps in which everybody decodes one token."""
        rows, context = batch.rows, batch.group
        self._flying.pop(context, None)
        copies = context in self._moved
        self._moved.discard(context)
        if any(row.is_prompt for row in rows):
            return
        if any(len(row) > 1 for row in rows):
            self._drafting.add(context)
            return
        self._drafting.discard(context)
        if copies or context in self._disturbed:
            return
        runs = runs_of(row.sequence.slot.seq_id for row in rows)
        self._times.add(runs, max(row.pos0 for row in rows), elapsed_s)

    @hookimpl
    def arrange_slots(self, state: StepState) -> list[tuple[int, int]] | None:
        """The fewest moves that leave the busy ids without a gap, if that makes steps faster; [] to be asked again."""
        busy = [slot for slot in state.slots if slot.busy]
        kept = [slot.seq_id for slot in state.slots if slot.stays]
        moves = compact([slot.seq_id for slot in busy], [slot.seq_id for slot in state.slots], kept)
        if not moves:
            return None
        context = busy[0].context
        if not self.always and not self._is_worth(busy, context):
            return []
        self._n_asked[context] = 0
        self._moved.add(context)
        self.effect += len(moves)
        return moves

    def _is_worth(self, busy: Seq[Slot], context: int) -> bool:
        """Whether one pass is faster. Unknown: after some steps as they are, it is tried."""
        runs, depth = runs_of(sorted(slot.seq_id for slot in busy)), max(len(slot.tokens) for slot in busy)
        worth = self._times.is_worth(runs, depth)
        if worth is not None:
            return worth
        self._n_asked[context] = self._n_asked.get(context, 0) + 1
        return self._n_asked[context] > PATIENCE or context in self._drafting or self._times.is_known(runs, depth)

    @hookimpl
    def select_slot(self, request: Request, slots: Seq[Slot]) -> Slot | None:
        """A slot beside the busy ones, for a request that no idle slot holds a useful prefix of."""
        busy = {(slot.group, slot.home) for slot in slots if slot.busy}
        beside = [s for s in slots if not s.busy and ((s.group, s.home - 1) in busy or (s.group, s.home + 1) in busy)]
        if not beside or self._has_prefix(request, slots):
            return None
        n_here = {slot.group: sum(group == slot.group for group, _ in busy) for slot in beside}
        if not self.always:
            beside = [s for s in beside if self._times.is_worth((n_here[s.group], 1), len(request.prompt)) is not False]
        return min(beside, key=lambda slot: (slot.t_last_used, slot.home), default=None)

    def _has_prefix(self, request: Request, slots: Seq[Slot]) -> bool:
        if not request.cache_prompt:
            return False
        useful = self.similarity * len(request.prompt)
        return any(slot.tokens.common_prefix(request.prompt) > useful for slot in slots if not slot.busy)


def compact(busy: Seq[int], ids: Seq[int], kept: Seq[int] = ()) -> list[tuple[int, int]]:
    """The fewest moves (from, to) that put the `busy` of `ids` on consecutive ones; of equals, the lowest.

    Nobody goes to one of `kept`. No move where these, or gaps of `ids`, leave no place that is long enough.
    """
    taken, there = set(busy), set(ids).difference(kept)
    n = len(taken)
    starts = [first for first in sorted(there) if there.issuperset(range(first, first + n))]
    if not starts or not n:
        return []
    start = min(starts, key=lambda first: sum(not first <= id_ < first + n for id_ in taken))
    window = range(start, start + n)
    return list(zip(sorted(taken.difference(window)), sorted(set(window) - taken), strict=True))
