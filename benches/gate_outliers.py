"""What happened in the gaps that are longer than the others: which prompt tokens, a checkpoint, a hand-over."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any

import numpy as np

from llamamg.engine import Engine

from .gate_policy import Stamp

N_WORST = 5  # of the largest gaps, how many are described
N_MOST = 200  # the same for outliers, which a bad policy has many of
ABOVE = 1.5  # times the median: an outlier
CHECKPOINT, HANDOVER, SAVING = "checkpoint", "hand-over", "save to the cache"
Gap = tuple[float, float]  # begin and end, perf_counter


@dataclass(frozen=True, slots=True)
class Seen:
    """`what` was new when a step of the engine ended at `at`."""

    at: float
    what: str


class Watch:
    """Looks at the slots after each step of the engine."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._before = [self._marks(slot) for slot in engine.slots]
        self.seen: list[Seen] = []

    @staticmethod
    def _marks(slot: Any) -> tuple[Any, ...]:
        # The objects themselves: an id may be used again.
        return slot.checkpoints[-1] if slot.checkpoints else None, (slot.moving, slot.context), slot.copying

    def look(self, now: float) -> None:
        """Note what has changed."""
        for i, slot in enumerate(self._engine.slots):
            marks, before = self._marks(slot), self._before[i]
            for what, new, old in zip((CHECKPOINT, HANDOVER, SAVING), marks, before, strict=True):
                if new is not old and new != old and (new is not None or what == HANDOVER):
                    self.seen.append(Seen(now, what))
            self._before[i] = marks


def largest(gaps: Seq[Gap], begin: float, stamps: Seq[Stamp]) -> list[dict[str, Any]]:
    """The largest gaps: how long, when, and the prompt tokens of the batches that ended meanwhile."""
    return [
        {"ms": 1e3 * (b - a), "at_s": a - begin, "chunks": _chunks(stamps, a, b)}
        for a, b in sorted(gaps, key=lambda gap: gap[0] - gap[1])[:N_WORST]
    ]


def outliers(
    gaps: Seq[Gap], begin: float, stamps: Seq[Stamp], seen: Seq[Seen], before: Seq[int] = ()
) -> list[dict[str, Any]]:
    """Gaps of more than 1.5 times the median, in order; sessions that had the same one count once.

    `before`: sizes of prompts' batches that ended before the first of `stamps`. `size_changed`: against the batch of a prompt
    before; `second_of_size`: the second in a row, in which a GPU's graph is made.
    """
    if not gaps:
        return []
    median = float(np.median([b - a for a, b in gaps]))
    long = sorted({(a, b) for a, b in gaps if b - a > ABOVE * median})
    told = []
    for a, b in long[:N_MOST]:
        chunks = _chunks(stamps, a, b)
        earlier = [*before, *(stamp.n_prompt for stamp in stamps if stamp.at <= a and stamp.n_prompt)]
        row = [*earlier[-2:], *chunks[:1]]
        told.append(
            {
                "ms": 1e3 * (b - a),
                "at_s": a - begin,
                "chunks": chunks,
                "size_changed": len(row) > 1 and bool(chunks) and row[-1] != row[-2],
                "second_of_size": len(row) > 2 and bool(chunks) and row[-1] == row[-2] != row[-3],
                "events": sorted({event.what for event in seen if a < event.at <= b}),
            }
        )
    return told


def _chunks(stamps: Seq[Stamp], a: float, b: float) -> list[int]:
    return [stamp.n_prompt for stamp in stamps if a < stamp.at <= b and stamp.n_prompt]
