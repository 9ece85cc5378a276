"""Counters of the engine. Written on the engine thread only; others read them whenever they like."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field

import numpy as np

TTFT_BOUNDS_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)
ITL_BOUNDS_S = (0.002, 0.005, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)


class Histogram:
    """Counts of observations in seconds, by upper bound; the last count is above every bound."""

    __slots__ = ("bounds", "count", "counts", "sum")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0
        self.count = 0

    def observe(self, seconds: float) -> None:
        """Add one observation."""
        self.counts[bisect_left(self.bounds, seconds)] += 1
        self.sum += seconds
        self.count += 1


class ItlWindow:
    """The last inter-token gaps of all sequences, for hooks that hold a latency."""

    __slots__ = ("_at", "_gaps_s", "n")

    def __init__(self, size: int = 512) -> None:
        self._gaps_s = np.zeros(size)
        self._at = 0
        self.n = 0

    def add(self, seconds: float) -> None:
        """Add one gap."""
        self._gaps_s[self._at] = seconds
        self._at = (self._at + 1) % len(self._gaps_s)
        if self.n < len(self._gaps_s):
            self.n += 1

    def percentile_ms(self, percent: float) -> float:
        """A percentile of the window, 0.0 while it is empty."""
        return float(np.percentile(self._gaps_s[: self.n], percent)) * 1e3 if self.n else 0.0


@dataclass(slots=True)
class Stats:
    """Totals since the start; names follow llama-server's metrics."""

    n_prompt_tokens: int = 0
    n_prompt_cached: int = 0
    prompt_s: float = 0.0
    n_predicted: int = 0
    predicted_s: float = 0.0
    n_decode: int = 0
    n_tokens_max: int = 0
    n_busy_sum: int = 0
    n_draft: int = 0
    n_draft_accepted: int = 0
    n_drafts: int = 0
    accepted_per_pos: list[int] = field(default_factory=list)
    n_requests_processing: int = 0
    n_requests_deferred: int = 0
    n_kv_retries: int = 0
    n_moves: int = 0
    n_hand_overs: int = 0  # moves between contexts
    hand_over_s: float = 0.0  # their time on a context's thread
    n_moves_dropped: int = 0  # moves that cost an idle slot its cached prompt
    ttft: Histogram = field(default_factory=lambda: Histogram(TTFT_BOUNDS_S))
    queue: Histogram = field(default_factory=lambda: Histogram(TTFT_BOUNDS_S))  # from arrival into a slot
    prefill: Histogram = field(default_factory=lambda: Histogram(TTFT_BOUNDS_S))  # from the slot to the first token
    itl: Histogram = field(default_factory=lambda: Histogram(ITL_BOUNDS_S))
