"""Moving sequences between contexts: what the destination computes is bit for bit what the source would have."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from qsa_context import Context, Logits, Model, qsa, tokens

from llamamg.abi import MoveError
from llamamg.library import Library

Carry = Callable[[Context, int, Context, int], None]
PARTIAL_ONLY = 1
N_PROMPT = 150
FOLLOW = tokens(6, seed=9)


@pytest.fixture(params=["smol", "micro", "micro-qsa"])
def model(library: Library, request: pytest.FixtureRequest) -> Iterator[Model]:
    """A plain transformer, a hybrid with index keys, and that with pooled keys."""
    name, _, native = request.param.partition("-")
    if native and not library.patched:
        pytest.skip("the unpatched build has no native QSA")
    loaded: Model = request.getfixturevalue(name)
    if not native:
        yield loaded
        return
    with qsa(library, 1):
        yield loaded


@pytest.fixture(params=["F16", "Q8_0"])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def prompt(n: int = N_PROMPT, seed: int = 1) -> list[int]:
    return [t % 49000 for t in tokens(n, seed)]


def move(a: Context, seq_a: int, b: Context, seq_b: int) -> None:
    a.model.library.mg.move_sequence(a.pointer, seq_a, b.pointer, seq_b)


def copy(a: Context, seq_a: int, b: Context, seq_b: int) -> None:
    a.model.library.mg.copy_sequence(a.pointer, seq_a, b.pointer, seq_b)


def follow(context: Context, seq: int, start: int, ids: list[int] = FOLLOW) -> Logits:
    """Logits of single-token steps [n, n_vocab]."""
    return np.concatenate([context.feed([t % 49000], seq=seq, start=start + i) for i, t in enumerate(ids)])


def snapshot(context: Context, seq: int) -> Any:
    """The state that cannot be cut, as checkpoints keep it."""
    size = context.llama.llama_state_seq_get_size_ext(context.pointer, seq, PARTIAL_ONLY)
    data = (ctypes.c_uint8 * size)()
    assert context.llama.llama_state_seq_get_data_ext(context.pointer, data, size, seq, PARTIAL_ONLY) == size
    return data


def put_back(context: Context, data: Any, seq: int) -> None:
    n = context.llama.llama_state_seq_set_data_ext(context.pointer, data, len(data), seq, PARTIAL_ONLY)
    assert n == len(data)


def length(context: Context, seq: int) -> int:
    return int(context.llama.llama_memory_seq_pos_max(context.memory, seq)) + 1


@pytest.fixture(params=[move, copy])
def carry(request: pytest.FixtureRequest) -> Carry:
    """By handing cells over where that is possible, and by describing the state; the latter keeps the source."""
    return request.param  # type: ignore[no-any-return]


# ---- the same bits ---------------------------------------------------------------------------------------------------


def test_moved_sequence_continues_bit_for_bit(library: Library, model: Model, kind: str, carry: Carry) -> None:
    end = N_PROMPT + len(FOLLOW)
    with Context(model, n_ctx=512, n_seq=2, kind=kind) as solo:
        solo.feed(prompt(), seq=1)
        expected = [follow(solo, 1, N_PROMPT), follow(solo, 1, end)]
    n_seq = 4 if library.patched else 2  # upstream moves a state only between equal numbers of streams
    with (
        Context(model, n_ctx=512, n_seq=2, kind=kind) as prefill,
        Context(model, n_ctx=256, n_ubatch=16, n_seq=n_seq, kind=kind) as decode,
    ):
        prefill.feed(prompt(seed=2), seq=0)
        decode.feed(prompt(40, seed=3), seq=0)
        prefill.feed(prompt(), seq=1)
        carry(prefill, 1, decode, 1)
        np.testing.assert_array_equal(follow(decode, 1, N_PROMPT), expected[0])
        assert length(prefill, 1) == (0 if carry is move else N_PROMPT)
        if carry is copy:
            np.testing.assert_array_equal(follow(prefill, 1, N_PROMPT), expected[0])
        assert prefill.remove(1, -1)
        carry(decode, 1, prefill, 1)
        np.testing.assert_array_equal(follow(prefill, 1, end), expected[1])
        assert decode.remove(1, -1)
        assert length(decode, 1) == 0


def test_an_emptied_sequence_starts_anew(model: Model, kind: str, carry: Carry) -> None:
    """In the cells from 0 on, as if nothing had been there: short prompts too, and on either side."""
    with Context(model, n_seq=2, kind=kind) as solo:
        expected = solo.feed(prompt(70, seed=4), seq=1)
    with Context(model, n_seq=2, kind=kind) as source, Context(model, n_seq=2, kind=kind) as target:
        source.feed(prompt(90), seq=1)
        carry(source, 1, target, 1)
        assert source.remove(1, -1)
        np.testing.assert_array_equal(source.feed(prompt(70, seed=4), seq=1), expected)
        assert target.remove(1, -1)
        np.testing.assert_array_equal(target.feed(prompt(70, seed=4), seq=1), expected)


def test_neighbours_are_left_alone(model: Model, kind: str, carry: Carry) -> None:
    with (
        Context(model, n_seq=2, kind=kind) as source,
        Context(model, n_seq=2, kind=kind) as target,
        Context(model, n_seq=2, kind=kind) as solo,
    ):
        for context in (target, solo):
            context.feed(prompt(seed=4), seq=0)
        source.feed(prompt(), seq=0)
        carry(source, 0, target, 1)
        np.testing.assert_array_equal(follow(target, 0, N_PROMPT), follow(solo, 0, N_PROMPT))


def test_pooled_keys_come_along(library: Library, micro: Model, carry: Carry) -> None:
    if not library.patched:
        pytest.skip("the unpatched build has no native QSA")
    with qsa(library, 1), Context(micro, n_seq=2) as source, Context(micro, n_ctx=256) as target:
        source.feed(prompt(), seq=1)
        carry(source, 1, target, 0)
        before = library.mg.qsa_stats()
        follow(target, 0, N_PROMPT)
        after = library.mg.qsa_stats()
    assert after.n_native - before.n_native == len(FOLLOW)
    assert after.n_fallback == before.n_fallback
    n_block = (N_PROMPT + len(FOLLOW)) // 4 - N_PROMPT // 4
    assert after.n_pooled - before.n_pooled == n_block


def test_a_fragmented_cache_takes_it(model: Model, kind: str, carry: Carry) -> None:
    """As a state saved to the host and loaded again: into whatever cells are free."""

    def fragmented(context: Context) -> None:
        pieces = prompt(120, seed=5)
        for i in range(0, 120, 20):
            for seq in (0, 1):
                context.feed(pieces[i : i + 20], seq=seq, start=i)
        assert context.remove(0, -1)

    with (
        Context(model, n_seq=3, n_ctx=512, unified=True, kind=kind) as shared,
        Context(model, n_seq=3, n_ctx=512, unified=True, kind=kind) as loaded,
        Context(model, n_seq=3, n_ctx=512, unified=True, kind=kind) as source,
    ):
        fragmented(shared)
        fragmented(loaded)
        source.feed(prompt(), seq=1)
        loaded.restore(source.save(1), 2)
        carry(source, 1, shared, 2)
        np.testing.assert_array_equal(follow(shared, 2, N_PROMPT), follow(loaded, 2, N_PROMPT))
        # And out of pieces into one.
        end = N_PROMPT + len(FOLLOW)
        assert source.remove(1, -1)
        carry(shared, 2, source, 0)
        again = source.save(0)
        assert source.remove(0, -1)
        carry(loaded, 2, source, 0)
        assert bytes(again) == bytes(source.save(0))
        assert length(source, 0) == end


def test_a_copy_that_has_not_run_yet_is_moved(model: Model, carry: Carry) -> None:
    with Context(model, n_seq=2) as source, Context(model, n_seq=2) as target:
        source.feed(prompt(), seq=0)
        source.copy(0, 1)
        carry(source, 1, target, 1)
        np.testing.assert_array_equal(follow(target, 1, N_PROMPT), follow(source, 0, N_PROMPT))


def test_without_flash_attention(model: Model, carry: Carry) -> None:
    """Values are transposed: one range of bytes for each row."""
    with Context(model, n_seq=2, flash=False) as source, Context(model, n_seq=2, n_ctx=256, flash=False) as target:
        source.feed(prompt(), seq=0)
        source.feed(prompt(), seq=1)
        carry(source, 1, target, 0)
        np.testing.assert_array_equal(follow(target, 0, N_PROMPT), follow(source, 0, N_PROMPT))


# ---- after the move --------------------------------------------------------------------------------------------------


def test_cutting_after_a_move(smol: Model, carry: Carry) -> None:
    with Context(smol, n_seq=2) as source, Context(smol, n_seq=2) as target:
        source.feed(prompt(), seq=0)
        source.feed(prompt(), seq=1)
        carry(source, 1, target, 0)
        for context in (source, target):
            assert context.remove(0, N_PROMPT - 9)
        np.testing.assert_array_equal(follow(target, 0, N_PROMPT - 9), follow(source, 0, N_PROMPT - 9))


@pytest.mark.parametrize("native", [0, 1])
def test_rolling_back_after_a_move(library: Library, micro: Model, native: int, carry: Carry) -> None:
    """The last states come along; without them the cut would continue from whatever was in the destination."""
    if not library.patched:
        pytest.skip("the unpatched build has no native QSA")
    with (
        qsa(library, native),
        Context(micro, n_seq=2, n_rollback=4) as source,
        Context(micro, n_seq=2, n_rollback=4) as target,
        Context(micro, n_seq=2) as plain,
    ):
        target.feed(prompt(seed=6), seq=0)
        end = N_PROMPT + 5
        for seq in (0, 1):
            source.feed(prompt(), seq=seq)
            source.decode([(seq, N_PROMPT + i, t) for i, t in enumerate(prompt(5, seed=7))])
        carry(source, 1, target, 1)
        for context, seq in ((source, 0), (target, 1)):
            assert context.remove(seq, end - 3)
        copy(target, 1, plain, 0)
        assert target.remove(0, -1)
        copy(source, 0, target, 0)
        assert not target.remove(0, end - 4), "the cut was used up, a second one has no state"
        expected = follow(source, 0, end - 3)
        np.testing.assert_array_equal(follow(target, 1, end - 3), expected)
        np.testing.assert_array_equal(follow(target, 0, end - 3), expected)
        np.testing.assert_array_equal(follow(plain, 0, end - 3), expected)


def test_states_to_roll_back_to_that_the_source_lacks(micro: Model, carry: Carry) -> None:
    with Context(micro, n_seq=2) as source, Context(micro, n_seq=2, n_rollback=4) as target:
        source.feed(prompt(), seq=0)
        source.feed(prompt(), seq=1)
        carry(source, 1, target, 1)
        assert not target.remove(1, N_PROMPT - 2), "there is no state of that position"
        np.testing.assert_array_equal(follow(target, 1, N_PROMPT), follow(source, 0, N_PROMPT))
        end = N_PROMPT + len(FOLLOW)
        target.decode([(1, end + i, t) for i, t in enumerate(prompt(4, seed=8))])
        assert target.remove(1, end + 2)


def test_checkpoints_after_a_move(model: Model, carry: Carry) -> None:
    with Context(model, n_seq=2) as source, Context(model, n_seq=2) as target:
        source.feed(prompt(), seq=1)
        kept = snapshot(source, 1)
        follow(source, 1, N_PROMPT)
        carry(source, 1, target, 0)
        assert source.remove(1, -1)
        end = N_PROMPT + len(FOLLOW)
        again = snapshot(target, 0)
        expected = follow(target, 0, end)
        put_back(target, again, 0)
        assert target.remove(0, end)
        np.testing.assert_array_equal(follow(target, 0, end), expected)
        # A snapshot made before the move belongs to the sequence, not to the context.
        put_back(target, kept, 0)
        assert target.remove(0, N_PROMPT)
        late = follow(target, 0, N_PROMPT)
    with Context(model, n_seq=2) as solo:
        solo.feed(prompt(), seq=1)
        np.testing.assert_array_equal(late, follow(solo, 1, N_PROMPT))


# ---- while others decode ---------------------------------------------------------------------------------------------


def test_moving_while_other_contexts_decode(model: Model) -> None:
    """Two threads decode without a pause; a sequence goes back and forth between two more contexts meanwhile."""
    n_step = 40
    results: dict[int, Logits] = {}

    def run(seed: int, context: Context) -> None:
        context.feed(prompt(64, seed), seq=0)
        rows = []
        for i in range(n_step):
            rows.append(context.feed([prompt(n_step, seed + 50)[i]], seq=0, start=64 + i))
        results[seed] = np.concatenate(rows)

    def alone(seed: int) -> Logits:
        with Context(model, n_ctx=256) as context:
            run(seed, context)
        return results.pop(seed)

    expected = {seed: alone(seed) for seed in (11, 12)}
    with (
        Context(model, n_ctx=256) as first,
        Context(model, n_ctx=256) as second,
        Context(model, n_ctx=256, n_seq=2) as a,
        Context(model, n_ctx=512, n_seq=2) as b,
        Context(model, n_ctx=256, n_seq=2) as solo,
    ):
        threads = [threading.Thread(target=run, args=pair) for pair in ((11, first), (12, second))]
        a.feed(prompt(), seq=0)
        solo.feed(prompt(), seq=0)
        for thread in threads:
            thread.start()
        here, there, at, moved = a, b, N_PROMPT, []
        while any(thread.is_alive() for thread in threads) and at < 250:
            move(here, 0, there, 0)
            here, there = there, here
            moved.append(follow(here, 0, at, [at]))
            at += 1
        for thread in threads:
            thread.join()
        assert len(moved) > 3
        np.testing.assert_array_equal(np.concatenate(moved), follow(solo, 0, N_PROMPT, list(range(N_PROMPT, at))))
    for seed, logits in expected.items():
        np.testing.assert_array_equal(results[seed], logits)


# ---- refusals --------------------------------------------------------------------------------------------------------


def refused(a: Context, seq_a: int, b: Context, seq_b: int, reason: str, words: str) -> None:
    with pytest.raises(MoveError, match=words) as error:
        move(a, seq_a, b, seq_b)
    assert error.value.reason == reason


def test_refusals_leave_both_contexts_as_they_were(model: Model) -> None:
    n = 40
    with (
        Context(model, n_seq=2) as source,
        Context(model, n_seq=2) as target,
        Context(model, n_seq=2, kind="Q8_0") as other_type,
        Context(model, n_seq=2, flash=False, kind="F32") as other_attention,
    ):
        source.feed(prompt(n), seq=0)
        refused(source, 0, source, 1, "invalid", "llama_memory_seq_cp")
        refused(source, 0, target, 2, "invalid", "count from 0")
        refused(source, -1, target, 0, "invalid", "count from 0")
        refused(source, 1, target, 0, "empty", "holds no tokens")
        refused(source, 0, other_type, 0, "cache", "-ctk")
        refused(source, 0, other_attention, 0, "room", "-fa")
        assert length(other_attention, 0) == 0
        copy(source, 0, target, 1)
        refused(source, 0, target, 1, "busy", "remove them first")
        assert length(source, 0) == length(target, 1) == n
        np.testing.assert_array_equal(follow(source, 0, n), follow(target, 1, n))


def test_no_room(model: Model) -> None:
    with Context(model, n_ctx=512) as source, Context(model, n_ctx=256) as small:
        source.feed(prompt(300))
        refused(source, 0, small, 0, "room", "300 tokens.*256")
    with Context(model, n_ctx=256) as source, Context(model, n_ctx=256, n_seq=2, unified=True) as full:
        full.feed(prompt(200, seed=3), seq=0)
        source.feed(prompt(100), seq=0)
        refused(source, 0, full, 1, "room", "free cells")
        assert length(full, 1) == 0
        assert length(full, 0) == 200
        full.feed([1], seq=0, start=200)


def test_models_must_be_the_same(smol: Model, micro: Model) -> None:
    with Context(smol) as source, Context(micro) as target:
        source.feed(prompt(20))
        refused(source, 0, target, 0, "model", "different models")
