"""Transfers: what is cut is not touched any more, what is finished is whole; copies by cupy over a stand-in for it."""

from __future__ import annotations

import ctypes
import sys
import threading
import time
from typing import Any

import numpy as np
import pytest

from llamamg.blocks import N_ROWS, BlockLayout, Plane, runs
from llamamg.transfer import HostCopier, Piece, StateWork, Transfer, Workers, cuda
from llamamg.transfer.cuda import CudaCopier, Run, merge
from llamamg.transfer.driver import Copy
from llamamg.transfer.host import plane_groups
from llamamg.transfer.pick import pick_copier, way_of


class Work:
    """Copies nothing, slowly."""

    n_bytes = 10

    def __init__(self, start: int, end: int, n_chunks: int = 1, gate: threading.Event | None = None) -> None:
        self.start, self.end, self.n_chunks, self.gate = start, end, n_chunks, gate
        self.copied: list[int] = []
        self.finished: int | None = None

    def copy(self, chunk: int, limit: int) -> None:
        if self.gate is not None:
            assert self.gate.wait(10)
        self.copied.append(limit)

    def finish(self, limit: int) -> None:
        self.finished = limit


@pytest.fixture
def workers() -> Any:
    made = Workers(2, pause_save=0.0, pause_load=0.0)
    yield made
    made.stop()


def test_all_is_copied(workers: Workers) -> None:
    transfer, works = Transfer(0, True), [Work(i, i + 5, 3) for i in range(0, 50, 5)]
    workers.add(transfer, works)
    assert not transfer.is_over  # more may come
    transfer.seal()
    assert transfer.wait(10)
    assert [work.finished for work in works] == [work.end for work in works]
    assert transfer.n_bytes == 100
    assert transfer.error is None


def test_a_cut_waits_for_the_chunk_and_for_nothing_else(workers: Workers) -> None:
    gate = threading.Event()
    transfer, low, high, later = Transfer(0, True), Work(0, 5, 2, gate), Work(5, 10, 2, gate), Work(10, 15)
    workers.add(transfer, [low, high, later])
    transfer.seal()
    while len(transfer._active) < 2:
        time.sleep(0.001)
    threading.Timer(0.1, gate.set).start()
    started = time.perf_counter()
    transfer.cut(7)
    assert time.perf_counter() - started > 0.05, "the chunk that touches position 9 was not waited for"
    assert max(transfer._active, default=0) <= 7
    assert transfer.wait(10)
    assert low.finished == 5
    assert high.copied == [10, 7]
    assert high.finished == 7
    assert later.copied in ([], [7])  # nothing of it lies below
    assert later.finished in (None, 7)


def test_give_way_waits_for_what_is_in_the_way_only(workers: Workers) -> None:
    gate = threading.Event()
    transfer, first, second = Transfer(0, True), Work(0, 5), Work(5, 10, 1, gate)
    workers.add(transfer, [first, second])
    transfer.seal()
    transfer.give_way(0, 5, 10.0)
    assert first.finished == 5
    assert second.finished is None
    assert transfer.limit > 10
    threading.Timer(0.05, gate.set).start()
    transfer.give_way(5, 10, 0.001)  # too slow: cut, and the chunk waited for
    assert transfer.limit == 5
    assert transfer._active == []


def test_an_error_ends_a_transfer(workers: Workers) -> None:
    class Broken(Work):
        def copy(self, chunk: int, limit: int) -> None:
            raise OSError("no")

    transfer, works = Transfer(0, False), [Broken(0, 5), *[Work(i, i + 5) for i in range(5, 500, 5)]]
    workers.add(transfer, works)
    transfer.seal()
    assert transfer.wait(10)
    assert isinstance(transfer.error, OSError)


def test_stopping_ends_what_is_queued() -> None:
    workers, gate = Workers(1), threading.Event()
    transfer = Transfer(0, True)
    workers.add(transfer, [Work(0, 5, 1, gate), Work(5, 10)])
    transfer.seal()
    threading.Timer(0.05, gate.set).start()
    workers.stop()
    assert transfer.wait(10)


def test_runs_of_neighbours() -> None:
    assert runs([]) == []
    assert runs([3, 4, 5, 9, 7, 8]) == [(0, 3, 3), (3, 9, 1), (4, 7, 2)]


def test_plane_groups_cover_every_plane_once() -> None:
    layout = BlockLayout(((1, 100, 1),) * 7 + ((1, 2, 300),) * 3)
    for chunk in (1, 150, 1000, 10**6):
        groups = plane_groups(layout, 2, chunk)
        assert [i for group in groups for i in group] == list(range(10))
        assert all(2 * 100 * len(group) <= max(chunk, 200) for group in groups if group.stop <= 7)


# ---- cupy


class FakeRuntime:
    """cudaMemcpy over main memory; remembers on which device and stream."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, int, int]] = []
        self.pinned: list[tuple[int, int]] = []
        self.device = 0

    def memcpyAsync(self, dst: int, src: int, size: int, kind: int, stream: int) -> None:
        self.calls.append(("1d", kind, stream))
        ctypes.memmove(dst, src, size)

    def memcpy2DAsync(
        self, dst: int, dpitch: int, src: int, spitch: int, width: int, height: int, kind: int, stream: int
    ) -> None:
        assert width <= min(dpitch, spitch)
        host, pitch = (dst, dpitch) if kind == 2 else (src, spitch)
        end = host + (height - 1) * pitch + width
        # As the driver has it: what is not all in one piece of page-locked memory is an invalid argument.
        assert any(start <= host and end <= start + n for start, n in self.pinned), "invalid argument"
        self.calls.append(("2d", kind, stream))
        for i in range(height):
            ctypes.memmove(dst + i * dpitch, src + i * spitch, width)


class FakeCupy:
    """What CudaCopier uses of cupy."""

    def __init__(self) -> None:
        outer = self
        self.runtime = FakeRuntime()
        self.synchronized = self.n_streams = 0

        class Device:
            def __init__(self, index: int) -> None:
                self.index = index

            def __enter__(self) -> None:
                self.before, outer.runtime.device = outer.runtime.device, self.index

            def __exit__(self, *_: object) -> None:
                outer.runtime.device = self.before

        class Stream:
            def __init__(self, non_blocking: bool = False) -> None:
                assert non_blocking
                outer.n_streams += 1
                self.ptr = 1000 * outer.n_streams + outer.runtime.device

        class Event:
            def __init__(self, block: bool = False, disable_timing: bool = False) -> None:
                self.stream: Any = None
                self.ptr = id(self)

            def record(self, stream: Stream) -> None:
                assert stream.ptr % 1000 == outer.runtime.device, "an event of another device"
                self.stream = stream

            def synchronize(self) -> None:
                assert self.stream is not None
                outer.synchronized += 1

        class Cuda:
            runtime = self.runtime

        self.cuda: Any = Cuda()
        self.cuda.Device, self.cuda.Stream, self.cuda.Event = Device, Stream, Event
        self.cuda.alloc_pinned_memory = self._allocate

    def _allocate(self, n: int) -> Any:
        memory = np.zeros(n, np.uint8)
        self.runtime.pinned.append((int(memory.ctypes.data), n))
        return memory


class DeviceCells:
    """Planes in main memory that say they are on CUDA devices: rows, rows on a second device, and a transposed one."""

    reason = ""
    n_cells = 2048

    def __init__(self) -> None:
        self.layout = BlockLayout(((1, 24, 1), (1, 16, 1), (1, 2, 5)))
        self.memory = [np.random.default_rng(i).integers(0, 256, size, np.uint8)
                       for i, size in enumerate((24 * 2048, 16 * 2048, 2 * 2048 * 5))]  # fmt: skip

    def planes(self, seq_id: int) -> list[Plane]:
        return [
            Plane(int(memory.ctypes.data), n_bytes, self.n_cells, n_columns, device, kind)
            for memory, (kind, n_bytes, n_columns), device in zip(
                self.memory, self.layout.planes, ("CUDA0", "CUDA1", "CUDA0"), strict=True
            )
        ]

    def expected(self, cells: Any) -> list[Any]:
        """The rows of these cells, plane by plane."""
        a, b, c = self.memory
        rows = [a.reshape(-1, 24)[cells], b.reshape(-1, 16)[cells], c.reshape(5, -1, 2)[:, cells]]
        return [np.array(row) for row in rows]


def rows_of(block: Any, n: int) -> list[Any]:
    """The first `n` rows of a block, plane by plane."""
    a, b, c = np.split(block, np.cumsum([N_ROWS * 24, N_ROWS * 16]))
    return [a.reshape(-1, 24)[:n], b.reshape(-1, 16)[:n], c.reshape(5, -1, 2)[:, :n]]


@pytest.fixture
def device() -> tuple[DeviceCells, FakeCupy, CudaCopier]:
    cells, cupy = DeviceCells(), FakeCupy()
    return cells, cupy, CudaCopier(cells, cupy)


class Driver:
    """DriverCopies over main memory; `error` is what it answers, having copied nothing then."""

    def __init__(self, error: int = 0) -> None:
        self.error, self.n_calls = error, 0

    def run(self, to_host: bool, copies: list[Copy], stream: int, events: list[int]) -> int:
        self.n_calls += 1
        assert stream > 0
        assert len(set(events)) == len(events) > 1
        for c in copies if not self.error else ():
            for i in range(c.height):
                ctypes.memmove(c.target + i * c.target_pitch, c.source + i * c.source_pitch, c.width)
        return self.error


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


def blocks(n: int, layout: BlockLayout, gap: int = 0, pinned: Any = None) -> tuple[Any, list[Any]]:
    """`n` blocks, evenly spaced, perhaps page-locked."""
    pitch = layout.n_block_bytes + gap
    slab = np.zeros(n * pitch, np.uint8) if pinned is None else pinned.allocate(n * pitch)
    return slab, [slab[i * pitch : i * pitch + layout.n_block_bytes] for i in range(n)]


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


def test_a_transfer_waits_for_what_computes_its_rows(workers: Workers) -> None:
    computed = threading.Event()

    class Fence:
        def wait(self) -> None:
            assert computed.wait(10)

    transfer, work = Transfer(0, True, Fence()), Work(0, 5)
    workers.add(transfer, [work])
    transfer.seal()
    time.sleep(0.05)
    assert work.copied == []
    transfer.cut(3)  # nobody waits for the device to give a slot up
    computed.set()
    assert transfer.wait(10)
    assert work.copied == [3]


class HeldState:
    """A detached state: bytes."""

    def __init__(self, n: int) -> None:
        self.n_bytes, self.memory = n, np.random.default_rng(2).integers(0, 256, n, np.uint8)
        self.to_host = True

    def copy_at(self, address: int, begin: int, end: int) -> None:
        there, mine = (address, int(self.memory.ctypes.data) + begin)
        ctypes.memmove(*((there, mine) if self.to_host else (mine, there)), end - begin)


@pytest.mark.parametrize("n", [1, 1000, 70_001])
@pytest.mark.parametrize("way", ["cupy", "threads"])
def test_a_state_goes_there_and_back_in_chunks(device: Any, workers: Workers, n: int, way: str) -> None:
    cells, cupy, _ = device
    copier = CudaCopier(cells, cupy, 1000) if way == "cupy" else HostCopier(cells, 1000)
    state, done = HeldState(n), []
    expected = state.memory.copy()
    out = Transfer(0, True)
    work = StateWork(copier, state, True, None, done.append)
    workers.add(out, [work])
    out.seal()
    assert out.wait(10)
    assert out.error is None
    np.testing.assert_array_equal(done[0], expected)
    assert work.n_chunks > 1 or n <= 70_000
    state.memory[:], state.to_host = 0, False
    back = Transfer(0, False)
    workers.add(back, [StateWork(copier, state, False, done[0], lambda data: None)])
    back.seal()
    assert back.wait(10)
    np.testing.assert_array_equal(state.memory, expected)


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


def test_the_way_is_said(monkeypatch: pytest.MonkeyPatch, device: Any) -> None:
    assert way_of([]) == "by threads, in main memory"
    assert "RPC0" not in way_of(["RPC0"])
    assert "wholly on CUDA" in way_of(["RPC0", "CUDA0"])
    monkeypatch.setitem(sys.modules, "cupy", None)
    assert "pip install" in way_of(["CUDA0"])
    cells, cupy, _ = device
    copier, why = pick_copier(cells)
    assert copier.name == "threads"
    assert "pip install" in why
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    cupy.runtime.getDeviceCount = lambda: 2
    assert way_of(["CUDA0", "CUDA1"]) == "by cupy, asynchronously on streams of its own"
    assert pick_copier(cells)[0].name == "cupy"
    cupy.runtime.getDeviceCount = lambda: 0
    assert "no CUDA device" in way_of(["CUDA0"])
