"""Turning native QSA on and off in a context with living sequences: what is rebuilt, reserved and refused."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from qsa_context import Context, Model, difference, qsa, tokens

from llamamg.errors import NativeError
from llamamg.library import Library

PLENTY = 2**40


@pytest.fixture(scope="module")
def model(library: Library, micro: Model) -> Model:
    if not library.patched:
        pytest.skip("the unpatched build has no native QSA")
    return micro


def test_switching_on_pools_the_keys_of_living_sequences(library: Library, model: Model) -> None:
    """The keys are those a context has that was native all along: the next token has the same bits."""
    prompts = [tokens(200), tokens(83, seed=2)]
    with Context(model, n_seq=3) as context, Context(model, n_seq=3) as native:
        with qsa(library, 1):
            for seq, prompt in enumerate(prompts):
                native.feed(prompt, seq=seq)
                # the same K and V in both: only the pooled keys are at stake
                state = native.save(seq)
                with qsa(library, 0):
                    context.restore(state, seq)
        before = library.mg.qsa_stats()
        with qsa(library, 1):
            done = library.mg.adapt(context.pointer, PLENTY)
            after = library.mg.qsa_stats()
            rows = [(0, 200, 5), (1, 83, 6)]
            got = context.decode(rows, 2)
            assert (got == native.decode(rows, 2)).all()
            assert library.mg.adapt(context.pointer, PLENTY) == "", "nothing is left to do"
        assert after.n_rebuilt - before.n_rebuilt == 50 + 20
        assert after.n_pooled - before.n_pooled == 50 + 20
        assert after.rebuilt_ms > before.rebuilt_ms
        assert re.fullmatch(
            r"rebuilt 70 pooled keys in each of 2 layers in [\d.]+ ms; the native attention graph needs compute buffers of \d+ MiB",
            done,
        )
        # 84 / 4 = 21: only the block that this step completed was new to it
        assert library.mg.qsa_stats().n_pooled - after.n_pooled == 2 * (0 + 1)


def test_sequences_that_are_not_native_are_left_alone(library: Library, model: Model) -> None:
    with Context(model, n_seq=2) as context:
        context.feed(tokens(60), start=8)
        context.feed(tokens(30, seed=2), seq=1)
        before = library.mg.qsa_stats()
        with qsa(library, 1):
            library.mg.adapt(context.pointer, PLENTY)
        assert library.mg.qsa_stats().n_rebuilt - before.n_rebuilt == 7


def test_a_pending_copy_is_pooled_too(library: Library, model: Model) -> None:
    with Context(model, n_seq=2) as context:
        context.feed(tokens(100))
        context.copy(0, 1)
        before = library.mg.qsa_stats()
        with qsa(library, 1):
            library.mg.adapt(context.pointer, PLENTY)
            assert library.mg.qsa_stats().n_rebuilt - before.n_rebuilt == 50
            source, copy = context.decode([(0, 100, 5), (1, 100, 5)], 2)
        assert (source == copy).all()


def test_switching_off_reserves_upstreams_buffers(library: Library, model: Model) -> None:
    """Nothing has to be allocated later, and answers are upstream's."""
    ids = tokens(300)
    with Context(model, n_ctx=65536) as context, Context(model, n_ctx=65536) as upstream:
        with qsa(library, 1):
            native = library.mg.adapt(context.pointer, PLENTY)
        assert "the native attention graph" in native
        with qsa(library, 0):
            done = library.mg.adapt(context.pointer, PLENTY)
            assert library.mg.adapt(context.pointer, PLENTY) == ""
        sizes = [int(re.findall(r"(\d+) MiB", text)[-1]) for text in (native, done)]
        assert "the upstream attention graph" in done
        assert sizes[1] > 2 * sizes[0], "upstream's graph at 65536 cells takes several times as much"
        assert (context.feed(ids) == upstream.feed(ids)).all()


@pytest.mark.parametrize("n_missing", [1, 40])
def test_switching_off_without_room_is_refused_with_the_figures(library: Library, model: Model, n_missing: int) -> None:
    """The figure is what is missing; afterwards the context computes natively as if nothing had been."""
    ids = tokens(200)
    with qsa(library, 1):
        with Context(model, n_ctx=32768) as context:
            wanted = context.feed(ids)
        with Context(model, n_ctx=32768) as context:
            context.feed(ids[:100])
            with qsa(library, 0), pytest.raises(NativeError, match="missing") as first:
                library.mg.adapt(context.pointer, 0)
            found = re.search(r"missing (\d+) MiB on main memory, where (\d+) MiB are needed", str(first.value))
            assert found, str(first.value)
            missing, needed = map(int, found.groups())
            assert 0 < missing < needed, "the buffers it has are given back"
            assert library.mg.adapt(context.pointer, 0).startswith("the native attention graph"), "it needs no more"
            with qsa(library, 0), pytest.raises(NativeError, match=rf"missing {n_missing} MiB on main memory"):
                library.mg.adapt(context.pointer, (missing - n_missing) * 2**20)
            library.mg.adapt(context.pointer, 0)
            assert difference(context.feed(ids[100:], start=100), wanted) < 1e-5
            with qsa(library, 0):
                assert "upstream" in library.mg.adapt(context.pointer, (missing + 1) * 2**20)


def test_a_context_that_cannot_be_native_says_so(library: Library, model: Model) -> None:
    with Context(model, flash=False) as context:
        with qsa(library, 1), pytest.raises(NativeError, match="not possible here: it needs flash attention"):
            library.mg.adapt(context.pointer, PLENTY)
        assert library.mg.adapt(context.pointer, PLENTY).startswith("the upstream attention graph")


def test_models_without_sparse_attention_have_nothing_to_adapt(library: Library, smol_model: Path) -> None:
    model = Model(library, smol_model)
    with Context(model) as context, qsa(library, 1):
        assert library.mg.adapt(context.pointer, 0) == ""
    model.close()
