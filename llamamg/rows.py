"""The rows of one context's batch: decode rows with their drafts first, then prompts while there is room."""

from __future__ import annotations

from llamamg.batch import Batch, Row, StepState
from llamamg.checkpoint import CheckpointPolicy
from llamamg.completion import Completion
from llamamg.draft import Rollback, begin_row
from llamamg.hookcalls import HookCalls
from llamamg.sequence import Sequence
from llamamg.stats import Stats


class Rows:
    """Chooses rows, asking plugins for drafts, order and budget, and takes back what a draft got wrong."""

    def __init__(
        self,
        calls: HookCalls,
        completion: Completion,
        checkpoints: CheckpointPolicy,
        rollback: Rollback,
        stats: Stats,
        *,
        n_batch: int,
        n_draft_max: int,
    ) -> None:
        self._calls, self._completion, self._checkpoints = calls, completion, checkpoints
        self._rollback, self._stats = rollback, stats
        self._n_batch, self._n_draft_max = n_batch, n_draft_max
        self.undrafted: set[int] = set()  # contexts whose next step has no drafts, so that sequences can be moved

    def choose(self, state: StepState, context: int) -> Batch:
        """The batch of a context; without rows when nothing is to be done there."""
        batch = Batch(group=context)
        self._add_decodes(state, batch)
        if state.prefilling:
            self._add_prefills(state, batch)
        return batch

    def verify(self, sequence: Sequence, row: Row, n_tokens: int) -> bool:
        """Count a draft and take its rejected tokens back; False when the memory cannot go back."""
        n_draft = row.n_logits - 1
        if n_draft <= 0:
            return True
        accepted, stats = n_tokens - 1, self._stats
        stats.n_drafts += 1
        stats.n_draft += n_draft
        stats.n_draft_accepted += accepted
        stats.accepted_per_pos.extend([0] * (accepted - len(stats.accepted_per_pos)))
        for i in range(accepted):
            stats.accepted_per_pos[i] += 1
        sequence.timings.draft_n += n_draft
        sequence.timings.draft_n_accepted += accepted
        went_back = True
        if accepted == n_draft:
            self._rollback.accepted(row)
        else:
            went_back = self._rollback.reject(row, len(row) - n_draft + accepted)
        self._calls.each("draft_verified", sequence, n_draft, accepted)
        return went_back

    def _add_decodes(self, state: StepState, batch: Batch) -> None:
        limit = 0 if batch.group in self.undrafted else self._draft_limit(state)
        self.undrafted.discard(batch.group)
        begun = [begin_row(sequence) for sequence in state.decoding]
        spare = self._n_batch - sum(len(tokens) for _, tokens in begun)
        for sequence, (pos0, tokens) in zip(state.decoding, begun, strict=True):
            slot, n_again = sequence.slot, len(tokens) - 1
            if limit and not (sequence.sampler.params.n_probs and sequence.sampler.params.post_sampling_probs):
                room = min(limit, spare, sequence.n_remaining - 1, self._completion.n_ctx_slot - pos0 - n_again - 2)
                if room > 0:
                    tokens += self._draft(sequence, pos0, n_again, room)
            spare -= len(tokens) - 1 - n_again
            if slot.copying is not None:
                slot.give_way(pos0, pos0 + len(tokens))
            slot.tokens.keep(pos0)
            for token in tokens:
                slot.tokens.append(token)
            sequence.n_past, sequence.goes_back = pos0 + len(tokens), False
            batch.rows.append(Row(sequence, tokens, pos0, len(tokens) - n_again))

    def _draft_limit(self, state: StepState) -> int:
        hooks = self._calls.hooks
        if not state.decoding or not hooks.draft or self._n_draft_max == 0:
            return 0
        limit = self._calls.first("spec_limit", state, check=_not_a_number) if hooks.spec_limit else None
        return self._n_draft_max if limit is None else max(0, min(int(limit), self._n_draft_max))

    def _draft(self, sequence: Sequence, pos0: int, n_again: int, room: int) -> list[int]:
        proposed = self._calls.first("draft", sequence, room, check=self._not_tokens) or []
        draft = self._completion.before_end([int(token) for token in proposed[:room]])
        return draft[: self._rollback.prepare(sequence, pos0, n_again, len(draft))] if draft else draft

    def _not_tokens(self, proposed: list[int]) -> str | None:
        if all(0 <= int(token) < self._completion.n_vocab for token in proposed):
            return None
        return "a proposed token is not in the vocabulary"

    def _add_prefills(self, state: StepState, batch: Batch) -> None:
        hooks = self._calls.hooks
        room = whole = self._n_batch - batch.n_tokens
        order = state.prefilling
        if hooks.order_prefills:
            chosen = self._calls.first(
                "order_prefills", state, list(order), check=lambda answer: _not_from(answer, state)
            )
            order = order if chosen is None else chosen
        if hooks.prefill_budget:
            budget = self._calls.first("prefill_budget", state, check=lambda n: _idle_budget(n, state))
            room = room if budget is None else max(0, min(int(budget), room))
        for sequence in order:
            if room <= 0:
                break
            n = self._add_prompt(sequence, batch, room, room < whole)
            room, whole = room - n, whole - n

    def _add_prompt(self, sequence: Sequence, batch: Batch, room: int, is_budget: bool) -> int:
        slot, begin = sequence.slot, sequence.n_past
        end = self._checkpoints.stop_at(sequence, begin, min(begin + room, sequence.n_prompt))
        ends_early = is_budget and end == begin + room < sequence.n_prompt
        if self._checkpoints.wanted(sequence, begin, end, is_cut=sequence.is_cut or ends_early):
            self._checkpoints.make(slot, begin, sequence.request.id)
        sequence.is_cut = ends_early
        tokens = sequence.request.prompt[begin:end]
        if slot.copying is not None:
            slot.give_way(begin, end)
        slot.tokens.extend(tokens)
        sequence.n_past, sequence.goes_back = end, False
        waits = self._checkpoints.may_follow(sequence, end, is_cut=ends_early)
        n_logits = 1 if end == sequence.n_prompt else 0
        batch.rows.append(Row(sequence, tokens, begin, n_logits, is_prompt=True, waits=waits))
        return end - begin


def _not_from(answer: list[Sequence], state: StepState) -> str | None:
    if any(sequence not in state.prefilling for sequence in answer) or len(set(map(id, answer))) != len(answer):
        return "the list holds a sequence that was not offered, or one twice"
    if not answer and not state.decoding:
        return "nobody decodes, so an empty list would stop the server"
    return None


def _not_a_number(limit: int) -> str | None:
    return None if isinstance(limit, int) else f"{limit!r} is not a number of tokens"


def _idle_budget(budget: int, state: StepState) -> str | None:
    return "nobody decodes, so 0 would stop the server" if budget <= 0 and not state.n_decoding else None
