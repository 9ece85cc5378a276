"""Copies by cupy and by the driver, over stand-ins for them."""

from __future__ import annotations

import sys
import threading
import time
from typing import Any

import numpy as np
import pytest

from llamamg.blocks import N_ROWS, Plane
from llamamg.server.metrics import EngineCollector
from llamamg.testing import fake_engine
from llamamg.transfer import Piece, Transfer, Workers, cuda, pick_copier
from llamamg.transfer.cuda import CudaCopier
from llamamg.transfer.driver import Copy, DriverCopies
from llamamg.transfer.pick import way_of
from llamamg.transfer.spans import Run, merge, spread
from llamamg.transfer.ways import ways

from .cuda_doubles import DeviceCells, Driver, FakeCupy, LateRuntime, blocks, rows_of


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


class Meeting(Driver):
    """A driver whose copies on one device end when those on the other have begun."""

    def __init__(self) -> None:
        super().__init__()
        self.barrier = threading.Barrier(2)

    def run(self, to_host: bool, copies: list[Copy], stream: int, events: list[int]) -> int:
        self.barrier.wait(10)
        return super().run(to_host, copies, stream, events)


@pytest.mark.parametrize("to_host", [True, False])
def test_links_of_two_devices_are_busy_at_the_same_time(to_host: bool, workers: Workers) -> None:
    cells, driver = DeviceCells(), Meeting()
    copier = CudaCopier(cells, FakeCupy(), driver=driver)  # type: ignore[arg-type]
    _slab, (block,) = blocks(1, cells.layout, pinned=copier.pinned)
    transfer = Transfer(0, to_host)
    piece = Piece(0, np.arange(N_ROWS, dtype=np.int32), int(block.ctypes.data), 0)
    workers.add(transfer, copier.works(0, to_host, [piece]))
    transfer.seal()
    assert transfer.wait(30)
    assert transfer.error is None, "one device waited for the other"
    assert driver.n_calls == 2


def test_layers_split_over_devices_are_copied_from_all_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Half of the layers on each: every chunk has some of both, and no more bytes than one of a single device."""
    layers = [(0, Plane(0, 10, 256, 1, "CUDA0", 1), at) for at in range(8)]
    layers += [(1, Plane(0, 30, 256, 1, "CUDA1", 1), 8 + at) for at in range(4)]
    mixed = spread(layers)
    assert sorted(at for *_, at in mixed) == list(range(12))
    for half in (mixed[:6], mixed[6:]):
        assert [device for device, *_ in half].count(0) == 4
    for device in (0, 1):
        order = [at for at_device, _, at in mixed if at_device == device]
        assert order == sorted(order), "planes of a device stay in their order"
    monkeypatch.setattr(cuda, "GROUP_BYTES", N_ROWS * 100)
    copier = CudaCopier(DeviceCells(), FakeCupy())
    copier._planes[0] = layers
    groups = copier.groups(0, 1)
    assert len(groups) == 2
    assert all(set(group) == {0, 1} for group in groups)
    sizes = [sum(plane.n_row_bytes for planes in group.values() for plane, _ in planes) for group in groups]
    assert sum(sizes) == 200
    assert max(sizes) <= 100


def test_one_device_needs_no_other_thread(workers: Workers, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DeviceCells, "devices", ("CUDA0",) * 3)
    cells = DeviceCells()
    copier = CudaCopier(cells, FakeCupy(), driver=Driver())  # type: ignore[arg-type]
    _slab, (block,) = blocks(1, cells.layout, pinned=copier.pinned)
    (work,) = copier.works(0, True, [Piece(0, np.arange(N_ROWS, dtype=np.int32), int(block.ctypes.data), 0)])
    n_threads = threading.active_count()
    work.copy(0, N_ROWS)
    assert threading.active_count() == n_threads
    np.testing.assert_array_equal(rows_of(block, N_ROWS)[0], cells.expected(np.arange(N_ROWS))[0])


def test_a_fault_on_one_device_waits_for_the_copies_of_the_other() -> None:
    class Half(Driver):
        """Fails on CUDA0; CUDA1 takes its time."""

        ended = False

        def run(self, to_host: bool, copies: list[Copy], stream: int, events: list[int]) -> int:
            if stream % 1000 == 0:
                raise OSError("gone")
            time.sleep(0.1)
            Half.ended = True
            return super().run(to_host, copies, stream, events)

    cells = DeviceCells()
    copier = CudaCopier(cells, FakeCupy(), driver=Half())  # type: ignore[arg-type]
    _slab, (block,) = blocks(1, cells.layout, pinned=copier.pinned)
    (work,) = copier.works(0, True, [Piece(0, np.arange(N_ROWS, dtype=np.int32), int(block.ctypes.data), 0)])
    with pytest.raises(OSError, match="gone"):
        work.copy(0, N_ROWS)
    assert Half.ended, "a copy was on its way after the chunk"


@pytest.mark.parametrize("error", [None, 700])
@pytest.mark.parametrize("to_host", [True, False])
@pytest.mark.parametrize("pinned", [True, False])
def test_after_a_fault_no_copy_is_on_its_way(error: int | None, to_host: bool, pinned: bool) -> None:
    """The caller uses the memory for something else then: what was begun before the fault has to end first."""
    cells, runtime = DeviceCells(), LateRuntime(fail=2)
    driver = None if error is None else Driver(error)
    copier = CudaCopier(cells, FakeCupy(runtime), driver=driver)  # type: ignore[arg-type]
    _slab, (block,) = blocks(1, cells.layout, pinned=copier.pinned if pinned else None)
    (work,) = copier.works(0, to_host, [Piece(0, np.arange(N_ROWS, dtype=np.int32), int(block.ctypes.data), 0)])
    with pytest.raises(OSError, match="invalid argument"):
        work.copy(0, N_ROWS)
    assert runtime.n_calls == 2
    assert not runtime.under_way


def test_a_thread_that_cannot_start_leaves_no_copy_on_its_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of three devices the second one's copies are handed over, the third one's are not."""
    monkeypatch.setattr(DeviceCells, "devices", ("CUDA0", "CUDA1", "CUDA2"))
    cells, runtime = DeviceCells(), LateRuntime(fail=0)
    copier = CudaCopier(cells, FakeCupy(runtime))
    pool, begun, ended = copier._threads(), [], threading.Event()

    def one(device: int, to_host: bool, planes: Any, merged: Any) -> None:
        time.sleep(0.1)
        ended.set()

    def submit(*args: Any) -> Any:
        if begun:
            raise RuntimeError("can't start new thread")
        begun.append(start(*args))
        return begun[0]

    start = pool.submit
    monkeypatch.setattr(pool, "submit", submit)
    monkeypatch.setattr(copier, "_copy_one", one)
    with pytest.raises(RuntimeError, match="new thread"):
        copier.copy_direct(0, True, {0: [], 1: [], 2: []}, [])
    assert ended.is_set()


def test_a_fault_of_the_driver_changes_what_is_said(caplog: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once in the log, though two devices meet it at the same time, and from then on in every report."""
    cells, cupy, driver = DeviceCells(), FakeCupy(), Meeting()
    cupy.runtime.getDeviceCount = lambda: 2  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    monkeypatch.setattr(DriverCopies, "load", staticmethod(lambda mg: driver))
    copier, why = pick_copier(cells)  # type: ignore[arg-type]
    assert why == copier.way == "asynchronous copies by cupy, many in a call"
    assert ways()[why] == 1
    driver.error = 700
    assert isinstance(copier, CudaCopier)
    _slab, (block,) = blocks(1, cells.layout, pinned=copier.pinned)
    where = np.arange(N_ROWS, dtype=np.int32)
    for _ in range(2):
        (work,) = copier.works(0, True, [Piece(0, where, int(block.ctypes.data), 0)])
        work.copy(0, N_ROWS)
    np.testing.assert_array_equal(rows_of(block, N_ROWS)[1], cells.expected(where)[1])
    assert "one by one" in copier.way
    assert "error 700" in copier.way
    assert why not in ways()
    assert ways()[copier.way] == 1
    assert sum("another way" in record.message for record in caplog.records) == 1
    metrics = {metric.name: metric for metric in EngineCollector(fake_engine()[0]).collect()}
    said = {sample.labels["way"]: sample.value for sample in metrics["llamamg:copiers"].samples}
    assert said == dict(ways())


@pytest.mark.parametrize(("error", "words"), [(0, "many in a call"), (201, "(error 201)")])
def test_doctor_tries_the_driver(monkeypatch: pytest.MonkeyPatch, error: int, words: str) -> None:
    cupy, driver = FakeCupy(), Driver(error)
    cupy.runtime.getDeviceCount = lambda: 2  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    monkeypatch.setattr(DriverCopies, "load", staticmethod(lambda mg: driver))
    assert words in way_of(["CUDA0", "CUDA1"])
    assert driver.n_calls == (1 if error else 2)
    assert ("one by one" in way_of(["CUDA0"])) is bool(error)
