"""How much of the device prompts may take that are computed in a context of their own, beside the decoders' contexts.

Kernels of both run at the same time, so a decode step takes longer while a prompt is computed: the longer, the larger the
batches of the prompt are. Two things bound that: the size of a batch, and that the next one waits until every group that
decodes has had a step since the one before was begun. What that makes of the gaps between tokens is learned from them.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llamamg import Batch, SequenceState, Slot, StepState
from llamamg_plugins.chunk_choice import N_ASKED, Limits, SoloRate, shape_of, solo_at
from llamamg_plugins.chunk_ladder import Ladder, up_to
from llamamg_plugins.step_fit import StepFit, StepShape

Sizes = NDArray[np.int64]
Seconds = NDArray[np.float64]
FIRST = 8  # tokens of the first batch
N_SETTLE = 2  # gaps of each group after a change of size in which batches of the size before may still be computed
ALONE_EVERY = 8  # gaps without a prompt are many and alike
N_HELD = 3  # gaps that count before a larger size is tried
N_QUIET = 32  # gaps after which a batch that was not waited for is surely through
WAIT_MAX_S = 1.0  # a group that decodes but has no step for so long holds no prompt up


class PrefillPace:
    """Watches the decode steps of all groups and the batches of the context for prompts."""

    def __init__(
        self, n_ubatch: int, limits: Limits, solo: SoloRate, *, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self.limits, self.solo = limits, solo
        self.gaps = StepFit(n_ubatch)  # of a decode group, in which batches of n_chunk tokens are computed beside it
        self.periods = StepFit(n_ubatch)  # from one batch of a prompt to the next
        self._n_ubatch, self._clock = n_ubatch, clock
        self._ladder = Ladder()
        self._alone_s: dict[int, float] = {}  # a step while no prompt is computed, by decode rows
        self._t_done: dict[int, float] = {}  # end of the last decode step, by group
        self._stepped: set[int] = set()  # groups that had a step since the last batch of a prompt was begun
        self._t_submitted = 0.0
        self._chunk = 0  # of that batch
        self._depth = 0.0
        self._n_gaps = 0  # since the size changed
        self._n_quiet = N_QUIET  # gaps since a prompt was last computed
        self._n_alone = 0
        self._n_asked = 0  # gaps without a prompt that were waited for
        self._is_computed = False  # right now, as far as the host knows

    # -- what happens

    def submitted(self, batch: Batch) -> None:
        """A batch of a prompt begins beside decoders."""
        now, shape = self._clock(), shape_of(batch)
        if shape.n_chunk != self._chunk:
            self._n_gaps = 0
        elif self._n_gaps > self._n_settle and self._n_quiet <= self._n_settle:
            self.periods.add(StepShape(1, shape.n_chunk, shape.prompt_depth), now - self._t_submitted)
        self._chunk, self._depth, self._t_submitted = shape.n_chunk, shape.prompt_depth, now
        self._stepped.clear()
        self._n_quiet, self._is_computed = 0, True

    def prompt_done(self, batch: Batch) -> None:
        """It ended, or was only handed over: without an output nobody waits for it."""
        self._is_computed = False
        if batch.has_logits:
            self._n_quiet = N_QUIET

    def decoded(self, batch: Batch, elapsed_s: float) -> None:
        """A step of a decode group ended."""
        now = self._clock()
        before = self._t_done.get(batch.group, 0.0)
        self._t_done[batch.group] = now
        self._stepped.add(batch.group)
        self._n_gaps += 1
        shape = shape_of(batch)
        if shape.n_chunk or not shape.n_rows:
            return  # a short prompt of the group's own
        period = now - before
        seconds = period if elapsed_s <= period < 2 * elapsed_s else elapsed_s
        if self._n_quiet >= N_QUIET:
            known = self._alone_s.get(shape.n_rows, seconds)
            self._alone_s[shape.n_rows] = known + 0.05 * (min(seconds, 2 * known) - known)
            self._n_alone += 1
            if self._n_alone % ALONE_EVERY == 0:
                self.gaps.add(shape, seconds)
        elif self._n_gaps > self._n_settle:
            self.gaps.add(replace(shape, n_chunk=self._chunk, prompt_depth=self._depth), seconds)
        if not self._is_computed:
            self._n_quiet = min(self._n_quiet + 1, N_QUIET)

    @property
    def _n_settle(self) -> int:
        return N_SETTLE * max(1, len(self._t_done))

    # -- what to do

    def choose(self, state: StepState, decoding: list[int], n_most: int, known_alone_s: float | None = None) -> int:
        """Tokens for the next batch of the prompt; 0: not yet. `decoding`: a context for each sequence that decodes.

        `known_alone_s`: a step without a prompt, where somebody else knows.
        """
        late = self._clock() - self._t_submitted > WAIT_MAX_S
        if not late and not self._stepped.issuperset(decoding):
            return 0
        if self.limits.ratio > 0 and not self._alone_s and not known_alone_s and self._n_asked < N_ASKED:
            self._n_asked += 1
            return 0  # a gap without a prompt has to be seen first
        if self._n_gaps < self._n_settle + N_HELD and self._ladder.last:
            return min(self._ladder.last, n_most)
        if not self.gaps.n_seen:
            return min(self._ladder.take(FIRST), n_most)
        shape = _shape(state, max(set(decoding), key=decoding.count))
        alone = (
            self._alone_s.get(shape.n_rows)
            or known_alone_s
            or float(self.gaps.predict(shape, np.zeros(1, np.int64))[0])
        )
        wanted = self.limits.wanted_s(alone)
        largest = self.gaps.n_largest
        # Beyond what was tried the fit only guesses, so it goes there in steps, small ones where little room is left.
        has_room = float(self.gaps.predict(shape, np.array([largest]))[0]) < 0.5 * wanted
        sizes = up_to(min(n_most, 2 * largest if has_room else 3 * largest // 2))
        times = self._ladder.plausible(sizes, self.gaps.predict(shape, sizes)) * (1 + self.gaps.excess)
        rates = sizes / self._periods(shape, sizes, times)
        least = self.limits.min_share * self._solo_tps(shape)
        return self._ladder.pick(sizes, times, wanted, rates, least)

    def _periods(self, shape: StepShape, sizes: Sizes, times: Seconds) -> Seconds:
        if not self.periods.ready:
            return times
        return self._ladder.plausible(sizes, self.periods.predict(StepShape(1, 0, shape.prompt_depth), sizes))

    def _solo_tps(self, shape: StepShape) -> float:
        if self.solo.tps == 0.0 or not self.periods.ready:
            return self.solo.tps
        return solo_at(self.periods, self.solo, shape.prompt_depth, self._n_ubatch)

    @property
    def report(self) -> dict[str, Any]:
        """What was chosen last, and why; empty before that."""
        return self._ladder.told.report() if self._ladder.told else {}


def contexts_decoding(state: StepState) -> list[int]:
    """The context of each sequence that decodes and is not on its way to another one."""
    return [slot.context for slot in state.slots if _decodes(slot) and not slot.moving]


def _shape(state: StepState, context: int) -> StepShape:
    here = [slot.sequence for slot in state.slots if _decodes(slot) and slot.context == context]
    prompt_depth = float(min((s.n_past for s in state.prefilling), default=0))
    return StepShape(len(here), 0, prompt_depth, float(sum(s.n_past for s in here)))


def _decodes(slot: Slot) -> bool:
    return slot.sequence is not None and slot.sequence.state is SequenceState.DECODE
