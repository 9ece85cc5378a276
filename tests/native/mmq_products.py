"""Products with quantized weights on one backend, with and without quick-fixup: for test_mmq_fixup.py, and alone.

usage: mmq_products.py BACKEND      all types and sizes, for example on CUDA0; exit status 1: some result is wrong
"""

from __future__ import annotations

import ctypes
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType, quants
from numpy.typing import NDArray

from llamamg import library as native
from llamamg.library import Library

SWITCH, COUNT = "quick-fixup", "fixup"
TYPES = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "MXFP4", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS")
F32, I32 = 0, 26
MAX_ERROR = 0.04  # of the norm: activations are rounded to 8 bits, and a block's sum of them to F16
POINTER, INT, LONG, SIZE = ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64, ctypes.c_size_t
Floats = NDArray[np.float32]


class InitParams(ctypes.Structure):
    _fields_ = (("mem_size", SIZE), ("mem_buffer", POINTER), ("no_alloc", ctypes.c_bool))


SIGNATURES: dict[str, tuple[Any, list[Any]]] = {
    "ggml_init": (POINTER, [InitParams]),
    "ggml_free": (None, [POINTER]),
    "ggml_new_tensor_4d": (POINTER, [POINTER, INT, LONG, LONG, LONG, LONG]),
    "ggml_mul_mat": (POINTER, [POINTER] * 3),
    "ggml_mul_mat_id": (POINTER, [POINTER] * 4),
    "ggml_new_graph": (POINTER, [POINTER]),
    "ggml_build_forward_expand": (None, [POINTER, POINTER]),
    "ggml_quantize_chunk": (SIZE, [INT, POINTER, POINTER, LONG, LONG, LONG, POINTER]),
    "ggml_row_size": (SIZE, [INT, LONG]),
    "ggml_backend_alloc_ctx_tensors": (POINTER, [POINTER, POINTER]),
    "ggml_backend_buffer_free": (None, [POINTER]),
    "ggml_backend_free": (None, [POINTER]),
    "ggml_backend_tensor_set": (None, [POINTER, POINTER, SIZE, SIZE]),
    "ggml_backend_tensor_get": (None, [POINTER, POINTER, SIZE, SIZE]),
    "ggml_backend_graph_compute": (INT, [POINTER, POINTER]),
    "ggml_backend_supports_op": (ctypes.c_bool, [POINTER, POINTER]),
}


@dataclass(frozen=True)
class Shape:
    """A weight [n_inner, n_rows, n_channels, n_samples] and `n_columns` columns for each of `ratio` times its channels.

    With `n_used`, channels are experts, and each of `n_columns` tokens goes to so many of them.
    """

    n_inner: int
    n_rows: int
    n_columns: int
    n_channels: int = 1
    n_samples: int = 1
    ratio: int = 1
    n_used: int = 0


@dataclass(frozen=True)
class Outcome:
    """What one product gave."""

    n_different: int  # values whose bits the switch changes
    error: float  # of the result with the switch off, against float64
    n_fixups: int  # products that the switch had a part in


def shapes() -> Iterator[Shape]:
    """All widths of a tile; rows and inner dimensions that fit tiles or do not; few and many tiles; experts; batches."""
    for n in (1, 8, 9, *range(16, 129, 8), 17, 33, 65, 100, 127, 129, 160, 192, 255, 256, 320, 384, 512):
        yield Shape(2048, 512, n)
        yield Shape(1280, 1000, n)  # rows that no tile divides
    for n in (16, 40, 64, 128, 200, 512):
        yield Shape(4096, 128, n)  # a tile or two for all SMs
        yield Shape(512, 6144, n)
        yield Shape(2080, 384, n)  # where blocks of 32 are not read eight at a time
        yield Shape(768, 256, n, n_channels=2, n_samples=2, ratio=2)
    for n in (2, 9, 16, 32, 64, 100, 128, 256, 512):
        yield Shape(1024, 256, n, n_channels=32, n_used=5)
        yield Shape(512, 200, n, n_channels=8, n_used=2)


class Products:
    """One backend, opened."""

    def __init__(self, library: Library, backend: str) -> None:
        self.library, self.name = library, backend
        self._base = ctypes.CDLL(str(library.dir / "libggml-base.so"))
        for name, (result, arguments) in SIGNATURES.items():
            function = getattr(self._base, name)
            function.restype, function.argtypes = result, arguments
        ggml = ctypes.CDLL(str(library.dir / "libggml.so"))
        ggml.ggml_backend_init_by_name.restype = POINTER
        ggml.ggml_backend_init_by_name.argtypes = [ctypes.c_char_p, ctypes.c_char_p]
        self._backend = ggml.ggml_backend_init_by_name(backend.encode(), None)
        if not self._backend:
            raise LookupError(f"there is no backend {backend}")
        self._weights: dict[tuple[str, int, int, int], tuple[NDArray[np.uint8], Floats]] = {}

    def close(self) -> None:
        """Give the backend back."""
        self._base.ggml_backend_free(self._backend)

    def outcome(self, kind: str, shape: Shape, more: dict[str, int] | None = None) -> Outcome | None:
        """The product with the switch off and on, `more` switches held; None: the backend or the type lacks it."""
        if shape.n_inner % quants.GGML_QUANT_SIZES[GGMLQuantizationType[kind]][0]:
            return None
        n = max(1, shape.n_channels) * shape.n_samples
        data, exact = self._weight(kind, n, shape.n_rows, shape.n_inner)
        random = np.random.default_rng(shape.n_columns)
        if shape.n_used:
            x = random.standard_normal((1, shape.n_columns, 1, shape.n_inner), np.float32)
            # Some experts are chosen far more often than others, some never.
            odds = random.exponential(size=(shape.n_columns, n)) * np.arange(n)
            ids = np.argsort(-odds, axis=1)[:, : shape.n_used].astype(np.int32)
        else:
            sizes = shape.n_samples, shape.ratio * shape.n_channels, shape.n_columns, shape.n_inner
            x, ids = random.standard_normal(sizes, np.float32), None
        found = self._run(kind, shape, data, x, ids, more or {})
        if found is None:
            return None
        off, on, n_fixups = found
        wanted = _by_experts(exact, x[0, :, 0], ids) if ids is not None else _in_batches(exact, x, shape)
        error = float(np.linalg.norm(off - wanted) / np.linalg.norm(wanted))
        return Outcome(int((off.view(np.uint32) != on.view(np.uint32)).sum()), error, n_fixups)

    # -- inside

    def _weight(self, kind: str, n: int, n_rows: int, n_inner: int) -> tuple[NDArray[np.uint8], Floats]:
        """Rows in a type, and what they mean."""
        key = kind, n, n_rows, n_inner
        if key not in self._weights:
            values = np.random.default_rng(5).standard_normal((n * n_rows, n_inner), np.float32)
            type_id = int(GGMLQuantizationType[kind])
            data = np.empty((n * n_rows, self._base.ggml_row_size(type_id, n_inner)), np.uint8)
            self._base.ggml_quantize_chunk(type_id, values.ctypes.data, data.ctypes.data, 0, n * n_rows, n_inner, None)
            exact = quants.dequantize(data, GGMLQuantizationType[kind]).reshape(n, n_rows, n_inner)
            self._weights[key] = data, exact
        return self._weights[key]

    def _run(
        self, kind: str, shape: Shape, data: Any, x: Floats, ids: Any, more: dict[str, int]
    ) -> tuple[Floats, Floats, int] | None:
        base, mg = self._base, self.library.mg
        inputs = [
            (int(GGMLQuantizationType[kind]), (shape.n_inner, shape.n_rows, shape.n_channels, shape.n_samples), data),
            (F32, x.shape[::-1], x),
        ]
        if ids is not None:
            inputs[1] = (F32, (shape.n_inner, 1, shape.n_columns, 1), x)
            inputs.append((I32, (shape.n_used, shape.n_columns, 1, 1), ids))
        context = base.ggml_init(InitParams(1 << 20, None, True))
        tensors = [base.ggml_new_tensor_4d(context, type_id, *sizes) for type_id, sizes, _ in inputs]
        out = (base.ggml_mul_mat if ids is None else base.ggml_mul_mat_id)(context, *tensors)
        graph = base.ggml_new_graph(context)
        base.ggml_build_forward_expand(graph, out)
        buffer = None
        try:
            if not base.ggml_backend_supports_op(self._backend, out):
                return None
            buffer = base.ggml_backend_alloc_ctx_tensors(context, self._backend)
            assert buffer, "no memory for a product"
            for tensor, (_, _, values) in zip(tensors, inputs, strict=True):
                base.ggml_backend_tensor_set(tensor, values.ctypes.data, 0, values.nbytes)
            n_out = shape.n_rows * (ids.size if ids is not None else x.size // shape.n_inner)
            results, before = [], mg.trace_count(COUNT)
            for value in (0, 1):
                with mg.held({**more, SWITCH: value}):
                    unset = np.full(n_out, np.nan, np.float32)
                    base.ggml_backend_tensor_set(out, unset.ctypes.data, 0, unset.nbytes)
                    assert base.ggml_backend_graph_compute(self._backend, graph) == 0
                    base.ggml_backend_tensor_get(out, unset.ctypes.data, 0, unset.nbytes)
                assert value or mg.trace_count(COUNT) == before, "it is off"
                results.append(unset)
            lead = (shape.n_columns, shape.n_used) if ids is not None else x.shape[:-1]
            off, on = (result.reshape(*lead, shape.n_rows) for result in results)
            return off, on, mg.trace_count(COUNT) - before
        finally:
            if buffer:
                base.ggml_backend_buffer_free(buffer)
            base.ggml_free(context)


def _in_batches(exact: Floats, x: Floats, shape: Shape) -> NDArray[np.float64]:
    weights = exact.reshape(shape.n_samples, shape.n_channels, shape.n_rows, shape.n_inner).astype(np.float64)
    return np.asarray(x.astype(np.float64) @ np.repeat(weights, shape.ratio, axis=1).swapaxes(2, 3))


def _by_experts(exact: Floats, x: Floats, ids: NDArray[np.int32]) -> NDArray[np.float64]:
    out = np.empty((*ids.shape, exact.shape[1]))
    for expert in np.unique(ids):
        token, slot = np.nonzero(ids == expert)
        out[token, slot] = x[token].astype(np.float64) @ exact[expert].astype(np.float64).T
    return out


def main() -> int:
    """All types and shapes; a line for each type."""
    products = Products(native.load(), sys.argv[1])
    n_bad = 0
    for kind in TYPES:
        began, outcomes = time.perf_counter(), []
        for shape in shapes():
            for tiles in (0, 150) if shape.n_used else (0,):
                outcome = products.outcome(kind, shape, {"expert-tiles": tiles})
                if outcome is None:
                    continue
                outcomes.append(outcome)
                if outcome.n_different or not outcome.error < MAX_ERROR:
                    n_bad += 1
                    print(kind, shape, tiles, outcome, flush=True)
        worst = max((one.error for one in outcomes), default=0.0)
        n_fixups = sum(one.n_fixups for one in outcomes)
        print(
            f"{kind:<7} {len(outcomes)} products, {n_fixups} with quick-fixup, {n_bad} wrong so far, largest error {worst:.4f}, "
            f"{time.perf_counter() - began:.1f} s",
            flush=True,
        )
    products.close()
    return int(n_bad > 0)


if __name__ == "__main__":
    sys.exit(main())
