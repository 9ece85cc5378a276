"""Each step of a block: how long it took, what was drafted in it, and where the time of drafts goes.

Steps without drafts are told apart by how long ago the last draft was: what a draft leaves behind (graphs to be made
anew, a state to be put back) is paid in the steps behind it, and what the plugin itself does in all others.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

N_BEHIND = 4  # steps behind a draft that are looked at one by one; later ones are plain


@dataclass(frozen=True, slots=True)
class Step:
    """One step: seconds from the end of the one before it, and tokens over all its sequences."""

    seconds: float
    n_drafted: int
    n_accepted: int


class Steps:
    """Recorded one after the other: call `end` behind each step with the engine's counts since its start."""

    def __init__(self, now: float, n_drafted: int, n_accepted: int) -> None:
        self.all: list[Step] = []
        self._before = (now, n_drafted, n_accepted)

    def end(self, now: float, n_drafted: int, n_accepted: int) -> None:
        """A step ended."""
        t, drafted, accepted = self._before
        self.all.append(Step(now - t, n_drafted - drafted, n_accepted - accepted))
        self._before = (now, n_drafted, n_accepted)


def summed_up(on: Iterable[list[Step]], off: Iterable[list[Step]]) -> dict[str, Any]:
    """Milliseconds by kind of step, and what each kind lost: a share of the time with the plugin on; less than 0 is a gain.

    It is the time of its steps, less what their tokens take in steps of the mean length with the plugin off, over all time.
    """
    drafts, plain, behind = [], [], [[] for _ in range(N_BEHIND)]  # type: list[Step], list[float], list[list[float]]
    for steps in on:
        since = N_BEHIND
        for step in steps:
            if step.n_drafted:
                drafts.append(step)
                since = 0
                continue
            (behind[since] if since < N_BEHIND else plain).append(step.seconds)
            since += 1
    without = [step.seconds for steps in off for step in steps]
    usual = float(np.mean(without)) if without else 0.0
    total = sum(plain) + sum(map(sum, behind)) + sum(step.seconds for step in drafts)

    def lost(seconds: list[float], n_accepted: int = 0) -> float:
        return (sum(seconds) - usual * (len(seconds) + n_accepted)) / total if total else 0.0

    return {
        "off": _spread(without),
        "plain": _spread(plain),
        "behind": [_spread(each) for each in behind],
        "drafts": [[step.n_drafted, step.n_accepted, round(1e3 * step.seconds, 3)] for step in drafts],
        "lost": {
            "drafts": lost([step.seconds for step in drafts], sum(step.n_accepted for step in drafts)),
            "behind": lost([seconds for each in behind for seconds in each]),
            "plain": lost(plain),
        },
    }


def _spread(seconds: list[float]) -> dict[str, float]:
    if not seconds:
        return {"n": 0}
    low, median, high = (round(1e3 * float(v), 4) for v in np.percentile(seconds, (10, 50, 90)))
    return {"n": len(seconds), "mean_ms": round(1e3 * float(np.mean(seconds)), 4), "median_ms": median, "p10_ms": low,
            "p90_ms": high, "max_ms": round(1e3 * max(seconds), 3)}  # fmt: skip


def told(cell: str, steps: dict[str, Any]) -> str:
    """One line for people."""
    kinds = [("off", steps["off"]), ("on, no draft", steps["plain"])]
    kinds += [(f"{i + 1} behind a draft", each) for i, each in enumerate(steps["behind"])]
    means = ", ".join(f"{name} {each['mean_ms']:.3f} ({each['n']})" for name, each in kinds if each["n"])
    lost = steps["lost"]
    shares = ", ".join(f"{name} {lost[name]:.2%}" for name in ("drafts", "behind", "plain"))
    return f"{cell}: mean step in ms: {means}; lost of all time (-: gained), by steps: {shares}."
