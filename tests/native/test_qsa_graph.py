"""Native QSA against upstream's graph, end to end on the micro model with F32 weights (16 blocks of 4, two QSA layers).

Upstream without flash attention computes in F32 throughout and is the reference where the whole prompt can be computed
in one mode. Its flash attention rounds queries and sums to F16 on the CPU: 3e-4 of the largest logit on this model.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from qsa_context import Context, Counted, Model, difference, qsa, tokens

from llamamg.library import Library

BUDGET = 64  # cells in 16 blocks
F16_ROUNDING = 1e-3


@pytest.fixture(scope="module")
def model(library: Library, micro: Model) -> Model:
    if not library.patched:
        pytest.skip("the unpatched build has no native QSA")
    return micro


@pytest.fixture
def counted(library: Library) -> Counted:
    return Counted(library)


# ---- against upstream ------------------------------------------------------------------------------------------------


def test_equal_while_everything_is_selected(library: Library, model: Model, counted: Counted) -> None:
    ids = tokens(BUDGET + 3)
    with Context(model, flash=False) as context:
        wanted = [context.feed(ids[:50])] + [context.feed([t], start=i) for i, t in enumerate(ids[50:], 50)]
    with qsa(library, 1), counted, Context(model) as context:
        got = [context.feed(ids[:50])] + [context.feed([t], start=i) for i, t in enumerate(ids[50:], 50)]
    assert (counted.n_native, counted.n_fallback, counted.n_pooled) == (18, 0, 16)
    assert max(map(difference, got, wanted)) < 1e-5
    assert [a.argmax() for a in got] == [b.argmax() for b in wanted]


@pytest.mark.parametrize(("kind", "limit"), [("F16", 1e-3), ("BF16", 1e-2), ("Q8_0", 1e-2), ("Q4_0", 2e-2)])
def test_close_with_other_caches(library: Library, model: Model, kind: str, limit: float) -> None:
    """The limit is upstream's own rounding of queries to the cache type."""
    ids = tokens(BUDGET)
    with Context(model, kind=kind) as context:
        wanted = context.feed(ids)
    with qsa(library, 1), Context(model, kind=kind) as context:
        got = context.feed(ids)
    assert 0 < difference(got, wanted) < limit


def step(library: Library, model: Model, n: int, value: int) -> np.ndarray:
    """Logits of the token at position n, computed with the switch at `value` after a native prompt."""
    ids = tokens(n + 1, seed=3)
    with Context(model) as context:
        with qsa(library, 1):
            context.feed(ids[:n])
        with qsa(library, value):
            return context.feed(ids[n:], start=n)


@pytest.mark.parametrize("n", [102, 254, 298, 410])
def test_same_selection_as_upstream_when_the_tail_is_full(library: Library, model: Model, n: int) -> None:
    """At position % 4 == 2 upstream's budget of cells cuts no block in two."""
    assert difference(step(library, model, n, 1), step(library, model, n, 0)) < F16_ROUNDING


def test_that_comparison_sees_one_cell_too_many(library: Library, model: Model) -> None:
    """One position later upstream attends to three cells of a seventeenth block."""
    assert difference(step(library, model, 255, 1), step(library, model, 255, 0)) > 2 * F16_ROUNDING


def test_greedy_text_is_upstreams(library: Library, model: Model) -> None:
    def text() -> list[int]:
        ids = tokens(40, seed=9)
        with Context(model) as context:
            out = [int(context.feed(ids).argmax())]
            for i in range(20):
                out.append(int(context.feed([out[-1]], start=40 + i).argmax()))
        return out

    with qsa(library, 1):
        native = text()
    assert native == text()


# ---- the same however it is cut --------------------------------------------------------------------------------------


@pytest.mark.parametrize("chunk", [7, 64, 256, 512])
def test_chunks_give_identical_bits(library: Library, model: Model, chunk: int) -> None:
    ids = tokens(700)
    with qsa(library, 1):
        with Context(model, n_ctx=1024, n_ubatch=2048) as context:
            whole = context.feed(ids)
        with Context(model, n_ctx=1024, n_ubatch=chunk) as context:
            assert (context.feed(ids) == whole).all()


def test_decode_equals_prefill(library: Library, model: Model) -> None:
    """One by one the recurrent layers round differently; a flipped selection would show as 1e-2."""
    ids = tokens(300)
    with qsa(library, 1), Context(model) as one, Context(model) as all_:
        assert difference(one.feed(ids, chunk=1), all_.feed(ids)) < 1e-5


def test_a_long_chunk(library: Library, model: Model) -> None:
    ids = tokens(2100)
    with qsa(library, 1):
        with Context(model, n_ctx=2304, n_ubatch=2048) as context:
            whole = context.feed(ids)
        with Context(model, n_ctx=2304, n_ubatch=512) as context:
            assert (context.feed(ids) == whole).all()


def test_the_same_prompt_twice_gives_identical_bits(library: Library, model: Model, counted: Counted) -> None:
    ids = tokens(200)
    with qsa(library, 1), counted, Context(model, kind="Q8_0") as context:
        first = context.feed(ids)
        context.feed(tokens(150, seed=2), start=200)
        context.clear()
        assert (context.feed(ids) == first).all()
    assert counted.n_pooled == 350 // 4 + 200 // 4


@pytest.mark.parametrize(("value", "n_built"), [(1, 1), (0, 3)])
def test_one_graph_serves_a_whole_answer(library: Library, model: Model, value: int, n_built: int) -> None:
    """Upstream builds a new one every 256 cells, because the mask gets wider."""
    with qsa(library, value), Context(model, n_ctx=1024) as context:
        context.feed(tokens(10))
        library.llama.llama_perf_context_reset(context.pointer)
        context.feed(tokens(600), start=10, chunk=1)
        assert 600 - library.llama.llama_perf_context(context.pointer).n_reused == n_built


# ---- streams ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n_seq", [3, 4, 5])
def test_streams_of_different_depth_do_not_see_each_other(library: Library, model: Model, n_seq: int) -> None:
    depths = [300, 77, 500, 3, 66][:n_seq]
    prompts = [tokens(depth + 8, seed=seq) for seq, depth in enumerate(depths)]
    with qsa(library, 1):
        solo = []
        for prompt, depth in zip(prompts, depths, strict=True):
            with Context(model) as context:
                context.feed(prompt[:depth])
                solo.append([context.feed([t], start=depth + i) for i, t in enumerate(prompt[depth:])])
        with Context(model, n_seq=n_seq) as context:
            for seq, (prompt, depth) in enumerate(zip(prompts, depths, strict=True)):
                context.feed(prompt[:depth], seq=seq)
            for i in range(8):
                rows = [(seq, depth + i, prompts[seq][depth + i]) for seq, depth in enumerate(depths)]
                joint = context.decode(rows, n_logits=n_seq)
                for seq in range(n_seq):
                    assert difference(joint[seq : seq + 1], solo[seq][i]) < 1e-5


def test_several_tokens_of_several_streams(library: Library, model: Model) -> None:
    prompts = [tokens(200, seed=seq) for seq in range(3)]
    with qsa(library, 1), Context(model, n_seq=3) as joint, Context(model, n_seq=3) as solo:
        rows = [(seq, i, t) for seq, prompt in enumerate(prompts) for i, t in enumerate(prompt)]
        joint.decode(rows)
        for seq, prompt in enumerate(prompts):
            solo.feed(prompt, seq=seq)
        rows = [(seq, 200, 7) for seq in range(3)]
        assert difference(joint.decode(rows, 3), solo.decode(rows, 3)) < 1e-5


# ---- edits -----------------------------------------------------------------------------------------------------------


def test_restored_state_pools_again(library: Library, model: Model, counted: Counted) -> None:
    """The target stream holds pooled keys of another text: using them would be 1e-2 off."""
    ids = tokens(200)
    with qsa(library, 1), Context(model, n_seq=2) as context:
        context.feed(ids)
        state = context.save(0)
        wanted = context.feed([5], start=200)
        context.feed(tokens(200, seed=8), seq=1)
        context.restore(state, 1)
        with counted:
            got = context.feed([5], seq=1, start=200)
        assert (got == wanted).all()
        assert (counted.n_pooled, counted.n_fallback) == (50, 0)


def test_state_moves_between_switch_positions(library: Library, model: Model) -> None:
    """Pooled keys are not in the state: it is the same bytes, and loads either way."""
    ids = tokens(66)
    with Context(model) as native, Context(model) as upstream:
        with qsa(library, 1):
            native.feed(ids)
            state = native.save(0)
        upstream.restore(state, 0)
        with qsa(library, 1):
            wanted = native.feed([5], start=66)
        assert difference(upstream.feed([5], start=66), wanted) < F16_ROUNDING


def test_copied_sequence_pools_again(library: Library, model: Model, counted: Counted) -> None:
    with qsa(library, 1), Context(model, n_seq=2) as context:
        context.feed(tokens(200, seed=8), seq=1)
        context.feed(tokens(150))
        context.remove(1, -1)
        context.copy(0, 1)
        with counted:
            rows = [(0, 150, 5), (1, 150, 5)]
            source, copy = context.decode(rows, 2)
        assert (source == copy).all()
        assert (counted.n_pooled, counted.n_fallback) == (37, 0)


def test_rolled_back_tokens_leave_no_trace(library: Library, model: Model, counted: Counted) -> None:
    """Rejected drafts complete blocks; the tokens that take their place complete them anew."""
    ids = tokens(130)
    with qsa(library, 1), Context(model, n_rollback=8) as context, Context(model, n_rollback=8) as straight:
        with counted:
            context.feed(ids[:118])
            context.decode([(0, 118 + i, 4000 + i) for i in range(7)])
            assert context.remove(0, 119)
            got = context.feed(ids[119:], start=119)
        straight.feed(ids[:118])
        straight.feed([4000], start=118)
        wanted = straight.feed(ids[119:], start=119)
        assert difference(got, wanted) < 1e-5
    assert (counted.n_fallback, counted.n_pooled) == (0, 29 + 2 + 3)


def test_switch_between_ubatches(library: Library, model: Model, counted: Counted) -> None:
    """What upstream's graph stored while the switch was off is pooled by the next native ubatch."""
    ids = tokens(263, seed=5)
    with Context(model) as mixed, Context(model) as upstream:
        for context in (mixed, upstream):
            with qsa(library, 1):
                context.feed(ids[:200])
            context.feed(ids[200:262], start=200)
        with counted, qsa(library, 1):
            got = mixed.feed(ids[262:], start=262)
        assert (counted.n_native, counted.n_pooled) == (1, 65 - 50)
        assert difference(got, upstream.feed(ids[262:], start=262)) < F16_ROUNDING


# ---- layouts that upstream's graph computes --------------------------------------------------------------------------


def test_unified_cache_of_one_sequence_is_native(library: Library, model: Model, counted: Counted) -> None:
    with qsa(library, 1), counted, Context(model, n_seq=2, unified=True) as context:
        context.feed(tokens(100))
    assert (counted.n_native, counted.n_fallback) == (1, 0)


def test_unified_cache_of_two_sequences_falls_back(library: Library, model: Model, counted: Counted) -> None:
    def run() -> list[np.ndarray]:
        with Context(model, n_seq=2, unified=True) as context:
            return [
                context.feed(tokens(100)),
                context.feed(tokens(90, seed=2), seq=1),
                context.decode([(0, 100, 5), (1, 90, 6)], 2),
            ]

    with qsa(library, 1), counted:
        got = run()
    assert (counted.n_native, counted.n_fallback) == (1, 2)
    wanted = run()
    # Once the first sequence's K/V is native the rest differs by rounding and by upstream's extra cells.
    assert difference(got[1], wanted[1]) == 0


def test_sequence_that_starts_late_falls_back(library: Library, model: Model, counted: Counted) -> None:
    with qsa(library, 1), counted, Context(model) as context:
        got = context.feed(tokens(100), start=8)
    assert (counted.n_native, counted.n_fallback) == (0, 1)
    with Context(model) as context:
        assert (context.feed(tokens(100), start=8) == got).all()


def test_cells_shared_in_one_stream_fall_back(library: Library, model: Model, counted: Counted) -> None:
    with qsa(library, 1), Context(model, n_seq=2, unified=True) as context:
        context.feed(tokens(100))
        context.copy(0, 1)
        with counted:
            context.feed([5], start=100)
        assert (counted.n_native, counted.n_fallback) == (0, 1)
        context.remove(1, -1)
        with counted:
            context.feed([6], start=101)
        assert (counted.n_native, counted.n_fallback, counted.n_pooled) == (1, 0, 25)


def test_image_falls_back_until_it_is_removed(library: Library, model: Model, counted: Counted) -> None:
    def run(context: Context) -> list[np.ndarray]:
        return [context.image(2, 3, seq=0, start=0), context.feed(tokens(80), start=3)]

    with Context(model) as context:
        wanted = run(context)
    with qsa(library, 1), Context(model) as context:
        with counted:
            got = run(context)
        assert (counted.n_native, counted.n_fallback) == (0, 2)
        assert all((a == b).all() for a, b in zip(got, wanted, strict=True))
        assert context.remove(0, -1)
        with counted:
            context.feed(tokens(80))
        assert (counted.n_native, counted.n_fallback) == (1, 0)


def test_it_is_said_once_and_counted_always(library: Library, model: Model, counted: Counted, tmp_path: Path) -> None:
    library.mg.set_log("warn", tmp_path / "log")
    try:
        with qsa(library, 1), counted, Context(model) as context:
            for i in range(3):
                context.feed(tokens(20), start=8 + 20 * i)
    finally:
        library.mg.set_log("warn")
    assert (counted.n_native, counted.n_fallback) == (0, 3)
    said = [line for line in (tmp_path / "log").read_text().splitlines() if "upstream's attention" in line]
    assert len(said) == 1
    reason = library.mg.qsa_stats().reason
    assert reason
    assert reason in said[0]


def test_an_edit_in_the_middle_falls_back(library: Library, model: Model, counted: Counted) -> None:
    """The hole is filled with later tokens, so cells are positions no more: as upstream, bit for bit."""
    ids = tokens(150)

    def edited(value: int) -> list[np.ndarray]:
        with Context(model) as context:
            with qsa(library, 1):
                context.feed(ids[:120])
            assert context.remove(0, 40, 60)
            with qsa(library, value):
                return [context.feed(ids[120:149], start=120), context.feed(ids[149:], start=149)]

    wanted = edited(0)
    with counted:
        got = edited(1)
    assert all((a == b).all() for a, b in zip(got, wanted, strict=True))
    assert (counted.n_native, counted.n_fallback) == (1, 2)


def test_another_text_from_a_restored_middle_on(library: Library, model: Model, counted: Counted) -> None:
    """The way to edit in the middle: back to a saved state, then on with other tokens over the old pooled keys."""
    ids, other = tokens(200), tokens(90, seed=6)
    with qsa(library, 1), Context(model) as edited, Context(model) as straight:
        edited.feed(ids[:101])
        state = edited.save(0)
        edited.feed(ids[101:], start=101)
        edited.restore(state, 0)
        with counted:
            got = edited.feed(other, start=101)
        straight.feed(ids[:101])
        assert (got == straight.feed(other, start=101)).all()
    assert (counted.n_fallback, counted.n_pooled) == (0, 191 // 4)


def test_without_flash_attention_upstream_computes(library: Library, model: Model, counted: Counted) -> None:
    with qsa(library, 1), counted, Context(model, flash=False) as context:
        got = context.feed(tokens(100))
    assert (counted.n_native, counted.n_fallback) == (0, 1)
    with Context(model, flash=False) as context:
        assert (context.feed(tokens(100)) == got).all()


# ---- off -------------------------------------------------------------------------------------------------------------


def test_off_allocates_and_counts_nothing(library: Library, model: Model) -> None:
    before = library.mg.qsa_stats()
    with Context(model) as context:
        context.feed(tokens(100))
        assert library.mg.qsa_stats() == before


def test_memory_is_counted_and_freed(library: Library, model: Model) -> None:
    with qsa(library, 1):
        before = library.mg.qsa_stats().n_bytes
        with Context(model, n_ctx=512, n_seq=2):
            # two layers, two streams, 128 blocks of 64 floats
            assert library.mg.qsa_stats().n_bytes - before >= 2 * 2 * 128 * 64 * 4
        assert library.mg.qsa_stats().n_bytes == before
