"""States for contexts of another number of sequences."""

from __future__ import annotations

import numpy as np
import pytest

from llamamg.statebytes import OddState, fitted, portable, with_streams

HEADER = [0x5A, 7]
CELLS = [3, 11, 12, 13]  # a count, and cells
RECURRENT = [1, 99, 98]


def state(*words: int) -> np.ndarray:
    return np.array([*HEADER, *words], "<u4").view(np.uint8)


def kv(n: int, stream: int, cells: list[int] = CELLS) -> list[int]:
    return [n, *[0] * stream, *cells, *[0] * (n - 1 - stream)]


@pytest.mark.parametrize("n_from", [1, 2, 5])
@pytest.mark.parametrize("n_to", [1, 2, 3])
def test_each_cache_gets_the_other_number_of_streams(n_from: int, n_to: int) -> None:
    for stream in range(n_from):
        plain = state(*kv(n_from, stream))
        made = with_streams(plain, plain, stream, n_from, n_to, partial_is_kv=True)
        assert made.tolist() == (plain if n_from == n_to else state(*kv(n_to, 0))).tolist()

        index = [2, 40, 41]
        whole = state(*kv(n_from, stream), *RECURRENT, *kv(n_from, stream, index))
        made = with_streams(whole, state(*RECURRENT), stream, n_from, n_to, partial_is_kv=False)
        wanted = state(*kv(n_to, 0), *RECURRENT, *kv(n_to, 0, index))
        assert made.tolist() == (whole if n_from == n_to else wanted).tolist()

        window = [1, 13]
        whole = state(*kv(n_from, stream), *kv(n_from, stream, window))
        made = with_streams(whole, state(*kv(n_from, stream, window)), stream, n_from, n_to, partial_is_kv=True)
        wanted = state(*kv(n_to, 0), *kv(n_to, 0, window))
        assert made.tolist() == (whole if n_from == n_to else wanted).tolist()


def test_a_recurrent_model_has_no_cache_at_all() -> None:
    alone = state(*RECURRENT)
    assert with_streams(alone, alone, 0, 2, 3, partial_is_kv=False).tolist() == alone.tolist()


@pytest.mark.parametrize(
    ("whole", "partial", "words"),
    [
        (state(*kv(3, 0)), state(*kv(3, 0)), "does not begin so"),
        (state(2, 5, *CELLS), state(2, 5, *CELLS), "other sequences"),
        (state(*kv(2, 1), *RECURRENT), state(4, 4, 4), "no part of"),
        (state(), state(), "does not begin so"),
    ],
)
def test_what_looks_odd_is_refused(whole: np.ndarray, partial: np.ndarray, words: str) -> None:
    with pytest.raises(OddState, match=words):
        with_streams(whole, partial, 1, 2, 3, partial_is_kv=len(whole) == len(partial))


@pytest.mark.parametrize("n_to", [1, 2, 3])
def test_a_portable_state_fits_any_number_of_streams(n_to: int) -> None:
    index, window = [2, 40, 41], [1, 13]
    plain = state(*kv(3, 2))
    made = portable(plain, plain, 2, 3, True)
    assert fitted(made, n_to, True).tolist() == state(*kv(n_to, 0)).tolist()
    hybrid = state(*kv(3, 1), *RECURRENT, *kv(3, 1, index))
    made = portable(hybrid, state(*RECURRENT), 1, 3, False)
    assert fitted(made, n_to, False).tolist() == state(*kv(n_to, 0), *RECURRENT, *kv(n_to, 0, index)).tolist()
    sliding = state(*kv(3, 0), *kv(3, 0, window))
    made = portable(sliding, state(*kv(3, 0, window)), 0, 3, True)
    assert fitted(made, n_to, True).tolist() == state(*kv(n_to, 0), *kv(n_to, 0, window)).tolist()
    recurrent = state(*RECURRENT)
    made = portable(recurrent, recurrent, 1, 3, False)
    assert fitted(made, n_to, False).tolist() == recurrent.tolist()


def test_what_others_saved_is_refused() -> None:
    for data in (state(*kv(3, 1)), state(), np.zeros(200, np.uint8)):
        with pytest.raises(OddState):
            fitted(data, 2, True)
