"""Native QSA without raw index keys against native QSA with them: edits, states and copies have to carry pooled keys."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from qsa_context import Context, Counted, Model, difference, qsa, tokens

from llamamg.errors import NativeError
from llamamg.library import Library

PARTIAL_ONLY = 1
RING = 4096


@pytest.fixture(scope="module")
def model(library: Library, synth_model: Callable[..., Path]) -> Iterator[Model]:
    if not library.patched:
        pytest.skip("the unpatched build has no native QSA")
    model = Model(library, synth_model(weights="f32"))
    with qsa(library, 1):
        yield model
    model.close()


@pytest.fixture
def counted(library: Library) -> Counted:
    return Counted(library)


@contextmanager
def dropping(library: Library) -> Iterator[None]:
    """Contexts made inside keep no raw keys."""
    library.mg.set_switch("qsa-drop-raw", 1)
    try:
        yield
    finally:
        library.mg.set_switch("qsa-drop-raw", 0)


def lean(model: Model, **options: object) -> Context:
    with dropping(model.library):
        return Context(model, **options)  # type: ignore[arg-type]


def test_it_computes_the_same(library: Library, model: Model, counted: Counted) -> None:
    """Raw keys are pooled in F32 whatever the cache type; with an F32 cache that is all the same."""
    ids = tokens(320)
    with Context(model) as with_raw:
        wanted = [with_raw.feed(ids[:300])] + [with_raw.feed([t], start=i) for i, t in enumerate(ids[300:], 300)]
    with counted, lean(model) as context:
        assert library.mg.qsa_stats().n_lean == 1
        got = [context.feed(ids[:300])] + [context.feed([t], start=i) for i, t in enumerate(ids[300:], 300)]
    assert library.mg.qsa_stats().n_lean == 0
    assert max(map(difference, got, wanted)) < 1e-5
    assert (counted.n_native, counted.n_fallback, counted.n_pooled) == (21, 0, 80)


@pytest.mark.parametrize("chunk", [1, 7, 64, 256])
def test_chunks_agree(model: Model, chunk: int) -> None:
    ids = tokens(300)
    with lean(model) as whole, lean(model) as cut:
        assert difference(cut.feed(ids, chunk=chunk), whole.feed(ids)) < 1e-5


def test_beyond_the_ring(model: Model) -> None:
    ids = tokens(2 * RING + 901)
    with Context(model, n_ctx=9216) as with_raw, lean(model, n_ctx=9216) as context:
        assert difference(context.feed(ids, chunk=1021), with_raw.feed(ids, chunk=1021)) < 1e-5


def test_it_takes_less_memory(library: Library, model: Model, tmp_path: Path) -> None:
    def mib(make: Callable[[], Context]) -> float:
        log = tmp_path / "log"
        log.unlink(missing_ok=True)
        library.mg.set_log("info", log)
        with make():
            library.mg.set_log("warn")
        lines = log.read_text().splitlines()
        return sum(float(line.split("=")[-1].split()[0]) for line in lines if "KV buffer size" in line)

    # a raw key of 64 floats per cell in two layers
    assert mib(lambda: Context(model, n_ctx=8192)) - mib(lambda: lean(model, n_ctx=8192)) == 8192 * 64 * 4 * 2 / 2**20


def test_rolled_back_tokens_leave_no_trace(model: Model) -> None:
    ids = tokens(130)
    with lean(model, n_rollback=8) as context, lean(model, n_rollback=8) as straight:
        context.feed(ids[:118])
        context.decode([(0, 118 + i, 4000 + i) for i in range(7)])
        assert context.remove(0, 119)
        got = context.feed(ids[119:], start=119)
        straight.feed(ids[:118])
        straight.feed([4000], start=118)
        assert difference(got, straight.feed(ids[119:], start=119)) < 1e-5


@pytest.mark.parametrize("n", [200, 201, 203])
def test_states_carry_pooled_keys(model: Model, n: int) -> None:
    ids, more = tokens(n), tokens(9, seed=3)
    with lean(model, n_seq=2) as context:
        context.feed(ids)
        state = context.save(0)
        wanted = [context.feed([t], start=n + i) for i, t in enumerate(more)]
        context.feed(tokens(220, seed=8), seq=1)
        context.restore(state, 1)
        got = [context.feed([t], seq=1, start=n + i) for i, t in enumerate(more)]
        assert all((a == b).all() for a, b in zip(got, wanted, strict=True))
        with Context(model) as with_raw:
            load = context.llama.llama_state_seq_set_data
            assert load(with_raw.pointer, state, len(state), 0) == 0, "a context with raw keys refuses it"


@pytest.mark.parametrize("n", [148, 150])
def test_copies_carry_pooled_keys(model: Model, n: int) -> None:
    with lean(model, n_seq=3) as context:
        context.feed(tokens(200, seed=8), seq=2)
        context.feed(tokens(n))
        context.remove(2, -1)
        context.copy(0, 2)
        for i in range(6):
            source, copy = (context.feed([5 + i], seq=seq, start=n + i) for seq in (0, 2))
            assert difference(source, copy) < 1e-6


@pytest.mark.parametrize("n", [148, 150])
def test_a_move_to_another_context_carries_pooled_keys(model: Model, n: int) -> None:
    ids, more = tokens(n), tokens(6, seed=3)
    with lean(model, n_seq=2) as source, lean(model, n_seq=2) as target, lean(model, n_seq=2) as straight:
        source.feed(ids, seq=1)
        target.feed(tokens(60, seed=8))
        target.remove(0, -1)
        model.library.mg.move_sequence(source.pointer, 1, target.pointer, 0)
        straight.feed(ids)
        for i, token in enumerate(more):
            moved, stayed = (c.feed([token], start=n + i) for c in (target, straight))
            assert difference(moved, stayed) < 1e-6


@pytest.mark.parametrize("n", [100, 101, 103])
def test_a_snapshot_of_the_recurrent_state_brings_the_open_block_back(model: Model, n: int) -> None:
    """What the engine does to go back in a conversation: raw keys of the open block have left the ring long ago."""
    ids, other, llama = tokens(5000), tokens(200, seed=6), model.llama
    with lean(model, n_ctx=5376) as context, lean(model, n_ctx=5376) as straight:
        context.feed(ids[:n])
        size = llama.llama_state_seq_get_size_ext(context.pointer, 0, PARTIAL_ONLY)
        data = (ctypes.c_uint8 * size)()
        assert llama.llama_state_seq_get_data_ext(context.pointer, data, size, 0, PARTIAL_ONLY) == size
        context.feed(ids[n:], start=n)
        assert llama.llama_state_seq_set_data_ext(context.pointer, data, size, 0, PARTIAL_ONLY) == size
        assert context.remove(0, n)
        straight.feed(ids[:n])
        assert (context.feed(other, start=n) == straight.feed(other, start=n)).all()


def test_one_graph_serves_a_whole_answer(library: Library, model: Model) -> None:
    with lean(model, n_ctx=1024) as context:
        context.feed(tokens(10))
        library.llama.llama_perf_context_reset(context.pointer)
        context.feed(tokens(300), start=10, chunk=1)
        assert 300 - library.llama.llama_perf_context(context.pointer).n_reused == 1


# ---- what it cannot do ends in a sentence ------------------------------------------------------------------------------


def test_it_cannot_be_switched_off(library: Library, model: Model) -> None:
    ids = tokens(120)
    with lean(model) as context, Context(model) as other:
        context.feed(ids[:100])
        with (
            qsa(library, 0),
            pytest.raises(NativeError, match=r"raw index keys were dropped at the start \(--qsa-drop"),
        ):
            library.mg.adapt(context.pointer, 2**40)
        assert library.mg.adapt(context.pointer, 2**40) == ""
        with qsa(library, 0):
            got = context.feed(ids[100:], start=100)
        other.feed(ids[:100])
        assert difference(got, other.feed(ids[100:], start=100)) < 1e-5


def test_layouts_for_upstream_fail_and_the_context_lives_on(library: Library, model: Model, tmp_path: Path) -> None:
    library.mg.set_log("error", tmp_path / "log")
    try:
        with lean(model, n_seq=2, unified=True) as context:
            wanted = context.feed(tokens(100))
            with pytest.raises(AssertionError, match="llama_decode returned"):
                context.feed(tokens(20), seq=1)
            context.clear()
            with pytest.raises(AssertionError, match="llama_decode returned"):
                context.image(2, 3, seq=0, start=0)
            context.clear()
            assert (context.feed(tokens(100)) == wanted).all()
    finally:
        library.mg.set_log("warn")
    said = (tmp_path / "log").read_text()
    assert "a ubatch cannot be computed without raw index keys: the cells of a sequence are not its positions" in said


def test_a_context_that_cannot_be_native_is_not_made(library: Library, model: Model, tmp_path: Path) -> None:
    library.mg.set_log("error", tmp_path / "log")
    try:
        with pytest.raises(AssertionError, match="no context"):
            lean(model, flash=False)
    finally:
        library.mg.set_log("warn")
    assert "so raw index keys cannot be dropped: it needs flash attention" in (tmp_path / "log").read_text()
    assert library.mg.qsa_stats().n_lean == 0
