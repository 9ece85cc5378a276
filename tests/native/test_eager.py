"""Which ubatches a backend is told to launch instead of recording: seen from inside a computation, as a backend would.

That CUDA obeys takes a CUDA device: `llamamg bench steps --switch record-rows`.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from llamamg import demo
from llamamg.library import Library

SWITCH = "record-rows"
N_UBATCH = 16


class Watched:
    """A context whose graphs ask in their first node what a device would ask."""

    def __init__(self, library: Library) -> None:
        self.library = library
        self.base = ctypes.CDLL(str(library.dir / "libggml-base.so"))
        self.told: list[int] = []
        llama = library.llama
        params = llama.llama_context_default_params()
        params.n_ctx, params.n_batch, params.n_ubatch, params.n_threads, params.n_threads_batch = (
            256,
            64,
            N_UBATCH,
            1,
            1,
        )
        self._is_first = False
        self._watch = type(params.cb_eval)(self._node)
        params.cb_eval = self._watch
        self.model = llama.llama_model_load_from_file(
            str(demo.demo_model()).encode(), llama.llama_model_default_params()
        )
        self.context = llama.llama_init_from_model(self.model, params)

    def _node(self, tensor: Any, ask: bool, data: Any) -> bool:
        name = ctypes.cast(self.base.ggml_get_name(ctypes.c_void_p(tensor)), ctypes.c_char_p).value
        if ask and name == b"attn_norm-0":  # once in each ubatch
            self.told.append(self.base.mg_eager())
        return not ask

    def decode(self, n: int, *, all_logits: bool = False) -> list[int]:
        """What was told in each ubatch of `n` tokens of one sequence."""
        llama = self.library.llama
        llama.llama_memory_clear(llama.llama_get_memory(self.context), True)
        batch = llama.llama_batch_init(n, 0, 1)
        batch.n_tokens = n
        for i in range(n):
            batch.token[i], batch.pos[i], batch.n_seq_id[i], batch.logits[i] = 100 + i, i, 1, all_logits or i == n - 1
            batch.seq_id[i][0] = 0
        self.told = []
        try:
            assert llama.llama_decode(self.context, batch) == 0
        finally:
            llama.llama_batch_free(batch)
        return self.told

    def close(self) -> None:
        self.library.llama.llama_free(self.context)
        self.library.llama.llama_model_free(self.model)


@pytest.fixture(scope="module")
def watched(library: Library) -> Iterator[Watched]:
    if not library.patched:
        pytest.skip("the build under test is the unpatched one")
    watched = Watched(library)
    watched.base.ggml_get_name.restype = ctypes.c_void_p
    yield watched
    watched.close()


def test_ubatches_of_a_prompt_from_the_switch_on_are_launched(library: Library, watched: Watched) -> None:
    with library.mg.held({SWITCH: 8}):
        before = library.mg.trace_count("eager")
        assert watched.decode(8) == [1]
        assert watched.decode(7) == [0]
        assert watched.decode(15) == [1]
        assert watched.decode(1) == [0]
        assert library.mg.trace_count("eager") - before == 2
        assert watched.base.mg_eager() == 0, "nothing is computed now"


def test_full_ubatches_are_recorded(library: Library, watched: Watched) -> None:
    with library.mg.held({SWITCH: 8}):
        assert watched.decode(N_UBATCH) == [0]
        assert watched.decode(2 * N_UBATCH + 8) == [0, 0, 1]
        assert watched.decode(2 * N_UBATCH + 7) == [0, 0, 0]


def test_rows_that_all_have_logits_are_recorded(library: Library, watched: Watched) -> None:
    with library.mg.held({SWITCH: 8}):
        assert watched.decode(12, all_logits=True) == [0]


def test_off_and_toggled(library: Library, watched: Watched) -> None:
    before = library.mg.trace_count("eager")
    with library.mg.held({SWITCH: 0}):
        assert watched.decode(40) == [0, 0, 0]
    assert library.mg.trace_count("eager") == before
    for value, told in ((12, [1]), (13, [0]), (0, [0]), (1, [1])):
        with library.mg.held({SWITCH: value}):
            assert watched.decode(12) == told


def test_a_thread_knows_of_its_own_ubatch_only(library: Library, watched: Watched) -> None:
    seen: list[int] = []
    with library.mg.held({SWITCH: 8}):
        watched.base.mg_eager_ubatch(64, 0, 512)
        try:
            thread = threading.Thread(target=lambda: seen.append(watched.base.mg_eager()))
            thread.start()
            thread.join()
            assert watched.base.mg_eager() == 1
        finally:
            watched.base.mg_eager_ubatch(0, 0, 0)
    assert seen == [0]
