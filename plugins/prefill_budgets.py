"""How many prompt tokens a context's next batch may have while somebody decodes, there or in another context."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from llamamg import Batch, StepState
from llamamg_plugins.chunk_choice import ChunkChoice, Limits, SoloRate
from llamamg_plugins.prefill_pace import PrefillPace, contexts_decoding


class Budgets:
    """One choice of chunk for each context whose steps are mixed, one pace for the context that has only prompts.

    `chunk` is the most prompt tokens in a mixed step (0: no limit); `limits` of None leaves it at that.
    """

    def __init__(
        self, n_ubatch: int, limits: Limits | None, chunk: int, *, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self.limits, self.chunk = limits, chunk
        self.solo = SoloRate()
        self._n_ubatch, self._clock = n_ubatch, clock
        self._choices: dict[int, ChunkChoice] = {}
        self._pace: PrefillPace | None = None
        self._n_groups = 1
        self._has_prefill_context = False  # then groups compute only short prompts themselves
        self._waiting_beside: set[int] = set()  # contexts planned with prompts only, while others decode
        self._flying: dict[int, Batch] = {}
        self._beside: set[int] = set()  # ids of batches of prompts beside decoders
        self._overlapped: set[int] = set()  # ids of batches that were not alone on the device
        self._answer = (-1, 0)  # step, tokens: both hooks of a step ask

    def budget(self, state: StepState) -> int | None:
        """Prompt tokens for this step; 0 while a context of prompts has to wait, None for no limit."""
        self._n_groups = max(1, len(state.groups))
        context = state.prefilling[0].slot.context if state.prefilling else 0
        decoding = [] if state.decoding else contexts_decoding(state)
        if decoding:
            self._waiting_beside.add(context)
        else:
            self._waiting_beside.discard(context)
        if not state.decoding and not decoding:
            return None
        if self.limits is None:
            return self.chunk or None
        if self._answer[0] != state.step:
            self._answer = (state.step, self._choose(state, context, decoding, self.limits))
        return self._answer[1]

    def _choose(self, state: StepState, context: int, decoding: list[int], limits: Limits) -> int:
        room = max(1, state.n_batch - len(state.decoding))
        if decoding:
            # Within a ubatch a prompt's kernels follow each other anyway, so larger batches gain nothing here.
            largest = max(set(decoding), key=decoding.count)
            alone_s = self._choice(largest, limits).alone_s(decoding.count(largest))
            return self._paced(limits).choose(state, decoding, min(room, self._n_ubatch), alone_s)
        most = room if limits.target_s or not self.chunk else min(room, self.chunk)
        choice = self._choice(context, limits)
        return most if self._has_prefill_context and not choice.fit.ready else choice.choose(state, most)

    def _paced(self, limits: Limits) -> PrefillPace:
        if self._pace is None:
            self._pace = PrefillPace(self._n_ubatch, limits, self.solo, clock=self._clock)
        return self._pace

    def _choice(self, context: int, limits: Limits) -> ChunkChoice:
        if context not in self._choices:
            self._choices[context] = ChunkChoice(self._n_ubatch, limits, solo=self.solo, clock=self._clock)
        return self._choices[context]

    @property
    def report(self) -> dict[str, Any]:
        """For GET /plugins: the last choice for mixed steps of each context, and for prompts in one of their own."""
        out: dict[str, Any] = {"solo_tps": round(self.solo.tps, 1)}
        for context, choice in list(self._choices.items()):
            if choice.report:
                out[f"context_{context}"] = choice.report
        if self._pace is not None and self._pace.report:
            out["separate"] = self._pace.report
        return out

    def submitted(self, batch: Batch) -> None:
        """A batch begins."""
        if self.limits is None:
            return
        if self._flying:
            self._overlapped.update(map(id, (*self._flying.values(), batch)))
        self._flying[batch.group] = batch
        if batch.group >= self._n_groups:
            self._has_prefill_context = True
            self._paced(self.limits)  # it looks at the decoders from now on
        if batch.group in self._waiting_beside and all(row.is_prompt for row in batch.rows):
            self._beside.add(id(batch))
            self._paced(self.limits).submitted(batch)

    def done(self, batch: Batch, elapsed_s: float) -> None:
        """A batch ended: learn from it what its time says something about."""
        if self.limits is None:
            return
        was_overlapped, was_beside = self.ended(batch)
        if was_beside:
            self._paced(self.limits).prompt_done(batch)
            self.solo.interrupted()
            return
        if self._pace is not None and not batch.rows[0].is_prompt:
            self._pace.decoded(batch, elapsed_s)
        if not (self._has_prefill_context and was_overlapped):
            # Without a context for prompts the other groups are always there, and what a stream sees is with them.
            self._choice(batch.group, self.limits).observe(batch, elapsed_s)

    def ended(self, batch: Batch) -> tuple[bool, bool]:
        """A batch is through, or failed: whether it was beside others, and whether it was a prompt's beside decoders."""
        self._flying.pop(batch.group, None)
        was = id(batch) in self._overlapped, id(batch) in self._beside
        self._overlapped.discard(id(batch))
        self._beside.discard(id(batch))
        return was
