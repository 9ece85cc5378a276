"""How fast one device reads weights, multiplies matrices and starts operations.

Two shapes of layer, stacked: with one column the time is that of reading the weights (a decode step), with many it is
that of arithmetic (a prompt). Random q8_0 weights, larger than any cache on a GPU.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from llamamg.devices.ggml import F32, Q8_0, Backend, Tensors

Q8_BLOCK = np.dtype([("scale", "<f2"), ("values", "i1", 32)])
TIME_S = 0.15  # of each measurement
N_OPS = 64  # operations of the chain that times one


@dataclass(frozen=True, slots=True)
class Sizes:
    """Pairs of matrices [wide, narrow] and [narrow, wide], and the columns of the two products."""

    narrow: int
    wide: int
    n_pairs: int
    n_columns: int

    @property
    def n_weights(self) -> int:
        return 2 * self.n_pairs * self.narrow * self.wide

    @property
    def n_bytes(self) -> int:
        return self.n_weights // 32 * Q8_BLOCK.itemsize


GPU = Sizes(8192, 16384, 2, 512)  # 570 MB
SMALL = Sizes(2048, 4096, 2, 16)  # 36 MB: a CPU, a device behind a network


@dataclass(frozen=True, slots=True)
class Speed:
    """Rates of a device."""

    read_bytes_per_s: float  # weights of a matrix-vector product
    flop_per_s: float  # of a matrix-matrix product
    op_s: float  # an operation that has nothing to do

    def json(self) -> dict[str, float]:
        return {
            "read_gb_s": round(self.read_bytes_per_s / 1e9, 3),
            "matrix_tflop_s": round(self.flop_per_s / 1e12, 5),
            "op_us": round(1e6 * self.op_s, 3),
        }


def sizes_for(type_: str, backend: str) -> Sizes:
    """What suits a device: large for a GPU of this machine."""
    return GPU if type_ == "gpu" and backend != "RPC" else SMALL


def measure(folder: Path, device: str, sizes: Sizes, n_threads: int = 1, time_s: float = TIME_S) -> Speed:
    """Rates of one device. Raises DeviceError."""
    with Backend(folder, device, n_threads) as backend:
        vector_s = _products(backend, sizes, 1, time_s)
        matrix_s = _products(backend, sizes, sizes.n_columns, time_s)
        chain_s = _chain(backend, time_s)
    return Speed(sizes.n_bytes / vector_s, 2 * sizes.n_weights * sizes.n_columns / matrix_s, chain_s / N_OPS)


def _products(backend: Backend, sizes: Sizes, n_columns: int, time_s: float) -> float:
    shapes = [(sizes.narrow, sizes.wide), (sizes.wide, sizes.narrow)] * sizes.n_pairs

    def build(g: Any, context: Any, x: Any, *weights: Any) -> Any:
        for weight in weights:
            x = g.ggml_mul_mat(context, weight, x)
        return x

    with Tensors(backend, [(F32, (sizes.narrow, n_columns)), *((Q8_0, shape) for shape in shapes)], build) as tensors:
        tensors.write(0, _normal(4096))
        for i in (1, 2):
            tensors.write(i, _q8(1 << 18, sizes))
        for i in range(3, len(shapes) + 1):
            tensors.duplicate(2 - i % 2, i)
        return typical_s(tensors.compute, time_s)


def _chain(backend: Backend, time_s: float) -> float:
    def build(g: Any, context: Any, x: Any, y: Any) -> Any:
        for _ in range(N_OPS):
            x = g.ggml_add(context, x, y)
        return x

    with Tensors(backend, [(F32, (1024, 1)), (F32, (1024, 1))], build) as tensors:
        for i in range(2):
            tensors.write(i, _normal(1024))
        return typical_s(tensors.compute, time_s)


def _normal(n: int) -> bytes:
    return np.random.default_rng(1).standard_normal(n).astype(np.float32).tobytes()


def _q8(n_blocks: int, sizes: Sizes) -> bytes:
    """Random blocks whose scale keeps a product's magnitude."""
    random = np.random.default_rng(2)
    blocks = np.empty(n_blocks, Q8_BLOCK)
    blocks["values"] = random.integers(-127, 128, (n_blocks, 32), np.int8)
    blocks["scale"] = 1 / (73 * np.sqrt(np.sqrt(sizes.narrow * sizes.wide)))  # 73: deviation of the values
    return blocks.tobytes()


def typical_s(function: Callable[[], Any], time_s: float, n_max: int = 200) -> float:
    """First quartile of a call's times, since what comes on top is somebody else's; two unmeasured calls come first."""
    function()
    function()
    taken: list[float] = []
    end = time.perf_counter() + time_s
    while len(taken) < 3 or (time.perf_counter() < end and len(taken) < n_max):
        begin = time.perf_counter()
        function()
        taken.append(time.perf_counter() - begin)
    return sorted(taken)[len(taken) // 4]
