"""Orders of devices."""

from __future__ import annotations

import random
from itertools import permutations

from llamamg.devices.order import WORTH, choose, hops_s


def line(n: int, seed: int) -> tuple[list[list[float]], list[int]]:
    """Devices on a line in a shuffled order: neighbours are near, everything else is far."""
    at = list(range(n))
    random.Random(seed).shuffle(at)
    return [[abs(at[a] - at[b]) ** 2 * 1.0 for b in range(n)] for a in range(n)], at


def test_the_shortest_chain_is_found_by_trying_all() -> None:
    hop, _ = line(6, 3)
    choice = choose(6, lambda _: 1.0, hop, 1.0)
    best = min(hops_s(order, hop) for order in permutations(range(6)))
    assert hops_s(choice.order, hop) == best == 5.0
    assert choice.cost_s == 6.0
    assert choice.present_s > choice.cost_s


def test_the_stages_count_too() -> None:
    """The shortest chain has a slow stage; a longer one is better in sum."""
    hop = [[0.0, 1.0, 5.0], [1.0, 0.0, 1.0], [5.0, 1.0, 0.0]]

    def stage(order: tuple[int, ...]) -> float:
        return 2.0 if order[-1] == 1 else 20.0

    choice = choose(3, stage, hop, 2.0)
    assert choice.order[-1] == 1
    assert choice.cost_s == 8.0


def test_the_present_order_stays_unless_it_pays() -> None:
    nearly = 1.0 - WORTH / 2
    hop = [[0.0, 1.0], [nearly, 0.0]]
    assert choose(2, lambda _: 0.0, hop, 0.0).order == (0, 1)
    hop[1][0] = 1.0 - 2 * WORTH
    assert choose(2, lambda _: 0.0, hop, 0.0).order == (1, 0)


def test_many_devices_go_to_the_nearest() -> None:
    hop, at = line(12, 5)
    choice = choose(12, lambda _: 0.0, hop, 0.0)
    assert hops_s(choice.order, hop) == 11.0
    assert [at[i] for i in choice.order] in ([*range(12)], [*range(11, -1, -1)])


def test_no_order_is_tried_that_cannot_win() -> None:
    tried: list[tuple[int, ...]] = []

    def stage(order: tuple[int, ...]) -> float:
        tried.append(order)
        return 10.0

    hop = [[0.0 if a == b else 1.0 for b in range(8)] for a in range(8)]
    assert choose(8, stage, hop, 10.0).order == tuple(range(8))
    assert len(tried) == 1
