"""What passes through the model take by how many sequences they decode, learned from the steps of a server."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from statistics import median

N_KEPT = 8  # times of one shape; older ones go
N_SHAPES = 64  # of one depth; many slots make thousands, and each comparison looks at all
N_KNOWN = 3  # so many are one that no disturbance decides
WORTH = 0.95  # a joint pass must take less than this share of the passes it replaces
SHALLOW = 4096  # tokens; up to there the depth of a sequence hardly matters

Runs = tuple[int, ...]


def runs_of(seq_ids: Iterable[int]) -> Runs:
    """Lengths of the runs of consecutive ids, in the order of the rows: each run is a pass of its own."""
    lengths: list[int] = []
    before = -2
    for id_ in seq_ids:
        if lengths and id_ == before + 1:
            lengths[-1] += 1
        else:
            lengths.append(1)
        before = id_
    return tuple(lengths)


class _Depth:
    """Times at about one depth."""

    def __init__(self) -> None:
        self._times: dict[Runs, deque[float]] = {}  # the shape seen last at the end

    def add(self, runs: Runs, seconds: float) -> None:
        key = tuple(sorted(runs))
        times = self._times.pop(key, None) or deque(maxlen=N_KEPT)
        times.append(seconds)
        self._times[key] = times
        if len(self._times) > N_SHAPES:
            del self._times[next(iter(self._times))]

    def is_known(self, runs: Runs) -> bool:
        return len(self._times.get(tuple(sorted(runs)), ())) >= N_KNOWN

    def apart(self, runs: Runs) -> float | None:
        """A step of these passes: as measured, else the sum of what each takes."""
        key = tuple(sorted(runs))
        if self.is_known(key):
            return median(self._times[key])
        passes = [self.joint(n) for n in key]
        known = [seconds for seconds in passes if seconds is not None]
        return sum(known) if len(known) == len(passes) else None

    def joint(self, n: int) -> float | None:
        """One pass of `n` sequences: as measured, else on the line through what is known on both sides, or nearest."""
        known = self._passes()
        if n in known:
            return known[n]
        below, above = sorted(k for k in known if k < n), sorted(k for k in known if k > n)
        if not below or len(known) < 2:
            return None
        a, b = (below[-1], above[0]) if above else (below[-2], below[-1])
        return max(known[a] + (known[b] - known[a]) * (n - a) / (b - a), known[below[-1]])

    def _passes(self) -> dict[int, float]:
        """Seconds of one pass by its number of sequences: of steps whose passes are alike, single ones first."""
        found: dict[int, float] = {}
        for key in sorted(self._times, key=len):
            if len(set(key)) == 1 and self.is_known(key):
                found.setdefault(key[0], median(self._times[key]) / len(key))
        return found


class PassTimes:
    """Compares one pass of several sequences with several passes, at the depth in question or the nearest known one."""

    def __init__(self) -> None:
        self._depths: dict[int, _Depth] = {}

    def add(self, runs: Runs, depth: int, seconds: float) -> None:
        """A step of these passes, whose deepest sequence held `depth` tokens, took so long."""
        self._depths.setdefault(_class(depth), _Depth()).add(runs, seconds)

    def is_worth(self, runs: Runs, depth: int) -> bool | None:
        """Whether one pass is clearly faster than these; None while nobody knows."""
        at = _class(depth)
        for near in sorted(self._depths, key=lambda other: abs(other - at)):
            apart, joint = self._depths[near].apart(runs), self._depths[near].joint(sum(runs))
            if apart is not None and joint is not None:
                return joint < WORTH * apart
        return None

    def is_known(self, runs: Runs, depth: int) -> bool:
        """Whether steps of these very passes were measured at this depth."""
        at = self._depths.get(_class(depth))
        return at is not None and at.is_known(runs)


def _class(depth: int) -> int:
    """Depths in one class differ by a factor of two at most, all shallow ones are alike."""
    return max(depth, SHALLOW).bit_length()
