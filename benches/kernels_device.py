"""The array module of a device, its clock, and how fast it copies memory: numpy on the CPU, cupy on a GPU."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from .errors import BenchError

COPY_BYTES = 512 << 20  # larger than any cache
N_WARM = 2
WIDE = 16  # bytes of an item of a copy: as much as one thread of a GPU moves at once


@dataclass(frozen=True, slots=True)
class Device:
    """`xp` is numpy or cupy; `backend` is ggml's name of the device."""

    kind: str  # "cpu" | "cuda"
    name: str
    xp: Any
    backend: str
    n_threads: int = 1  # of the CPU backend

    def seconds(self, function: Callable[[], Any], n: int, told: Callable[[], None] = lambda: None) -> list[float]:
        """Times of `n` calls after some untimed ones; the device is idle before and after each."""
        out = []
        for i in range(n + N_WARM):
            elapsed = self._timed(function)
            if i >= N_WARM:
                out.append(elapsed)
            told()
        return out

    def _timed(self, function: Callable[[], Any]) -> float:
        self.wait()
        began = time.perf_counter()
        function()
        self.wait()
        return time.perf_counter() - began

    def wait(self) -> None:
        """Until everything submitted to the device, on whatever stream, is done."""
        if self.kind == "cuda":
            self.xp.cuda.runtime.deviceSynchronize()

    def own(self, values: Any) -> Any:
        """A copy of an array that outlives the memory it lies in."""
        out = self.xp.array(values)
        self.wait()
        return out

    def copy_s(self, n_bytes: int, n: int = 30, n_launches: int = 1) -> float:
        """Seconds of a copy that reads and writes `n_bytes` together; the median of `n`.

        At the kernel's own size, so that what fits into a cache is compared with a copy that does, too, and `n_launches` at a
        time as the kernel is launched. On a GPU the faster one of the copy engine's and a kernel's.
        """
        xp, n_items = self.xp, max(1, n_bytes // 2 // WIDE)
        source = xp.ones(n_items, xp.complex128)
        target = xp.empty_like(source)
        ways = [lambda: xp.copyto(target, source)]
        if self.kind == "cuda":
            kernel = xp.ElementwiseKernel("complex128 x", "complex128 y", "y = x", "llamamg_copy")
            ways.append(lambda: kernel(source, target))
        return min(statistics.median(self.seconds(self._repeated(way, n_launches), n)) for way in ways) / n_launches

    def _repeated(self, function: Callable[[], Any], n: int) -> Callable[[], Any]:
        """`n` calls as one: on a GPU a recorded graph, so that launching them one by one is not what is timed."""
        if n == 1:
            return function
        if self.kind == "cpu":
            return lambda: [function() for _ in range(n)]
        function()  # compiles what it needs; a recording cannot
        stream = self.xp.cuda.Stream(non_blocking=True)
        self.wait()
        with stream:
            stream.begin_capture()
            for _ in range(n):
                function()
            graph = stream.end_capture()
        return lambda: graph.launch(stream=stream)

    def copy_bytes_per_s(self) -> float:
        """Bytes read and written per second by a copy that fits into no cache."""
        return COPY_BYTES / self.copy_s(COPY_BYTES, 9, n_launches=8 if self.kind == "cuda" else 1)


def cpu(n_threads: int = 1) -> Device:
    """The CPU of this process; ggml's operations use `n_threads`, libllamamg's own one."""
    return Device("cpu", f"CPU, {n_threads} threads" if n_threads > 1 else "CPU, 1 thread", np, "CPU", n_threads)


def cuda(build_info: dict[str, Any]) -> Device:
    """The first CUDA device. Raises BenchError with what is missing."""
    built = build_major(build_info)
    if built is None:
        raise BenchError("this native build has no CUDA: run `llamamg build --cuda`, or use --device cpu")
    try:
        import cupy
    except ImportError as error:
        raise BenchError(f"cupy is not installed: pip install 'llamamg[cuda{built}]', or use --device cpu") from error
    check_cupy(cupy, built)
    return Device("cuda", _device_name(cupy), cupy, "CUDA0")


def check_cupy(cupy: Any, built: int) -> None:
    """Raises BenchError when cupy has another CUDA major than the build, or when there is no GPU."""
    own = int(cupy.cuda.runtime.runtimeGetVersion()) // 1000
    if own != built:
        raise BenchError(
            f"cupy is made for CUDA {own} and the native build for CUDA {built}: "
            f"pip uninstall cupy-cuda{own}x, then pip install 'llamamg[cuda{built}]'"
        )
    try:
        n = int(cupy.cuda.runtime.getDeviceCount())
    except cupy.cuda.runtime.CUDARuntimeError as error:
        raise BenchError(f"no GPU can be used ({error}): use --device cpu") from error
    if n == 0:
        raise BenchError("there is no GPU: use --device cpu")


def build_major(build_info: dict[str, Any]) -> int | None:
    """CUDA major of a native build; None for a CPU build."""
    if not build_info.get("cuda"):
        return None
    major = str(build_info.get("compilers", {}).get("nvcc", "")).partition(".")[0]
    if not major.isdigit():
        raise BenchError("the build does not say for which CUDA it was made: run `llamamg build --cuda` again")
    return int(major)


def _device_name(cupy: Any) -> str:
    name = cupy.cuda.runtime.getDeviceProperties(0)["name"]
    return name.decode() if isinstance(name, bytes) else str(name)
