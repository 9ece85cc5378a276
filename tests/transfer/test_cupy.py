"""Copies by cupy and by the driver, over stand-ins for them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from llamamg.blocks import N_ROWS
from llamamg.transfer import Piece, Transfer, Workers, cuda
from llamamg.transfer.cuda import CudaCopier, Run, merge

from .cuda_doubles import DeviceCells, Driver, FakeCupy, blocks, rows_of


@pytest.mark.parametrize("error", [0, 201])
def test_the_driver_copies_and_cupy_where_it_does_not(workers: Workers, error: int, caplog: Any) -> None:
    cells, cupy, driver = DeviceCells(), FakeCupy(), Driver(error)
    copier = CudaCopier(cells, cupy, driver=driver)  # type: ignore[arg-type]
    n_tokens, first = 1000, 7
    _slab, held = blocks(4, cells.layout, pinned=copier.pinned)
    where = np.arange(first, first + n_tokens, dtype=np.int32)
    pieces = [
        Piece(i * N_ROWS, where[i * N_ROWS : (i + 1) * N_ROWS], int(block.ctypes.data), 0)
        for i, block in enumerate(held)
    ]
    transfer = Transfer(0, True)
    workers.add(transfer, copier.works(0, True, pieces))
    transfer.seal()
    assert transfer.wait(10)
    assert transfer.error is None
    for i, block in enumerate(held):
        expected = cells.expected(pieces[i].cells)
        for found, part in zip(rows_of(block, len(pieces[i].cells)), expected, strict=True):
            np.testing.assert_array_equal(found, part)
    assert driver.n_calls == (1 if error else 2)  # a call for each device
    assert bool(cupy.runtime.calls) is bool(error)
    assert ("error 201" in caplog.text) is bool(error)


def test_a_chunk_is_some_planes_of_many_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """So a cut waits for a little, and a call copies much; a limit that falls holds for the planes that follow."""
    monkeypatch.setattr(cuda, "GROUP_BYTES", 4 * N_ROWS * 24)
    cells, cupy = DeviceCells(), FakeCupy()
    copier = CudaCopier(cells, cupy)
    _slab, held = blocks(4, cells.layout, pinned=copier.pinned)
    pieces = [
        Piece(i * N_ROWS, np.arange(i * N_ROWS, (i + 1) * N_ROWS, dtype=np.int32), int(block.ctypes.data), 0)
        for i, block in enumerate(held)
    ]
    (work,) = copier.works(0, True, pieces)
    assert work.n_chunks == 3
    for chunk, limit in enumerate((4 * N_ROWS, 600, 600)):
        n_before = len(cupy.runtime.calls)
        work.copy(chunk, limit)
        assert len(cupy.runtime.calls) - n_before == (1, 2, 3)[chunk]
    for i, block in enumerate(held):
        rows, expected = rows_of(block, N_ROWS), cells.expected(pieces[i].cells)
        np.testing.assert_array_equal(rows[0], expected[0])
        n = min(max(0, 600 - i * N_ROWS), N_ROWS)
        np.testing.assert_array_equal(rows[1][:n], expected[1][:n])
        np.testing.assert_array_equal(rows[2][:, :n], expected[2][:, :n])
        assert not rows[1][n:].any()
        assert not rows[2][:, n:].any()


@pytest.mark.parametrize("n_tokens", [10, 256, 257, 1000, 1536])
@pytest.mark.parametrize("first", [0, 77])
@pytest.mark.parametrize("gap", [0, 64])
@pytest.mark.parametrize("pinned", [False, True])
def test_cupy_there_and_back(device: Any, n_tokens: int, first: int, gap: int, pinned: bool, workers: Workers) -> None:
    cells, cupy, copier = device
    where = np.arange(first, first + n_tokens, dtype=np.int32)
    _slab, held = blocks(-(-n_tokens // N_ROWS), cells.layout, gap, copier.pinned if pinned else None)
    n_done: list[int] = []
    pieces = [
        Piece(i * N_ROWS, where[i * N_ROWS : (i + 1) * N_ROWS], int(block.ctypes.data), 0, n_done.append)
        for i, block in enumerate(held)
    ]
    expected = cells.expected(where)
    transfer = Transfer(0, True)
    workers.add(transfer, copier.works(0, True, pieces))
    transfer.seal()
    assert transfer.wait(10)
    assert transfer.error is None
    assert sum(n_done) == n_tokens
    for i, block in enumerate(held):
        n = len(pieces[i].cells)
        for found, whole in zip(rows_of(block, n), expected, strict=True):
            part = whole[i * N_ROWS : i * N_ROWS + n] if whole.shape[0] != 5 else whole[:, i * N_ROWS : i * N_ROWS + n]
            np.testing.assert_array_equal(found, part)
    assert {kind for _, kind, _ in cupy.runtime.calls} == {2}
    there = {stream for _, _, stream in cupy.runtime.calls}
    assert {stream % 1000 for stream in there} == {0, 1}
    assert cupy.synchronized >= 2

    for memory in cells.memory:
        memory[:] = 0
    elsewhere = (where + 300) % cells.n_cells  # wraps round: cells that are no run
    cupy.runtime.calls.clear()
    back = [Piece(p.pos, elsewhere[p.pos : p.pos + len(p.cells)], p.block, 0) for p in pieces]
    transfer = Transfer(0, False)
    workers.add(transfer, copier.works(0, False, back))
    transfer.seal()
    assert transfer.wait(10)
    assert transfer.error is None
    for found, whole in zip(cells.expected(elsewhere), expected, strict=True):
        np.testing.assert_array_equal(found, whole)
    assert {kind for _, kind, _ in cupy.runtime.calls} == {1}
    assert not there & {stream for _, _, stream in cupy.runtime.calls}, "one direction would wait for the other"


def test_cupy_copies_no_two_pieces_of_page_locked_memory_in_one_call(device: Any) -> None:
    """Blocks may be evenly spaced over two slabs by chance."""
    cells, cupy, copier = device
    size = cells.layout.n_block_bytes
    memory = np.zeros(4 * size, np.uint8)
    halves = iter((memory[: 2 * size], memory[2 * size :]))

    def allocate(n: int) -> Any:
        half = next(halves)
        cupy.runtime.pinned.append((int(half.ctypes.data), n))
        return half

    cupy.cuda.alloc_pinned_memory = allocate
    held = [
        slab[i * size : (i + 1) * size] for slab in [copier.pinned.allocate(2 * size) for _ in "ab"] for i in (0, 1)
    ]
    pieces = [
        Piece(i * N_ROWS, np.arange(i * N_ROWS, (i + 1) * N_ROWS, dtype=np.int32), int(block.ctypes.data), 0)
        for i, block in enumerate(held)
    ]
    works = copier.works(0, True, pieces)
    assert [(work.start, work.end) for work in works] == [(0, 2 * N_ROWS), (2 * N_ROWS, 4 * N_ROWS)]
    for work in works:
        work.copy(0, 4 * N_ROWS)
    for i, block in enumerate(held):
        expected = cells.expected(np.arange(i * N_ROWS, (i + 1) * N_ROWS))
        for found, part in zip(rows_of(block, N_ROWS), expected, strict=True):
            np.testing.assert_array_equal(found, part)


def test_cupy_keeps_what_a_block_holds_besides(device: Any) -> None:
    """A block that grows gets its new rows only, also on the way through page-locked memory."""
    cells, _, copier = device
    _slab, (block,) = blocks(1, cells.layout)
    block[:] = 7
    (work,) = copier.works(0, True, [Piece(100, np.arange(100, 140, dtype=np.int32), int(block.ctypes.data), 100)])
    work.copy(0, 130)
    a, b, c = rows_of(block, N_ROWS)
    for found, expected in zip(
        (a[100:130], b[100:130], c[:, 100:130]), cells.expected(np.arange(100, 130)), strict=True
    ):
        np.testing.assert_array_equal(found, expected)
    for found in (a[:100], a[130:], b[:100], b[130:], c[:, :100], c[:, 130:]):
        assert (found == 7).all()


def test_cupy_copies_evenly_spaced_blocks_in_one_call(device: Any) -> None:
    cells, cupy, copier = device
    _slab, held = blocks(4, cells.layout, pinned=copier.pinned)
    pieces = [
        Piece(i * N_ROWS, np.arange(i * N_ROWS, (i + 1) * N_ROWS, dtype=np.int32), int(block.ctypes.data), 0)
        for i, block in enumerate(held)
    ]
    (work,) = copier.works(0, True, pieces)
    work.copy(0, 4 * N_ROWS)
    assert [name for name, _, _ in cupy.runtime.calls].count("2d") == 2 + 4  # a transposed plane: block by block


def test_cupy_copies_nothing_behind_the_limit(device: Any) -> None:
    cells, _, copier = device
    _slab, held = blocks(2, cells.layout)
    done: list[int] = []
    pieces = [
        Piece(
            i * N_ROWS, np.arange(i * N_ROWS, (i + 1) * N_ROWS, dtype=np.int32), int(block.ctypes.data), 0, done.append
        )
        for i, block in enumerate(held)
    ]
    (work,) = copier.works(0, True, pieces)
    work.copy(0, 300)
    work.finish(300)
    assert done == [256, 44]
    assert not held[1][44 * 24 : N_ROWS * 24].any()
    np.testing.assert_array_equal(rows_of(held[1], 44)[0], cells.expected(np.arange(256, 300))[0])


def test_merged_runs() -> None:
    whole = np.arange(N_ROWS, dtype=np.int32)
    pieces = [Piece(i * N_ROWS, whole + i * N_ROWS, 1000 + 10 * i, 0) for i in range(3)]
    assert merge(pieces, 10**6) == [Run(0, 256, 1000, 0, 3, 10)]
    assert merge(pieces, 600) == [Run(0, 256, 1000, 0, 2, 10), Run(512, 88, 1020, 0)]
    uneven = [pieces[0], pieces[1], Piece(512, whole + 512, 1090, 0)]
    assert merge(uneven, 10**6) == [Run(0, 256, 1000, 0, 2, 10), Run(512, 256, 1090, 0)]
    backwards = [pieces[0], Piece(256, whole + 256, 900, 0)]
    assert len(merge(backwards, 10**6)) == 2


def test_a_work_behind_a_cut_copies_nothing(device: Any) -> None:
    cells, _, copier = device
    _slab, (block,) = blocks(1, cells.layout)
    where = np.arange(N_ROWS, 2 * N_ROWS, dtype=np.int32)
    (work,) = copier.works(0, True, [Piece(N_ROWS, where, int(block.ctypes.data), 0)])
    before = block.copy()
    work.copy(0, 100)
    np.testing.assert_array_equal(block, before)
