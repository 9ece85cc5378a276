"""Transfers: what is cut is not touched any more, what is finished is whole."""

from __future__ import annotations

import ctypes
import sys
import threading
import time
from typing import Any

import numpy as np
import pytest

from llamamg.blocks import BlockLayout, runs
from llamamg.transfer import HostCopier, StateWork, Transfer, Workers
from llamamg.transfer.cuda import CudaCopier
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


def test_what_is_not_queued_yet_is_not_copied_once_it_is_overwritten(workers: Workers) -> None:
    transfer, first, second, later = Transfer(0, True), Work(0, 5), Work(5, 10), Work(10, 15)
    workers.add(transfer, [first])
    transfer.give_way(7, 12, 10.0)  # more is to come: nobody can wait for it
    workers.add(transfer, [second, later])
    transfer.seal()
    assert transfer.wait(10)
    assert (first.finished, second.finished) == (5, 7)
    assert later.finished in (None, 7)


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


def test_runs_of_neighbours() -> None:
    assert runs([]) == []
    assert runs([3, 4, 5, 9, 7, 8]) == [(0, 3, 3), (3, 9, 1), (4, 7, 2)]


def test_plane_groups_cover_every_plane_once() -> None:
    layout = BlockLayout(((1, 100, 1),) * 7 + ((1, 2, 300),) * 3)
    for chunk in (1, 150, 1000, 10**6):
        groups = plane_groups(layout, 2, chunk)
        assert [i for group in groups for i in group] == list(range(10))
        assert all(2 * 100 * len(group) <= max(chunk, 200) for group in groups if group.stop <= 7)


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
    assert way_of(["CUDA0", "CUDA1"]) == "by cupy, asynchronously on streams of its own, one by one"
    assert pick_copier(cells)[0].name == "cupy"
    cupy.runtime.getDeviceCount = lambda: 0
    assert "no CUDA device" in way_of(["CUDA0"])
