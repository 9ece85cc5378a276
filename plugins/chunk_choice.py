"""Which chunk of a prompt fits beside decoders: as large as the latency target allows, and large enough to get on."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from llamamg import Batch, StepState
from llamamg_plugins.chunk_ladder import SLACK, Ladder, above, up_to
from llamamg_plugins.step_fit import StepFit, StepShape

PROBES = (1, 1, 2, 2)  # the first chunks, each twice: the first of a size pays for a new graph
DECODE_ONLY_EVERY = 8  # plain decode steps are many and alike: after the first eight, one in eight is looked at
N_ASKED = 2  # of those at most, where a prompt comes before any: the first may pay for a new graph
N_CAPTURED = 2  # which step of a size says nothing: a GPU makes its graph one to replay then
NEAR, NEAR_SHARE = 0.7, 0.9  # parts of the time and the share wanted from which on sizes are tried one by one
N_SOLO_MIN = 256  # a shorter prompt fills no batch, so its rate says little
N_SLOPE = 64  # steps with prompt tokens before the fit knows what depth costs
N_GUESS = 16  # largest chunk tried before the solo rate may be guessed from the fit


@dataclass(frozen=True, slots=True)
class Limits:
    """`target_s`: longest step wanted, or 0.0. `ratio`: the same as a multiple of a step without prompt tokens, or 0.0.

    `min_share`: part of its solo rate that a prompt keeps even where that breaks the target.
    """

    target_s: float = 0.0
    ratio: float = 0.0
    min_share: float = 0.0

    def wanted_s(self, alone_s: float) -> float:
        """The longest step wanted where one without prompt tokens takes `alone_s`."""
        wanted = [w for w in (self.target_s, self.ratio * alone_s) if w > 0]
        return min(wanted) if wanted else float("inf")


class SoloRate:
    """What a prompt computes while nobody decodes, in tokens/s; 0.0 until one was long enough to tell."""

    def __init__(self) -> None:
        self.tps = 0.0
        self.depth = 0.0  # mean position of the tokens it was measured with
        self._begin = 0.0
        self._n = 0

    def add(self, n: int, elapsed_s: float, now: float, *, is_end: bool) -> None:
        """Prompt tokens are done; only the last ones of a prompt (`is_end`) were waited for."""
        if self._n == 0:
            self._begin = now - elapsed_s
        self._n += n
        if is_end:
            rate = self._n / max(now - self._begin, 1e-6)
            if self._n >= N_SOLO_MIN:
                self.tps = rate if self.tps == 0.0 else 0.5 * (self.tps + rate)
                self.depth = self._n / 2
            self._n = 0

    def interrupted(self) -> None:
        """Somebody decodes: the prompt under way says nothing."""
        self._n = 0


class ChunkChoice:
    """For one context: keeps the fit up to date and answers how many prompt tokens a step should take."""

    def __init__(
        self,
        n_ubatch: int,
        limits: Limits,
        *,
        solo: SoloRate | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.limits = limits
        self.fit = StepFit(n_ubatch)
        self.solo = solo or SoloRate()
        self._n_ubatch = n_ubatch
        self._clock = clock
        self._t_done = 0.0
        self._was_waited_for = False  # a batch without outputs may still run when the next one is handed over
        self._n_plain = 0
        self._n_asked = 0  # steps without prompt tokens that were asked for
        self._n_chunk = -1  # of the step before
        self._last_s = 0.0  # what the last step took that says something
        self._n_same = 0  # steps with that chunk so far
        self._alone_s: dict[int, float] = {}  # a step without prompt tokens, by decode rows
        self._ladder = Ladder()

    def observe(self, batch: Batch, elapsed_s: float) -> None:
        """A batch is done. What counts is the time since the one before, which is what a stream sees."""
        now, t_before, was_waited_for = self._clock(), self._t_done, self._was_waited_for
        self._t_done, self._was_waited_for = now, batch.has_logits
        shape = shape_of(batch)
        if shape.n_rows == 0:
            self.solo.add(shape.n_chunk, elapsed_s, now, is_end=batch.has_logits)
            return
        self.solo.interrupted()
        is_new, self._n_chunk = shape.n_chunk != self._n_chunk, shape.n_chunk
        self._n_same = 1 if is_new else self._n_same + 1
        if not shape.n_chunk:
            self._n_plain += 1
            if self._n_plain % DECODE_ONLY_EVERY and self._n_plain > DECODE_ONLY_EVERY:
                return
        if not was_waited_for or (shape.n_chunk and self._n_same == N_CAPTURED):
            return
        period = now - t_before
        seconds = period if elapsed_s <= period < 2 * elapsed_s else elapsed_s
        self._last_s = seconds
        self.fit.add(replace(shape, is_new=is_new and shape.n_chunk > 0), seconds)
        if not shape.n_chunk:
            known = self._alone_s.get(shape.n_rows, seconds)
            # Faster down than up: the first one after a prompt pays for a new graph.
            weight = 0.5 if seconds < known else 0.2
            self._alone_s[shape.n_rows] = known + weight * (min(seconds, 2 * known) - known)

    def choose(self, state: StepState, n_most: int) -> int:
        """Prompt tokens for this step, at most `n_most`; 0 where a step without any has to be seen first."""
        if self.limits.ratio > 0 and not self._alone_s and self._n_asked < N_ASKED:
            self._n_asked += 1
            return 0
        if not self.fit.ready:
            return min(PROBES[self.fit.n_seen % len(PROBES)], n_most)
        shape = shape_of_state(state)
        least = self.limits.min_share * self._solo_tps(shape)
        alone = self._alone_s.get(shape.n_rows) or float(self.fit.predict(shape, np.zeros(1, np.int64))[0])
        wanted = self.limits.wanted_s(alone)
        if self._lacks_solo and float(self.fit.predict(shape, np.ones(1, np.int64))[0]) > wanted:
            # The share will decide, and nobody knows what it is a share of: a few larger chunks tell.
            return min(self._ladder.take(above(self.fit.n_largest)), n_most)
        # Beyond what was tried the fit only guesses, so it goes there in steps, small ones where little is missing.
        sizes = up_to(min(n_most, self._largest(shape, wanted, least)))
        times = self._ladder.plausible(sizes, self.fit.predict(shape, sizes))
        return self._ladder.pick(sizes, times * (1 + self.fit.excess), wanted, sizes / times, least)

    def _largest(self, shape: StepShape, wanted_s: float, least_tps: float) -> int:
        """How far up sizes may be tried now."""
        largest = self.fit.n_largest
        seconds = float(self.fit.predict(shape, np.array([largest]))[0])
        if self._n_chunk == largest:
            seconds = max(seconds, self._last_s)  # while every size is new the fit cannot tell what being new costs
        tps = largest / seconds
        if seconds > wanted_s / SLACK and tps >= least_tps:
            return largest
        if seconds > NEAR * wanted_s and tps > NEAR_SHARE * least_tps:
            return above(largest)
        return max(3 * largest // 2, largest + 1)

    def _solo_tps(self, shape: StepShape) -> float:
        """The rate that a prompt would have by itself at this depth; 0.0 where nobody knows."""
        if self.limits.min_share <= 0:
            return 0.0
        if self.fit.n_seen < N_SLOPE or self._lacks_solo:
            return self.solo.tps
        return solo_at(self.fit, self.solo, shape.prompt_depth, self._n_ubatch)

    @property
    def _lacks_solo(self) -> bool:
        """Whether the share counts, but no prompt was computed alone and chunks were too small to guess from."""
        return self.limits.min_share > 0 and self.solo.tps == 0.0 and self.fit.n_largest < N_GUESS

    def alone_s(self, n_rows: int) -> float | None:
        """A step of so many decode rows without prompt tokens, if one was seen."""
        return self._alone_s.get(n_rows)

    @property
    def report(self) -> dict[str, Any]:
        """What was chosen last, and why; empty before that."""
        return self._ladder.told.report() if self._ladder.told else {}


def solo_at(fit: StepFit, solo: SoloRate, depth: float, n_ubatch: int) -> float:
    """A measured solo rate, less what the fit says of attention at `depth`; what the fit says alone where none was measured.

    Depth grows with every step, so a machine that has become slower looks like attention too, which is as well: a prompt by
    itself would be slower. Never less than half.
    """
    whole = np.array([n_ubatch])
    here = float(fit.predict(StepShape(0, 0, prompt_depth=depth), whole)[0])
    if solo.tps == 0.0:
        return n_ubatch / here
    there = float(fit.predict(StepShape(0, 0, prompt_depth=solo.depth), whole)[0])
    return solo.tps * min(1.25, max(0.5, there / here))


def shape_of_state(state: StepState) -> StepShape:
    """What the step that is planned has beside prompt tokens."""
    return StepShape(
        len(state.decoding),
        0,
        prompt_depth=float(min((s.n_past for s in state.prefilling), default=0)),
        decode_depth=float(sum(s.n_past for s in state.decoding)),
    )


def shape_of(batch: Batch) -> StepShape:
    """What a batch computed."""
    n_rows = n_chunk = 0
    at = depth = 0.0
    for row in batch.rows:
        n = len(row)
        if row.is_prompt:
            n_chunk += n
            at += n * (row.pos0 + 0.5 * n)
        else:
            n_rows += n
            depth += row.pos0
    return StepShape(n_rows, n_chunk, at / n_chunk if n_chunk else 0.0, depth)
