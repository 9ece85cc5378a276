"""The order of devices in the pipeline: every one up to eight devices, nearest neighbours beyond."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise, permutations

N_BRUTE = 8
WORTH = 0.05  # a change of order must save this part
N_TRIED = 2000  # orders whose split is computed, at most: those with the shortest hops


@dataclass(frozen=True, slots=True)
class Choice:
    """An order and what it costs: the slowest stage and all hops, in seconds. The present order is beside it."""

    order: tuple[int, ...]
    cost_s: float
    present_s: float
    tried: int


def hops_s(order: Sequence[int], hop: Sequence[Sequence[float]]) -> float:
    """All hops of one pass."""
    return sum(hop[a][b] for a, b in pairwise(order))


def choose(n: int, stage: Callable[[tuple[int, ...]], float], hop: Sequence[Sequence[float]], floor: float) -> Choice:
    """The best order of `n` devices; the present one, 0 1 2 …, unless another saves at least WORTH of its cost.

    `stage(order)` is the slowest stage of that order's best split, `floor` what no order's can be below: orders come by
    their hops, and once hops and floor together cost more than the best, nothing better follows.
    """
    present = tuple(range(n))
    present_s = stage(present) + hops_s(present, hop)
    candidates = permutations(range(n)) if n <= N_BRUTE else _neighbours(n, hop)
    best, best_s, tried = present, present_s * (1 - WORTH), 1
    for order in sorted(candidates, key=lambda order: hops_s(order, hop)):
        hops = hops_s(order, hop)
        if hops + floor >= best_s or tried > N_TRIED:
            break
        tried += 1
        cost = hops + stage(order)
        if cost < best_s:
            best, best_s = order, cost
    return Choice(best, present_s if best == present else best_s, present_s, tried)


def _neighbours(n: int, hop: Sequence[Sequence[float]]) -> list[tuple[int, ...]]:
    """From each device on, always to the nearest that is left."""
    orders = []
    for first in range(n):
        order, left = [first], set(range(n)) - {first}
        while left:
            nearest = min(left, key=lambda device: (hop[order[-1]][device], device))
            order.append(nearest)
            left.remove(nearest)
        orders.append(tuple(order))
    return orders
