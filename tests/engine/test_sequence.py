"""The growing buffer of a slot's tokens against a Python list."""

from __future__ import annotations

import random

import numpy as np
import pytest

from llamamg.sequence import TokenBuffer


def array(tokens: list[int]) -> np.ndarray:
    return np.array(tokens, np.int32)


@pytest.mark.parametrize("seed", range(20))
def test_behaves_like_a_list(seed: int) -> None:
    rng = random.Random(seed)
    buffer, expected = TokenBuffer(capacity=2), []
    for _ in range(200):
        match rng.randrange(4):
            case 0:
                expected.append(token := rng.randrange(1000))
                buffer.append(token)
            case 1:
                more = [rng.randrange(1000) for _ in range(rng.randrange(40))]
                expected += more
                buffer.extend(array(more))
            case 2:
                n = rng.randrange(len(expected) + 20)
                del expected[n:]
                buffer.keep(n)
            case 3:
                n = rng.randrange(len(expected) + 1)
                start = rng.randrange(len(expected) - n + 1)
                del expected[start : start + n]
                buffer.discard(start, n)
        assert len(buffer) == len(expected)
        assert buffer.view().tolist() == expected
    if expected:
        assert buffer[-1] == expected[-1]
        assert list(buffer[2:5]) == expected[2:5]


@pytest.mark.parametrize("n_same", [0, 1, 63, 64, 65, 575, 576, 577, 5000])
def test_common_prefix_at_and_around_its_block_borders(n_same: int) -> None:
    buffer = TokenBuffer()
    buffer.extend(array([*range(n_same), -1, 7, 7]))
    assert buffer.common_prefix(array([*range(n_same), -2, 7, 7])) == n_same
    assert buffer.common_prefix(array(list(range(n_same)))) == n_same


def test_common_prefix_is_at_most_the_shorter_one() -> None:
    buffer = TokenBuffer()
    assert buffer.common_prefix(array([1, 2])) == 0
    buffer.extend(array([1, 2]))
    assert buffer.common_prefix(array([1, 2, 3])) == 2
    assert buffer.common_prefix(array([])) == 0


def test_view_ends_with_the_tokens_although_the_array_is_larger() -> None:
    buffer = TokenBuffer(capacity=64)
    buffer.extend(array([5, 6]))
    buffer.keep(1)
    assert buffer.common_prefix(array([5, 6])) == 1
