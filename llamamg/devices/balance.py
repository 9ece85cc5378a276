"""Consecutive layers for each device, so that the slowest stage is as fast as memory lets it be."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

SPARE = 1 << 28  # bytes a device keeps free: what the estimate of memory leaves out


@dataclass(frozen=True, slots=True)
class Split:
    """How many items each device gets, in order, and each stage's seconds."""

    counts: tuple[int, ...]
    stages: tuple[float, ...]

    @property
    def slowest(self) -> float:
        return max(self.stages)

    def ranges(self) -> list[range]:
        """The items of each device."""
        ends = list(accumulate(self.counts))
        return [range(end - n, end) for n, end in zip(self.counts, ends, strict=True)]


def balance(
    seconds: Sequence[Sequence[float]], n_bytes: Sequence[int], room: Sequence[int | None], fixed: int = 0
) -> Split | None:
    """The split with the fastest slowest stage, of these the most even one. None when memory has no room for any.

    `seconds[device][item]`; `room` is free memory, None where it is not known; `fixed` is taken on every device that holds
    something. Exact, over all ways to cut: O(devices * items^2).
    """
    n_device, n_item = len(seconds), len(n_bytes)
    taken = [0, *accumulate(n_bytes)]
    time = [[0.0, *accumulate(row)] for row in seconds]
    nothing = (0.0, 0.0)
    # best[i]: (slowest stage, sum of squares) for the first i items on the devices so far
    best: list[tuple[float, float] | None] = [nothing, *[None] * n_item]
    cuts: list[list[int]] = []
    for device in range(n_device):
        now: list[tuple[float, float] | None] = [None] * (n_item + 1)
        cut = [0] * (n_item + 1)
        limit = room[device]
        for i in range(n_item + 1):
            for j in range(i, -1, -1):
                before = best[j]
                if i > j and limit is not None and taken[i] - taken[j] + fixed > limit:
                    break  # more items take more memory
                if before is None:
                    continue
                stage = time[device][i] - time[device][j]
                value = (max(before[0], stage), before[1] + stage * stage)
                known = now[i]
                if known is None or value < known:
                    now[i], cut[i] = value, j
        best = now
        cuts.append(cut)
    if best[n_item] is None:
        return None
    ends, at = [], n_item
    for cut in reversed(cuts):
        ends.append(at)
        at = cut[at]
    ends.reverse()
    begins = [0, *ends[:-1]]
    return Split(
        tuple(end - begin for begin, end in zip(begins, ends, strict=True)),
        tuple(time[d][end] - time[d][begin] for d, (begin, end) in enumerate(zip(begins, ends, strict=True))),
    )
