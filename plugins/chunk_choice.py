"""Which chunk of a prompt fits beside decoders: as large as the latency target allows, and large enough to get on."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np

from llamamg import Batch, StepState
from llamamg_plugins.step_fit import StepFit, StepShape

# About 8 % apart and round: few different shapes, and none far below what would have fitted.
SIZES = np.concatenate(
    [
        np.arange(begin, end, step)
        for begin, end, step in (
            (1, 8, 1), (8, 16, 2), (16, 64, 4), (64, 128, 8), (128, 256, 16), (256, 512, 32), (512, 1024, 64),
            (1024, 2048, 128), (2048, 8193, 512),
        )
    ]
)  # fmt: skip
PROBES = (1, 2, 4, 8)  # the first chunks, from which the fit gets its slopes
DECODE_ONLY_EVERY = 8  # plain decode steps are many and alike: one in eight is looked at


class ChunkChoice:
    """Keeps the fit up to date and answers how many prompt tokens a step should take.

    `target_s` is the longest step wanted, or 0.0; `ratio` the same as a multiple of a step without prompt tokens, or 0.0.
    `min_share` is the part of its solo rate that a prompt keeps even where that breaks the target.
    """

    def __init__(
        self,
        n_ubatch: int,
        *,
        target_s: float,
        ratio: float,
        min_share: float,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.target_s, self.ratio, self.min_share = target_s, ratio, min_share
        self.fit = StepFit(n_ubatch)
        self.solo_tps = 0.0  # measured rate of prompts while nobody decodes; 0.0 until then
        self._clock = clock
        self._t_done = 0.0
        self._was_waited_for = False  # a batch without outputs may still run when the next one is handed over
        self._solo_begin = 0.0
        self._solo_tokens = 0
        self._n_plain = 0
        self._alone_s: dict[int, float] = {}  # a step without prompt tokens, by decode rows
        self._last = 0

    def observe(self, batch: Batch, elapsed_s: float) -> None:
        """A batch is done. What counts is the time since the one before, which is what a stream sees."""
        now, t_before, was_waited_for = self._clock(), self._t_done, self._was_waited_for
        self._t_done, self._was_waited_for = now, batch.has_logits
        shape = _shape_of(batch)
        if shape.n_rows == 0:
            self._observe_solo(shape, now, elapsed_s, batch.has_logits)
            return
        self._solo_tokens = 0
        if not shape.n_chunk:
            self._n_plain += 1
            if self._n_plain % DECODE_ONLY_EVERY:
                return
        if not was_waited_for:
            return
        period = now - t_before
        seconds = period if elapsed_s <= period < 2 * elapsed_s else elapsed_s
        self.fit.add(shape, seconds)
        if not shape.n_chunk:
            known = self._alone_s.get(shape.n_rows, seconds)
            self._alone_s[shape.n_rows] = known + 0.2 * (min(seconds, 2 * known) - known)

    def _observe_solo(self, shape: StepShape, now: float, elapsed_s: float, is_end: bool) -> None:
        if self._solo_tokens == 0:
            self._solo_begin = now - elapsed_s
        self._solo_tokens += shape.n_chunk
        if is_end:
            rate = self._solo_tokens / max(now - self._solo_begin, 1e-6)
            # A short prompt fills no batch, so its rate says little.
            if self._solo_tokens >= 256:
                self.solo_tps = rate if self.solo_tps == 0.0 else 0.5 * (self.solo_tps + rate)
            self._solo_tokens = 0

    def choose(self, state: StepState, n_most: int) -> int:
        """Prompt tokens for this step, 1 to `n_most`."""
        if not self.fit.ready:
            return min(PROBES[self.fit.n_seen % len(PROBES)], n_most)
        shape = StepShape(
            len(state.decoding),
            0,
            prompt_depth=float(min((s.n_past for s in state.prefilling), default=0)),
            decode_depth=float(sum(s.n_past for s in state.decoding)),
        )
        # Beyond what was tried the fit only guesses, so it goes there in steps.
        limit = min(n_most, max(PROBES[-1], 3 * self.fit.n_largest // 2))
        sizes = SIZES[: np.searchsorted(SIZES, limit, "right")]
        times = self.fit.predict(shape, sizes) * (1 + self.fit.excess)
        within = np.flatnonzero(times <= self._wanted_s(shape))
        chosen = int(sizes[within[-1]]) if len(within) else int(sizes[0])
        if within.size and self._last in sizes[within] and 0.85 * chosen <= self._last <= chosen:
            chosen = self._last  # the same shape again: its graph is there already
        least = self._least(shape, sizes, times)
        self._last = max(chosen, least)
        return self._last

    def _wanted_s(self, shape: StepShape) -> float:
        alone = self._alone_s.get(shape.n_rows) or float(self.fit.predict(shape, np.zeros(1, np.int64))[0])
        wanted = [w for w in (self.target_s, self.ratio * alone) if w > 0]
        return min(wanted) if wanted else float("inf")

    def _least(self, shape: StepShape, sizes: np.ndarray, times: np.ndarray) -> int:  # type: ignore[type-arg]
        """The smallest chunk at which the prompt gets `min_share` of its solo rate; the one with the best rate if none does."""
        if self.min_share <= 0:
            return 0
        solo = self.solo_tps
        if solo == 0.0:
            alone = StepShape(0, 0, prompt_depth=shape.prompt_depth)
            solo = float(sizes[-1] / self.fit.predict(alone, sizes[-1:])[0])
        rates = sizes / times
        enough = np.flatnonzero(rates >= self.min_share * solo)
        return int(sizes[enough[0]] if len(enough) else sizes[int(rates.argmax())])


def _shape_of(batch: Batch) -> StepShape:
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
