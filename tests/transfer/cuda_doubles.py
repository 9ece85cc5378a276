"""Copies over main memory, in place of a CUDA device: of cupy, of the driver, and the cells they copy."""

from __future__ import annotations

import ctypes
import threading
from typing import Any

import numpy as np

from llamamg.blocks import N_ROWS, BlockLayout, Plane
from llamamg.transfer.driver import Copy


class FakeRuntime:
    """cudaMemcpy over main memory; remembers on which device and stream."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, int, int]] = []
        self.pinned: list[tuple[int, int]] = []
        self._own = threading.local()

    @property
    def device(self) -> int:
        """The current one, which each thread has of its own."""
        return getattr(self._own, "device", 0)

    @device.setter
    def device(self, index: int) -> None:
        self._own.device = index

    def memcpyAsync(self, dst: int, src: int, size: int, kind: int, stream: int) -> None:
        self.calls.append(("1d", kind, stream))
        ctypes.memmove(dst, src, size)

    def wait(self, stream: int) -> None:
        """Copies are made at once here."""

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


class LateRuntime(FakeRuntime):
    """Copies are made when somebody waits for their stream, and the call of number `fail` on device `broken` raises."""

    def __init__(self, fail: int, broken: int = 0) -> None:
        super().__init__()
        self.fail, self.broken, self.n_calls = fail, broken, 0
        self.under_way: dict[int, list[tuple[int, int, int]]] = {}

    def memcpyAsync(self, dst: int, src: int, size: int, kind: int, stream: int) -> None:
        self._begin(stream, [(dst, src, size)])

    def memcpy2DAsync(
        self, dst: int, dpitch: int, src: int, spitch: int, width: int, height: int, kind: int, stream: int
    ) -> None:
        self._begin(stream, [(dst + i * dpitch, src + i * spitch, width) for i in range(height)])

    def _begin(self, stream: int, copies: list[tuple[int, int, int]]) -> None:
        if stream % 1000 == self.broken:
            self.n_calls += 1
            if self.n_calls == self.fail:
                raise OSError("invalid argument")
        self.under_way.setdefault(stream, []).extend(copies)

    def wait(self, stream: int) -> None:
        for copy in self.under_way.pop(stream, []):
            ctypes.memmove(*copy)


class FakeCupy:
    """What CudaCopier uses of cupy."""

    def __init__(self, runtime: FakeRuntime | None = None) -> None:
        outer = self
        self.runtime = runtime or FakeRuntime()
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

            def synchronize(self) -> None:
                outer.runtime.wait(self.ptr)

        class Event:
            def __init__(self, block: bool = False, disable_timing: bool = False) -> None:
                self.stream: Any = None
                self.ptr = id(self)

            def record(self, stream: Stream) -> None:
                assert stream.ptr % 1000 == outer.runtime.device, "an event of another device"
                self.stream = stream

            def synchronize(self) -> None:
                assert self.stream is not None
                outer.runtime.wait(self.stream.ptr)
                outer.synchronized += 1

        class Cuda:
            runtime = self.runtime

        self.cuda: Any = Cuda()
        self.cuda.Device, self.cuda.Stream, self.cuda.Event = Device, Stream, Event
        self.cuda.alloc_pinned_memory = self._allocate
        self.cuda.alloc = self._allocate

    def _allocate(self, n: int) -> Any:
        memory: Any = type("Memory", (ctypes.c_uint8 * n,), {})()  # a buffer with an address, as cupy has it
        memory.ptr = ctypes.addressof(memory)
        self.runtime.pinned.append((memory.ptr, n))
        return memory


class DeviceCells:
    """Planes in main memory that say they are on CUDA devices: rows, rows on a second device, and a transposed one."""

    reason = ""
    n_cells = 2048
    devices: tuple[str, ...] = ("CUDA0", "CUDA1", "CUDA0")

    def __init__(self) -> None:
        self.layout = BlockLayout(((1, 24, 1), (1, 16, 1), (1, 2, 5)))
        self.memory = [np.random.default_rng(i).integers(0, 256, size, np.uint8)
                       for i, size in enumerate((24 * 2048, 16 * 2048, 2 * 2048 * 5))]  # fmt: skip

    def planes(self, seq_id: int) -> list[Plane]:
        return [
            Plane(int(memory.ctypes.data), n_bytes, self.n_cells, n_columns, device, kind)
            for memory, (kind, n_bytes, n_columns), device in zip(
                self.memory, self.layout.planes, self.devices, strict=True
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


def blocks(n: int, layout: BlockLayout, gap: int = 0, pinned: Any = None) -> tuple[Any, list[Any]]:
    """`n` blocks, evenly spaced, perhaps page-locked."""
    pitch = layout.n_block_bytes + gap
    slab = np.zeros(n * pitch, np.uint8) if pinned is None else pinned.allocate(n * pitch)
    return slab, [slab[i * pitch : i * pitch + layout.n_block_bytes] for i in range(n)]


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
