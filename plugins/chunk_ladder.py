"""The sizes that a chunk may have, and which of them to take: a size that is kept is a graph that is there already."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

# At most a quarter apart from 32 on, and multiples of what kernels compute at once.
SIZES: NDArray[np.int64] = np.array(
    [1, 2, 3, 4, 6, 8, 12, 16, 20, 24, 28]
    + [n for low, step in itertools.pairwise((32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)) for n in range(low, step, low // 4)]
    + [8192]
)  # fmt: skip
HOLD = 64  # steps after which a size one rung up is worth its new graph
HOLD_SHORT = 16  # the same for one further up, or for any change that the share asks for
N_BROKEN = 8  # steps in a row with a size that is too slow, or too small for the share, before it is given up
FAR = 1.15  # but a size so much slower than wanted is given up at once, and one so much too small for the share too
SLACK = 1.05  # a size is taken when it is so much faster than wanted, and given up when it is slower
SHARE_SLACK = (
    1.03  # a size is kept until its rate is so much below the share; a smaller one is taken when so much above
)


def up_to(n: int) -> NDArray[np.int64]:
    """The sizes of at most `n` tokens; [1] where there is none."""
    return SIZES[: max(1, int(np.searchsorted(SIZES, n, "right")))]


def above(n: int) -> int:
    """The size that follows `n` tokens."""
    return int(SIZES[min(int(np.searchsorted(SIZES, n, "right")), len(SIZES) - 1)])


@dataclass(frozen=True, slots=True)
class Told:
    """Why a size was taken: what is expected of it and what was wanted; `share_won` where both could not be had."""

    chunk: int
    expected_s: float
    wanted_s: float
    prompt_tps: float
    share_won: bool

    def report(self) -> dict[str, Any]:
        """For GET /plugins."""
        return {
            "chunk": self.chunk,
            "expected_ms": round(1e3 * self.expected_s, 2),
            "wanted_ms": round(1e3 * self.wanted_s, 2) if self.wanted_s < float("inf") else None,
            "prompt_tps": round(self.prompt_tps, 1),
            "decided_by": "min-share: the latency wanted leaves the prompt less" if self.share_won else "latency",
        }


class Ladder:
    """Takes the largest size that is fast enough, but none with which the prompt crawls, and stays where it is if it can."""

    def __init__(self) -> None:
        self.last = 0  # the size taken last, 0 before the first
        self._n_held = 0  # steps since it changed
        self._n_broken = 0  # steps in a row in which it was too slow, or too small for the share
        self.told: Told | None = None

    def plausible(self, sizes: NDArray[np.int64], times_s: NDArray[np.float64]) -> NDArray[np.float64]:
        """Predictions, kept to what cannot be otherwise: more tokens take longer, but no more so than their number.

        Only of the size in use is the time sure. A slope that was learned wrong, when sizes still changed, would otherwise
        keep a chunk too small for ever, because nothing new is learned of others.
        """
        at = int(np.searchsorted(sizes, self.last))
        if not self.last or at == len(sizes) or int(sizes[at]) != self.last:
            return times_s
        sure = times_s[at]
        scaled = sure * sizes / self.last
        return np.clip(times_s, np.minimum(scaled, sure), np.maximum(scaled, sure))

    def pick(
        self,
        sizes: NDArray[np.int64],
        times_s: NDArray[np.float64],
        wanted_s: float,
        rates: NDArray[np.float64],
        least_rate: float,
    ) -> int:
        """One of `sizes`. `times_s` and `rates` (tokens/s of the prompt) belong to them; `least_rate` wins over `wanted_s`."""
        within = np.flatnonzero(times_s <= wanted_s / SLACK)
        highest = int(within[-1]) if len(within) else 0
        floor = 0
        if least_rate > 0:
            enough = np.flatnonzero(rates >= least_rate)
            floor = int(enough[0]) if len(enough) else int(np.flatnonzero(rates >= rates.max() * (1 - 1e-6))[-1])
        best = max(highest, floor)
        at = int(np.searchsorted(sizes, self.last))
        if self.last and at < len(sizes) and int(sizes[at]) == self.last:
            surely = np.flatnonzero(rates >= SHARE_SLACK * least_rate)
            lower = max(highest, int(surely[0]) if len(surely) else at)
            is_poor, is_far = rates[at] * SHARE_SLACK < least_rate, rates[at] * FAR < least_rate
            if best > at and best == len(sizes) - 1:
                pass  # it is not time that limits, but what was tried so far
            elif at < floor:
                best = best if self._is_due(is_poor, is_far=is_far) else at
            elif times_s[at] > wanted_s and lower < at:
                is_far = times_s[at] > FAR * max(wanted_s, times_s[lower])
                best = lower if self._is_due(True, is_far=is_far) else at
            else:
                self._n_broken = 0
                is_worth_it = best > at and self._n_held >= (HOLD if best - at == 1 else HOLD_SHORT)
                best = best if is_worth_it else at
        self.told = Told(int(sizes[best]), float(times_s[best]), wanted_s, float(rates[best]), floor > highest)
        return self.take(int(sizes[best]))

    def _is_due(self, is_broken: bool, *, is_far: bool) -> bool:
        """Whether what is wrong with the size in use has been so for long enough, or is wrong enough."""
        self._n_broken = self._n_broken + 1 if is_broken else 0
        return is_far or (self._n_broken >= N_BROKEN and self._n_held >= HOLD_SHORT)

    def take(self, size: int) -> int:
        """Note that `size` is taken."""
        is_same = size == self.last
        self._n_held = self._n_held + 1 if is_same else 0
        self._n_broken = self._n_broken if is_same else 0
        self.last = size
        return size
