"""Cuts of a model into stages, against every cut there is."""

from __future__ import annotations

import random
from itertools import combinations_with_replacement

import pytest

from llamamg.devices.balance import balance


def slowest(seconds: list[list[float]], cuts: tuple[int, ...]) -> float:
    ends = (*cuts, len(seconds[0]))
    begins = (0, *cuts)
    return max(sum(row[a:b]) for row, a, b in zip(seconds, begins, ends, strict=True))


@pytest.mark.parametrize("seed", range(20))
def test_it_is_the_best_of_all_cuts(seed: int) -> None:
    rnd = random.Random(seed)
    n_device, n_item = rnd.randint(1, 4), rnd.randint(1, 9)
    seconds = [[rnd.uniform(1, 3) * speed for _ in range(n_item)] for speed in rnd.choices([1, 2, 5], k=n_device)]
    split = balance(seconds, [1] * n_item, [None] * n_device)
    assert split is not None
    assert sum(split.counts) == n_item
    best = min(slowest(seconds, cuts) for cuts in combinations_with_replacement(range(n_item + 1), n_device - 1))
    assert split.slowest == pytest.approx(best)


@pytest.mark.parametrize("seed", range(20))
def test_memory_is_a_limit_on_each_device(seed: int) -> None:
    rnd = random.Random(seed)
    sizes = [rnd.randint(1, 9) for _ in range(8)]
    room = [rnd.randint(5, 30) for _ in range(3)]
    seconds = [[1.0] * 8, [1.0] * 8, [4.0] * 8]
    split = balance(seconds, sizes, room, fixed=2)
    found = []
    for cuts in combinations_with_replacement(range(9), 2):
        parts = [sizes[a:b] for a, b in zip((0, *cuts), (*cuts, 8), strict=True)]
        if all(not part or sum(part) + 2 <= limit for part, limit in zip(parts, room, strict=True)):
            found.append(slowest(seconds, cuts))
    assert (split is None) == (not found)
    if split is not None:
        assert split.slowest == min(found)


def test_equal_devices_get_equal_stages() -> None:
    split = balance([[1.0] * 9] * 4, [1] * 9, [None] * 4)
    assert split is not None
    assert sorted(split.counts) == [2, 2, 2, 3]


def test_more_devices_than_items_leave_some_empty() -> None:
    split = balance([[1.0, 1.0]] * 5, [1, 1], [None] * 5)
    assert split is not None
    assert sorted(split.counts) == [0, 0, 0, 1, 1]
    assert [len(part) for part in split.ranges()] == list(split.counts)


def test_a_device_that_holds_nothing_needs_no_room() -> None:
    split = balance([[1.0], [1.0]], [10], [0, 20], fixed=5)
    assert split is not None
    assert split.counts == (0, 1)
