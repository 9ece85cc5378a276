"""Paired comparisons: two sides measured in A-B-B-A blocks, so that drift of the machine cancels."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

CONFIDENCE = 0.99
MIN_EFFECT = 0.01  # smaller differences are not claimed, however sure they are
N_BOOTSTRAP_FROM = 30  # pairs; below that a t interval
N_RESAMPLES = 10_000
N_PAIRS_MIN = 3  # fewer say nothing


@dataclass(frozen=True, slots=True)
class Comparison:
    """What n pairs say about A / B. `low` and `high` bound the mean ratio at CONFIDENCE."""

    ratios: tuple[float, ...]
    median: float
    mean: float  # geometric
    low: float
    high: float
    method: str  # "t" | "bootstrap"
    verdict: str  # "A higher" | "A lower" | "no difference"

    @property
    def n(self) -> int:
        """Pairs."""
        return len(self.ratios)

    def json(self) -> dict[str, object]:
        """Plain values."""
        return {
            "n_pairs": self.n,
            "ratios": list(self.ratios),
            "median": self.median,
            "mean": self.mean,
            "interval": [self.low, self.high],
            "confidence": CONFIDENCE,
            "method": self.method,
            "verdict": self.verdict,
        }


@dataclass(slots=True)
class Pairs:
    """Measurements of both sides, pair by pair."""

    a: list[float] = field(default_factory=list)
    b: list[float] = field(default_factory=list)

    def compare(self) -> Comparison:
        """The comparison of all complete pairs."""
        n = min(len(self.a), len(self.b))
        return compare(self.a[:n], self.b[:n])


def order(n_pairs: int) -> str:
    """The sides in the order they are measured: ABBA ABBA …, two letters for each pair."""
    return "".join("AB" if i % 2 == 0 else "BA" for i in range(n_pairs))


def measure(
    n_pairs: int,
    a: Callable[[], float],
    b: Callable[[], float],
    done: Callable[[str, float], None] = lambda side, value: None,
) -> Pairs:
    """Run both sides `n_pairs` times in A-B-B-A order; `done` is told each value as it comes."""
    pairs = Pairs()
    for side in order(n_pairs):
        value = a() if side == "A" else b()
        (pairs.a if side == "A" else pairs.b).append(value)
        done(side, value)
    return pairs


def compare(a: Sequence[float], b: Sequence[float], seed: int = 0) -> Comparison:
    """Compare positive measurements pair by pair, on the log scale. Raises ValueError when there are fewer than two pairs."""
    if len(a) != len(b) or len(a) < 2:
        raise ValueError(f"a comparison needs at least two pairs, got {len(a)} and {len(b)} values")
    if min(*a, *b) <= 0:
        raise ValueError("only positive measurements can be compared by their ratio")
    logs = np.log(np.asarray(a, float)) - np.log(np.asarray(b, float))
    n, mean = len(logs), float(logs.mean())
    if n >= N_BOOTSTRAP_FROM:
        method = "bootstrap"
        picks = np.random.default_rng(seed).integers(0, n, (N_RESAMPLES, n))
        tail = 50 * (1 - CONFIDENCE)
        low, high = (float(v) for v in np.percentile(logs[picks].mean(axis=1), (tail, 100 - tail)))
    else:
        method = "t"
        half = t_quantile(0.5 + CONFIDENCE / 2, n - 1) * float(logs.std(ddof=1)) / math.sqrt(n)
        low, high = mean - half, mean + half
    return Comparison(
        ratios=tuple(math.exp(x) for x in logs),
        median=math.exp(float(np.median(logs))),
        mean=math.exp(mean),
        low=math.exp(low),
        high=math.exp(high),
        method=method,
        verdict=_verdict(mean, low, high),
    )


def _verdict(mean: float, low: float, high: float) -> str:
    if low <= 0 <= high or abs(math.expm1(mean)) < MIN_EFFECT:
        return "no difference"
    return "A higher" if mean > 0 else "A lower"


def t_quantile(p: float, df: int) -> float:
    """Quantile of Student's t distribution for p >= 0.5, to about 1e-9."""
    if not 0.5 <= p < 1 or df < 1:
        raise ValueError("t_quantile takes 0.5 <= p < 1 and df >= 1")
    low, high = 0.0, 1.0
    while _t_cdf(high, df) < p:
        low, high = high, 2 * high
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if _t_cdf(middle, df) < p else (low, middle)
    return (low + high) / 2


def _t_cdf(t: float, df: int) -> float:
    """Closed form for whole degrees of freedom: a finite sum in the angle atan(t / sqrt(df))."""
    angle = math.atan2(t, math.sqrt(df))
    cos2 = math.cos(angle) ** 2
    term, total = 1.0, 0.0
    if df % 2:
        term = math.cos(angle)
        for k in range(1, df, 2):
            total += term
            term *= cos2 * (k + 1) / (k + 2)
        return 0.5 + (angle + math.sin(angle) * total) / math.pi
    for k in range(0, df, 2):
        total += term
        term *= cos2 * (k + 1) / (k + 2)
    return 0.5 + math.sin(angle) * total / 2
