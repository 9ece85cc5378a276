"""Cells of long sequences that change hands: what is left of a removed sequence and what a new one gets is as ever."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from qsa_context import Context, Model, qsa, tokens
from test_kept_states import cells_of

from llamamg.library import Library

N = 5000  # more than what is erased as ever


@pytest.fixture(scope="module")
def micro(library: Library, synth_model: Callable[..., Path]) -> Iterator[Model]:
    if not library.patched:
        pytest.skip("an unpatched build does not show its cells")
    model = Model(library, synth_model(weights="f32"))
    yield model
    model.close()


def ids(n: int, seed: int) -> np.ndarray:
    return np.array([t % 49000 for t in tokens(n, seed)], np.int32)


@pytest.mark.parametrize("native", [0, 1])
def test_a_sequence_in_the_cells_of_another(micro: Model, library: Library, native: int) -> None:
    """After a long one has gone, one of any length is computed as in a fresh context."""
    with (
        qsa(library, native),
        Context(micro, n_seq=2, n_ctx=8192) as used,
        Context(micro, n_seq=2, n_ctx=8192) as fresh,
    ):
        cells = cells_of(used)
        first = ids(N, 1)
        for at in range(0, N, 500):
            cells.place(1, at, first[at : at + 500])
        cells.empty(1)
        assert not used.llama.llama_memory_seq_pos_max(used.memory, 1) >= 0
        assert used.remove(1, -1)
        prompt = [int(t) for t in ids(40, 2)]
        np.testing.assert_array_equal(used.feed(prompt, seq=1), fresh.feed(prompt, seq=1))
        np.testing.assert_array_equal(used.feed([5], seq=1, start=40), fresh.feed([5], seq=1, start=40))


@pytest.mark.parametrize("n", [N - 700, N, N + 700])
def test_cells_are_adopted_and_the_rest_is_placed(micro: Model, n: int) -> None:
    with Context(micro, n_seq=3, n_ctx=8192) as context:
        cells = cells_of(context)
        for at in range(0, N, 500):
            cells.place(1, at, ids(N, 1)[at : at + 500])
        cells.empty(1)
        assert context.remove(1, -1)
        mine = ids(n, 3)
        m = cells.adopt(2, mine)
        assert m == min(n, N)
        if m < n:
            np.testing.assert_array_equal(cells.place(2, m, mine[m:]), np.arange(m, n))
        np.testing.assert_array_equal(cells.find(2, 0, n), np.arange(n))
        assert cells.appends(2, n, 10)
        assert cells.adopt(2, mine) == 0  # not empty
        assert context.remove(2, -1)
        context.feed([1, 2, 3], seq=2)
        np.testing.assert_array_equal(cells.find(2, 0, 3), np.arange(3))


def test_what_is_not_simple_is_left_to_the_library(micro: Model, library: Library, smol_model: Path) -> None:
    with Context(micro, n_seq=2, n_ctx=8192) as context:
        cells = cells_of(context)
        cells.place(0, 0, ids(300, 1))
        cells.empty(0)  # short
        np.testing.assert_array_equal(cells.find(0, 0, 300), np.arange(300))
    model = Model(library, smol_model)
    with Context(model, n_seq=2, n_ctx=8192, kind="F16") as context:
        cells = cells_of(context)
        cells.place(0, 0, ids(N, 1))
        assert context.remove(0, 100, 200)  # a hole
        cells.empty(0)
        assert context.llama.llama_memory_seq_pos_max(context.memory, 0) == N - 1
    with Context(model, n_seq=2, n_ctx=8192, kind="F16", unified=True) as context:
        cells = cells_of(context)
        cells.place(0, 0, ids(N, 1))
        cells.empty(0)  # cells that others may have too
        assert context.llama.llama_memory_seq_pos_max(context.memory, 0) == N - 1
    model.close()
