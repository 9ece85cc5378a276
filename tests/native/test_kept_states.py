"""States in memory of their own: what others decode meanwhile does not change them, and put back they are the same bytes."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from qsa_context import Context, Model, tokens

from llamamg.blocks import Cells, StateCopy
from llamamg.cells import NativeCells
from llamamg.errors import NativeError
from llamamg.library import Library

PARTIAL_ONLY = 1
MIB = 1 << 20
Bytes = NDArray[np.uint8]


@pytest.fixture(scope="module")
def micro(library: Library, synth_model: Callable[..., Path]) -> Iterator[Model]:
    if not library.patched:
        pytest.skip("an unpatched build does not show its states")
    model = Model(library, synth_model(weights="f32"))
    yield model
    model.close()


@pytest.fixture(autouse=True)
def no_limit(library: Library) -> Iterator[None]:
    if not library.patched:
        pytest.skip("an unpatched build does not show its states")
    library.mg.lib.mg_state_limit(1 << 40, 0)
    yield
    library.mg.lib.mg_state_limit(0, 0)
    assert library.mg.lib.mg_state_held() == 0, "memory of states was lost"


def cells_of(context: Context) -> Cells:
    return NativeCells(context.model.library.mg, lambda seq: (context.pointer, seq))


def prompt(n: int, seed: int = 1) -> list[int]:
    return [t % 49000 for t in tokens(n, seed)]


def state(context: Context, seq: int) -> Bytes:
    size = context.llama.llama_state_seq_get_size_ext(context.pointer, seq, PARTIAL_ONLY)
    data = np.zeros(size, np.uint8)
    pointer = data.ctypes.data_as(ctypes.POINTER(ctypes.c_uint8))
    assert context.llama.llama_state_seq_get_data_ext(context.pointer, pointer, size, seq, PARTIAL_ONLY) == size
    return data


def copied(copying: StateCopy, step: int = 1000) -> Bytes:
    data = np.zeros(copying.n_bytes, np.uint8)
    for begin in range(0, copying.n_bytes, step):
        copying.copy(data, begin, min(begin + step, copying.n_bytes))
    return data


def body(state: Bytes) -> Bytes:
    """Without the sequence id that it was saved from."""
    return state[8:]


def fill(context: Context) -> None:
    """Sequence i holds 20 + i tokens. Their states lie in rows in the order in which they began."""
    for seq in (0, 2, 1, 3):
        context.feed(prompt(20 + seq, seed=seq), seq=seq)


def swap_rows(context: Context) -> None:
    """A batch of sequences 0 and 1 makes them neighbours: the state of sequence 2 goes to another row."""
    context.decode([(0, 20, 5), (1, 21, 6)], n_logits=2)


def test_a_detached_state_is_what_it_was(micro: Model) -> None:
    with Context(micro, n_seq=4) as context:
        fill(context)
        cells, expected = cells_of(context), state(context, 2)
        kept, left = cells.save_state(2), cells.save_state(2)
        assert kept.detach()
        swap_rows(context)
        np.testing.assert_array_equal(copied(kept), expected)
        assert (copied(left) != expected).any(), "no row has moved: this test shows nothing"
        np.testing.assert_array_equal(state(context, 2), expected)
        with pytest.raises(NativeError, match="memory of its own already"):
            kept.detach()
        with pytest.raises(NativeError, match="no memory of its own"):
            left.put(3)


def test_many_states_of_one_sequence_are_put_back_in_any_order(micro: Model) -> None:
    with Context(micro, n_seq=4) as context:
        fill(context)
        cells, ids = cells_of(context), prompt(60, seed=9)
        kept, expected = [], []
        for at in range(0, 60, 10):
            context.feed(ids[at : at + 10], seq=2, start=22 + at)
            kept.append(cells.save_state(2))
            assert kept[-1].detach()
            expected.append(state(context, 2))
            if at == 20:
                swap_rows(context)
        for i in (5, 0, 3, 3, 1):
            kept[i].put(2)
            np.testing.assert_array_equal(state(context, 2), expected[i])
        kept[2].put(3)  # into another sequence
        np.testing.assert_array_equal(body(state(context, 3)), body(expected[2]))
        context.decode([(0, 21, 7), (1, 22, 8)], n_logits=2)
        kept[4].put(2)
        np.testing.assert_array_equal(state(context, 2), expected[4])


def test_a_loaded_state_waits_beside_the_sequence(micro: Model) -> None:
    """Its bytes come in pieces while others decode and rows move."""
    with Context(micro, n_seq=4) as context:
        fill(context)
        cells = cells_of(context)
        saved = copied(cells.save_state(3))
        staged = cells.load_state(2, saved)
        assert staged.detach()
        half = len(saved) // 2
        staged.copy(saved, 0, half)
        swap_rows(context)
        staged.copy(saved, half, len(saved))
        context.decode([(0, 21, 5), (1, 22, 5)], n_logits=2)
        staged.put(2)
        np.testing.assert_array_equal(body(state(context, 2)), body(saved))
        staged.put(0)
        np.testing.assert_array_equal(body(state(context, 0)), body(saved))


def test_what_follows_is_the_same_bit_for_bit(micro: Model) -> None:
    with Context(micro, n_seq=4, n_rollback=2) as context:
        fill(context)
        cells = cells_of(context)
        kept = cells.save_state(2)
        assert kept.detach()
        follow = prompt(6, seed=7)
        first = [context.feed([t], seq=2, start=22 + i) for i, t in enumerate(follow)]
        swap_rows(context)
        kept.put(2)
        assert context.remove(2, 22)  # keys and values of what is computed again
        again = [context.feed([t], seq=2, start=22 + i) for i, t in enumerate(follow)]
        np.testing.assert_array_equal(np.concatenate(again), np.concatenate(first))


def test_into_another_context(micro: Model) -> None:
    with Context(micro, n_seq=4) as one, Context(micro, n_seq=2, n_ctx=1024) as other:
        fill(one)
        other.feed(prompt(5, seed=3), seq=0)
        expected = state(one, 2)

        def locate(seq: int) -> tuple[int, int]:
            return (one.pointer, seq) if seq < 4 else (other.pointer, seq - 4)

        cells = NativeCells(micro.library.mg, locate)
        kept = cells.save_state(2)
        assert kept.detach()
        one.feed(prompt(9, seed=4), seq=2, start=22)
        kept.put(5)
        np.testing.assert_array_equal(body(state(other, 1)), body(expected))


def test_the_limit_holds_and_memory_is_used_again(micro: Model, library: Library) -> None:
    mg = library.mg.lib
    with Context(micro, n_seq=4) as context:
        fill(context)
        cells = cells_of(context)
        one = cells.save_state(1)
        assert one.detach()
        n = mg.mg_state_held()
        assert n >= one.n_bytes - 4096
        mg.mg_state_limit(2 * n, 0)
        two, three = cells.save_state(2), cells.save_state(3)
        assert two.detach()
        assert not three.detach()
        np.testing.assert_array_equal(copied(three), state(context, 3))  # still that of the sequence
        one.close()
        assert mg.mg_state_held() == 2 * n  # kept for the next one
        assert three.detach()
        assert mg.mg_state_held() == 2 * n
        mg.mg_state_limit(n, 0)
        two.close()
        assert mg.mg_state_held() == n
        np.testing.assert_array_equal(copied(three), state(context, 3))
        mg.mg_state_limit(1 << 40, 1 << 50)
        assert not cells.save_state(0).detach()  # the device must keep more than it has


def test_cells_are_given_out_beside_decodes(micro: Model) -> None:
    """On another thread, of a sequence that nobody uses, while the context computes others."""
    n = 4000
    with Context(micro, n_seq=3, n_ctx=4096) as context, Context(micro, n_seq=3, n_ctx=4096) as plain:
        for c in (context, plain):
            c.feed(prompt(20), seq=0)
        cells = cells_of(context)
        assert cells.appends(2, 0, n)
        assert not cells.appends(2, 5, n)
        assert not cells.appends(0, 20, 4096)
        ids, failed = np.array(prompt(n, 3), np.int32), []

        def place() -> None:
            try:
                for at in range(0, n, 16):
                    where = cells.place(2, at, ids[at : at + 16])
                    np.testing.assert_array_equal(where, np.arange(at, at + 16))
            except BaseException as error:
                failed.append(error)

        thread = threading.Thread(target=place)
        thread.start()
        found = [context.feed([t], seq=0, start=20 + i) for i, t in enumerate(prompt(40, 5))]
        thread.join()
        assert not failed
        expected = [plain.feed([t], seq=0, start=20 + i) for i, t in enumerate(prompt(40, 5))]
        np.testing.assert_array_equal(np.concatenate(found), np.concatenate(expected))
        np.testing.assert_array_equal(cells.find(2, 0, n), np.arange(n))
        fence = cells.fence(2)
        assert fence is not None
        fence.wait()


def test_shared_cells_are_given_out_between_batches_only(micro: Model, library: Library, smol_model: Path) -> None:
    model = Model(library, smol_model)
    with Context(model, n_seq=2, unified=True) as context:
        context.feed(prompt(20), seq=0)
        assert not cells_of(context).appends(1, 0, 10)
    model.close()
