"""Many copies in one call: the driver's functions are stand-ins over main memory."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import pytest

from llamamg.library import Library
from llamamg.transfer import driver
from llamamg.transfer.driver import Copy, DriverCopies


class Driver:
    """Copies are made when their event is waited for, as late as may be; `fail` makes the copy of that number fail."""

    def __init__(self, fail: int = -1) -> None:
        self.queue: list[Any] = []
        self.marks: dict[int, int] = {}  # length of the queue when an event was recorded
        self.n_copies = self.n_open = self.n_open_most = 0
        self.kinds: set[tuple[int, int]] = set()
        self.fail = fail

        class Place(ctypes.Structure):
            _fields_ = [("x", ctypes.c_size_t), ("y", ctypes.c_size_t), ("type", ctypes.c_uint), ("host", ctypes.c_size_t),
                        ("device", ctypes.c_uint64), ("array", ctypes.c_void_p), ("pitch", ctypes.c_size_t)]  # fmt: skip

        class Copy2D(ctypes.Structure):  # CUDA_MEMCPY2D
            _fields_ = [("source", Place), ("target", Place), ("width", ctypes.c_size_t), ("height", ctypes.c_size_t)]

        @ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(Copy2D), ctypes.c_size_t)
        def copy(what: Any, stream: int) -> int:
            assert stream == 77
            if self.n_copies == self.fail:
                return 700
            c = what[0]
            assert (c.source.x, c.source.y, c.target.x, c.target.y) == (0, 0, 0, 0)
            assert {c.source.type, c.target.type} == {1, 2}
            self.kinds.add((c.source.type, c.target.type))
            source = c.source.host if c.source.type == 1 else c.source.device
            target = c.target.host if c.target.type == 1 else c.target.device
            self.queue.append((target, c.target.pitch, source, c.source.pitch, c.width, c.height))
            self.n_copies += 1
            return 0

        @ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_size_t, ctypes.c_size_t)
        def record(event: int, stream: int) -> int:
            assert event not in self.marks, "an event is used again before it was waited for"
            self.marks[event] = len(self.queue)
            self.n_open_most = max(self.n_open_most, len(self.marks))
            return 0

        @ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_size_t)
        def wait(event: int) -> int:
            n = self.marks.pop(event)
            for target, t_pitch, source, s_pitch, width, height in self.queue[:n]:
                for i in range(height):
                    ctypes.memmove(target + i * t_pitch, source + i * s_pitch, width)
            del self.queue[:n]
            self.marks = {other: mark - n for other, mark in self.marks.items()}
            return 0

        self.functions = (copy, record, wait)

    @property
    def addresses(self) -> list[int]:
        return [ctypes.cast(function, ctypes.c_void_p).value or 0 for function in self.functions]


@pytest.fixture
def mg(library: Library) -> Any:
    return library.mg


@pytest.mark.parametrize("to_host", [True, False])
@pytest.mark.parametrize("n", [0, 1, 7, 30])
@pytest.mark.parametrize("n_events", [1, 3])
def test_everything_is_copied_and_little_at_once(
    mg: Any, monkeypatch: pytest.MonkeyPatch, to_host: bool, n: int, n_events: int
) -> None:
    monkeypatch.setattr(driver, "PART_BYTES", 100)
    source = np.random.default_rng(1).integers(0, 256, (n + 1, 6, 20), np.uint8)
    target = np.zeros((n + 1, 6, 30), np.uint8)
    copies = [Copy(int(target[i].ctypes.data), int(source[i].ctypes.data), 30, 20, 10, 6) for i in range(n)]
    stand_in = Driver()
    assert DriverCopies(mg, stand_in.addresses).run(to_host, copies, 77, list(range(1, n_events + 1))) == 0
    np.testing.assert_array_equal(target[:n, :, :10], source[:n, :, :10])
    assert not target[n].any()
    assert not target[:, :, 10:].any()
    assert stand_in.n_open_most == min(n_events, -(-n * 60 // 120))
    assert not stand_in.queue
    assert not stand_in.marks
    assert stand_in.kinds == (set() if not n else {(2, 1)} if to_host else {(1, 2)})


def test_after_an_error_nothing_is_on_its_way(mg: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver, "PART_BYTES", 20)
    source, target = np.ones((9, 10), np.uint8), np.zeros((9, 10), np.uint8)
    copies = [Copy(int(target[i].ctypes.data), int(source[i].ctypes.data), 10, 10, 10) for i in range(9)]
    stand_in = Driver(fail=5)
    assert DriverCopies(mg, stand_in.addresses).run(True, copies, 77, [1, 2, 3]) == 700
    assert target[:5].all()
    assert not target[5:].any()
    assert not stand_in.queue
    assert not stand_in.marks


def test_without_a_driver_there_is_none(mg: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_library(name: str) -> Any:
        raise OSError(name)

    monkeypatch.setattr(ctypes, "CDLL", no_library)
    assert DriverCopies.load(mg) is None
    assert DriverCopies.load(None) is None
