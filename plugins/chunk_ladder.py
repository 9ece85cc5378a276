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
HOLD = 16  # steps after which a size one rung up is worth its new graph
SLACK = 1.05  # a size is taken when it is so much faster than wanted, and given up when it is slower


def up_to(n: int) -> NDArray[np.int64]:
    """The sizes of at most `n` tokens; [1] where there is none."""
    return SIZES[: max(1, int(np.searchsorted(SIZES, n, "right")))]


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
            floor = int(enough[0]) if len(enough) else len(rates) - 1 - int(rates[::-1].argmax())
        best = max(highest, floor)
        at = int(np.searchsorted(sizes, self.last))
        if self.last and at < len(sizes) and int(sizes[at]) == self.last and at != best:
            is_slow = times_s[at] > wanted_s and at > floor + 1
            # At the top of the list it is not time that limits, but what was tried so far.
            is_small = at < floor or best - at > 1 or (best > at and (self._n_held >= HOLD or best == len(sizes) - 1))
            if not is_slow and not is_small:
                best = at
        self.told = Told(int(sizes[best]), float(times_s[best]), wanted_s, float(rates[best]), floor > highest)
        return self.take(int(sizes[best]))

    def take(self, size: int) -> int:
        """Note that `size` is taken."""
        self._n_held = self._n_held + 1 if size == self.last else 0
        self.last = size
        return size
