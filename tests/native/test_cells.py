"""Rows copied out of a context and into another sequence: the state is the same bytes, and so is what follows."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator

import numpy as np
import pytest
from numpy.typing import NDArray
from qsa_context import Context, Counted, Model, qsa, tokens

from llamamg.blocks import N_ROWS, Cells, runs
from llamamg.cells import NativeCells
from llamamg.errors import NativeError
from llamamg.library import Library

N = 300  # more than a block
PARTIAL_ONLY = 1
Bytes = NDArray[np.uint8]


@pytest.fixture(params=["smol", "micro", "micro-qsa"])
def model(library: Library, request: pytest.FixtureRequest) -> Iterator[Model]:
    """A plain transformer, a hybrid with index keys, and that with pooled keys."""
    if not library.patched:
        pytest.skip("an unpatched build does not show its cells")
    name, _, native = request.param.partition("-")
    with qsa(library, int(bool(native))):
        yield request.getfixturevalue(name)


def prompt(n: int = N, seed: int = 1) -> list[int]:
    return [t % 49000 for t in tokens(n, seed)]


def cells_of(context: Context) -> Cells:
    return NativeCells(context.model.library.mg, lambda seq: (context.pointer, seq))


def is_hybrid(context: Context) -> bool:
    return bool(context.llama.llama_model_is_hybrid(context.model.pointer))


def state(context: Context, seq: int, flags: int = 0) -> Bytes:
    size = context.llama.llama_state_seq_get_size_ext(context.pointer, seq, flags)
    data = np.zeros(size, np.uint8)
    pointer = data.ctypes.data_as(ctypes.POINTER(ctypes.c_uint8))
    assert context.llama.llama_state_seq_get_data_ext(context.pointer, pointer, size, seq, flags) == size
    return data


class Stored:
    """All of a sequence, in blocks as a cache keeps them."""

    def __init__(self, context: Context, seq: int, ids: list[int]) -> None:
        self.cells, self.ids = cells_of(context), ids
        n_blocks = -(-len(ids) // N_ROWS)
        self.blocks = [np.zeros(self.cells.layout.n_block_bytes, np.uint8) for _ in range(n_blocks)]
        self._copy(self.cells, seq, True, self.cells.find(seq, 0, len(ids)))
        self.partial: Bytes | None = None
        if is_hybrid(context):
            copying = self.cells.save_state(seq)
            self.partial = np.zeros(copying.n_bytes, np.uint8)
            for begin in range(0, copying.n_bytes, 1000):
                copying.copy(self.partial, begin, min(begin + 1000, copying.n_bytes))
            copying.close()

    def _copy(self, cells: Cells, seq: int, to_host: bool, where: NDArray[np.int32]) -> None:
        n_planes = len(cells.layout.planes)
        for at, cell, n in runs(where):
            for pos in range(at, at + n):  # a row at a time, planes in two halves: the smallest pieces there can be
                for planes in (range(n_planes // 2), range(n_planes // 2, n_planes)):
                    block = self.blocks[pos // N_ROWS].ctypes.data
                    cells.copy(seq, to_host, planes, cell + pos - at, 1, block, pos % N_ROWS)

    def put(self, context: Context, seq: int, n_kept: int = 0) -> None:
        cells = cells_of(context)
        where = [np.arange(n_kept, dtype=np.int32)]
        for pos in range(n_kept, len(self.ids), 100):
            where.append(cells.place(seq, pos, np.array(self.ids[pos : pos + 100], np.int32)))
        self._copy(cells, seq, False, np.concatenate(where))
        if self.partial is not None:
            copying = cells.load_state(seq, self.partial)
            copying.copy(self.partial, 0, copying.n_bytes)
            copying.close()


def follow(context: Context, seq: int, start: int) -> NDArray[np.float32]:
    ids = [t % 49000 for t in tokens(6, seed=9)]
    return np.concatenate([context.feed([t], seq=seq, start=start + i) for i, t in enumerate(ids)])


@pytest.mark.parametrize("kind", ["F16", "Q8_0"])
def test_copied_sequence_is_the_same_and_continues_bit_for_bit(model: Model, kind: str, library: Library) -> None:
    with Context(model, n_seq=3, kind=kind) as context:
        context.feed(prompt(40, seed=3), seq=0)
        context.feed(prompt(), seq=1)
        whole = state(context, 1)
        stored = Stored(context, 1, prompt())
        expected = follow(context, 1, N)
        assert context.remove(1, -1)
        stored.put(context, 1)
        np.testing.assert_array_equal(state(context, 1), whole)
        stored.put(context, 2)
        with Counted(library) as counted:
            np.testing.assert_array_equal(follow(context, 2, N), expected)
        assert counted.n_fallback == 0


def test_state_copied_in_pieces_is_libllamas(micro: Model, library: Library) -> None:
    if not library.patched:
        pytest.skip("an unpatched build does not show its cells")
    with Context(micro, n_seq=2) as context:
        context.feed(prompt(50), seq=1)
        stored = Stored(context, 1, prompt(50))
        assert stored.partial is not None
        np.testing.assert_array_equal(stored.partial, state(context, 1, PARTIAL_ONLY))
        with pytest.raises(NativeError, match="not the state"):
            stored.cells.load_state(0, np.zeros(len(stored.partial), np.uint8))
        with pytest.raises(NativeError):
            stored.cells.load_state(0, stored.partial[: len(stored.partial) // 2])


@pytest.mark.parametrize(("unified", "flash"), [(True, True), (False, False), (True, False)])
def test_other_layouts(smol: Model, library: Library, unified: bool, flash: bool) -> None:
    """One cache for all, where cells are no positions; values transposed, where a cell is a column."""
    if not library.patched:
        pytest.skip("an unpatched build does not show its cells")
    with Context(smol, n_seq=3, kind="F16", unified=unified, flash=flash) as context:
        context.feed(prompt(40, seed=3), seq=0)
        context.feed(prompt(), seq=1)
        stored = Stored(context, 1, prompt())
        expected = follow(context, 1, N)
        if unified:
            context.feed(prompt(30, seed=4), seq=0, start=40)
            assert context.remove(1, -1)
        stored.put(context, 2)
        if unified:
            assert stored.cells.find(2, 0, N).tolist() != list(range(N))
            assert max(abs(follow(context, 2, N) - expected).ravel()) < 1e-2 * abs(expected).max()
        else:
            np.testing.assert_array_equal(follow(context, 2, N), expected)


def test_kept_tokens_are_extended(smol: Model, library: Library) -> None:
    if not library.patched:
        pytest.skip("an unpatched build does not show its cells")
    with Context(smol, n_seq=2, kind="F16") as context:
        context.feed(prompt(), seq=0)
        stored = Stored(context, 0, prompt())
        expected = follow(context, 0, N)
        assert context.remove(0, 120)
        stored.put(context, 0, n_kept=120)
        np.testing.assert_array_equal(follow(context, 0, N), expected)


def test_what_cannot_be_is_refused_and_changes_nothing(smol: Model, library: Library) -> None:
    if not library.patched:
        with Context(smol, n_seq=2) as context:
            assert "unpatched" in cells_of(context).reason
        return
    with Context(smol, n_ctx=256, n_seq=2, kind="F16") as context:
        context.feed(prompt(50), seq=0)
        cells = cells_of(context)
        assert cells.reason == ""
        before = state(context, 0)
        with pytest.raises(NativeError, match="once each"):
            cells.find(0, 0, 51)
        with pytest.raises(NativeError, match="does not end"):
            cells.place(0, 60, np.zeros(2, np.int32))
        with pytest.raises(NativeError, match="no room"):
            cells.place(0, 50, np.zeros(300, np.int32))
        with pytest.raises(NativeError, match="no such sequence"):
            cells.planes(2)
        block = np.zeros(cells.layout.n_block_bytes, np.uint8)
        for cell, n, row in ((250, 10, 0), (0, 10, N_ROWS - 5), (-1, 2, 0)):
            with pytest.raises(NativeError, match="not in the"):
                cells.copy(0, True, range(1), cell, n, block.ctypes.data, row)
        np.testing.assert_array_equal(state(context, 0), before)


def test_cells_without_raw_index_keys_are_not_copied(library: Library, micro: Model) -> None:
    """Rows that come back would lack pooled keys, and every later ubatch of the sequence would fail."""
    if not library.patched:
        pytest.skip("the unpatched build has no native QSA")
    library.mg.set_switch("qsa-drop-raw", 1)
    try:
        with qsa(library, 1), Context(micro) as context:
            assert "leave out --qsa-drop-raw-keys" in cells_of(context).reason
    finally:
        library.mg.set_switch("qsa-drop-raw", 0)
    with qsa(library, 1), Context(micro) as context:
        assert cells_of(context).reason == ""
