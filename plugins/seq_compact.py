"""Keep busy slots on consecutive sequence ids, so that one step of all of them is one ubatch.

With a KV cache of one stream per slot, llama.cpp gathers sequences into a ubatch only while their ids follow each
other: busy ids 0, 2, 4 take three passes through the model, 0, 1, 2 take one.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

from llamamg import Config, Guard, Request, Slot, StepState, Unavailable, hookimpl, plugin


@plugin(
    name="seq-compact",
    summary="moves and places sequences so that busy slots have consecutive sequence ids",
    helps="several sessions that end at different times, one KV stream per slot",
    hurts="the step that moves a long sequence; prompts cached in idle slots, where they are too large to swap; "
    "plain models on the CPU",
    guard=Guard.same_tokens(),
    toggle="step",
    effect="moves",
    cli_switches=("--seq-compact", "--no-seq-compact"),
    cli_env="LLAMA_ARG_SEQ_COMPACT",
)
class SeqCompact:
    """Repairs gaps when the set of busy slots changes; avoids new ones when a request has no cached prefix to go to."""

    def __init__(self) -> None:
        self.effect = 0
        self.similarity = 0.10  # a common prefix above this share of the prompt is worth keeping; `configure` sets it

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
    def arrange_slots(self, state: StepState) -> list[tuple[int, int]] | None:
        """The fewest moves that leave the busy ids without a gap."""
        ids = [slot.seq_id for slot in state.slots]
        moves = compact([slot.seq_id for slot in state.slots if slot.busy], ids)
        self.effect += len(moves)
        return moves or None

    @hookimpl
    def select_slot(self, request: Request, slots: Seq[Slot]) -> Slot | None:
        """A slot beside the busy ones, for a request that no idle slot holds a useful prefix of."""
        busy = {(slot.group, slot.home) for slot in slots if slot.busy}
        beside = [s for s in slots if not s.busy and ((s.group, s.home - 1) in busy or (s.group, s.home + 1) in busy)]
        if not beside or self._has_prefix(request, slots):
            return None
        return min(beside, key=lambda slot: (slot.t_last_used, slot.home))

    def _has_prefix(self, request: Request, slots: Seq[Slot]) -> bool:
        if not request.cache_prompt:
            return False
        useful = self.similarity * len(request.prompt)
        return any(slot.tokens.common_prefix(request.prompt) > useful for slot in slots if not slot.busy)


def compact(busy: Seq[int], ids: Seq[int]) -> list[tuple[int, int]]:
    """The fewest moves (from, to) that put the `busy` of `ids` on consecutive ones; of equals, the lowest.

    None where `ids` has gaps so that no place is long enough.
    """
    taken, there = set(busy), set(ids)
    n = len(taken)
    starts = [first for first in sorted(there) if there.issuperset(range(first, first + n))]
    if not starts or not n:
        return []
    start = min(starts, key=lambda first: sum(not first <= id_ < first + n for id_ in taken))
    window = range(start, start + n)
    return list(zip(sorted(taken.difference(window)), sorted(set(window) - taken), strict=True))
