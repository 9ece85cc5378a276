"""Run one QSA operation on one backend through ggml's C API, and compute the same in float64.

$LLAMAMG_TEST_BACKEND names the backend, `CPU` by default: the same tests serve every device.
"""

from __future__ import annotations

import ctypes
import os
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from gguf import GGMLQuantizationType, quants
from numpy.typing import NDArray

from llamamg.library import Library

BACKEND = os.environ.get("LLAMAMG_TEST_BACKEND", "CPU")
TYPES = ("F32", "F16", "BF16", "Q8_0", "Q5_1", "Q5_0", "Q4_1", "Q4_0", "IQ4_NL")
I32, I64 = 26, 27

Floats = NDArray[np.float32]
Ints = NDArray[np.int32]


class InitParams(ctypes.Structure):
    _fields_ = (("mem_size", ctypes.c_size_t), ("mem_buffer", ctypes.c_void_p), ("no_alloc", ctypes.c_bool))


class Rope(ctypes.Structure):
    """struct qsa_rope."""

    _fields_ = (
        ("n_rot", ctypes.c_int32),
        ("n_ctx_orig", ctypes.c_int32),
        *((name, ctypes.c_float) for name in ("freq_base", "freq_scale", "ext_factor", "attn_factor")),
        ("beta_fast", ctypes.c_float),
        ("beta_slow", ctypes.c_float),
    )


POINTER, INT, LONG, FLOAT = ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64, ctypes.c_float
SIGNATURES: dict[str, tuple[Any, list[Any]]] = {
    "ggml_init": (POINTER, [InitParams]),
    "ggml_free": (None, [POINTER]),
    "ggml_new_tensor_3d": (POINTER, [POINTER, INT, LONG, LONG, LONG]),
    "ggml_new_graph": (POINTER, [POINTER]),
    "ggml_view_2d": (POINTER, [POINTER, POINTER, LONG, LONG, ctypes.c_size_t, ctypes.c_size_t]),
    "ggml_view_3d": (POINTER, [POINTER, POINTER, LONG, LONG, LONG, *[ctypes.c_size_t] * 3]),
    "ggml_build_forward_expand": (None, [POINTER, POINTER]),
    "ggml_quantize_chunk": (ctypes.c_size_t, [INT, POINTER, POINTER, LONG, LONG, LONG, POINTER]),
    "ggml_row_size": (ctypes.c_size_t, [INT, LONG]),
    "ggml_nbytes": (ctypes.c_size_t, [POINTER]),
    "ggml_backend_alloc_ctx_tensors": (POINTER, [POINTER, POINTER]),
    "ggml_backend_buffer_free": (None, [POINTER]),
    "ggml_backend_free": (None, [POINTER]),
    "ggml_backend_tensor_set": (None, [POINTER, POINTER, ctypes.c_size_t, ctypes.c_size_t]),
    "ggml_backend_tensor_get": (None, [POINTER, POINTER, ctypes.c_size_t, ctypes.c_size_t]),
    "ggml_backend_graph_compute": (INT, [POINTER, POINTER]),
    "ggml_backend_supports_op": (ctypes.c_bool, [POINTER, POINTER]),
    "ggml_backend_get_device": (POINTER, [POINTER]),
    "ggml_backend_dev_backend_reg": (POINTER, [POINTER]),
    "ggml_backend_reg_get_proc_address": (POINTER, [POINTER, ctypes.c_char_p]),
    "ggml_qsa_pool": (POINTER, [POINTER, POINTER, POINTER, POINTER, POINTER, INT, INT, FLOAT, ctypes.POINTER(Rope)]),
    "ggml_qsa_select": (POINTER, [POINTER, POINTER, POINTER, POINTER, INT, INT, INT]),
    "ggml_qsa_select_list": (POINTER, [POINTER, POINTER]),
    "ggml_qsa_attn": (POINTER, [POINTER, POINTER, POINTER, POINTER, POINTER, POINTER, INT, INT, INT, FLOAT]),
    "ggml_qsa_attn_out": (POINTER, [POINTER, POINTER]),
    "qsa_shapes_ok": (ctypes.c_bool, [LONG] * 8),
}


def type_id(name: str) -> int:
    return int(GGMLQuantizationType[name])


@dataclass
class Storage:
    """Rows of a cache: bytes as the backend sees them, and what they mean in float64."""

    type: str
    data: NDArray[np.uint8]
    values: NDArray[np.float64]


class Ops:
    """One backend and its number of threads."""

    def __init__(self, library: Library, backend: str = BACKEND, n_threads: int = 1) -> None:
        self.base = ctypes.CDLL(str(library.dir / "libggml-base.so"))
        for name, (result, arguments) in SIGNATURES.items():
            function = getattr(self.base, name)
            function.restype, function.argtypes = result, arguments
        ggml = ctypes.CDLL(str(library.dir / "libggml.so"))
        ggml.ggml_backend_init_by_name.restype = POINTER
        ggml.ggml_backend_init_by_name.argtypes = [ctypes.c_char_p, ctypes.c_char_p]
        self.name = backend
        self.backend = ggml.ggml_backend_init_by_name(backend.encode(), None)
        assert self.backend, f"there is no backend {backend}; $LLAMAMG_TEST_BACKEND names one"
        if backend == "CPU":
            registry = self.base.ggml_backend_dev_backend_reg(self.base.ggml_backend_get_device(self.backend))
            set_threads = self.base.ggml_backend_reg_get_proc_address(registry, b"ggml_backend_set_n_threads")
            ctypes.CFUNCTYPE(None, POINTER, ctypes.c_int)(set_threads)(self.backend, n_threads)

    def close(self) -> None:
        self.base.ggml_backend_free(self.backend)

    def store(self, values: Floats, kind: str) -> Storage:
        """Rows of `values` in a cache type."""
        values = np.ascontiguousarray(values, np.float32)
        n_rows, n = values.shape
        data = np.empty((n_rows, self.base.ggml_row_size(type_id(kind), n)), np.uint8)
        self.base.ggml_quantize_chunk(type_id(kind), values.ctypes.data, data.ctypes.data, 0, n_rows, n, None)
        exact = quants.dequantize(data, GGMLQuantizationType[kind]).reshape(n_rows, n)
        return Storage(kind, data, exact.astype(np.float64))

    def _run(self, build: Any, inputs: list[tuple[int, tuple[int, ...], Any]], result: Any) -> None:
        """Create `inputs` (type, ne, data), build(context, *tensors) -> (node, view), compute, copy view to result."""
        base = self.base
        context = base.ggml_init(InitParams(1 << 20, None, True))
        tensors = [base.ggml_new_tensor_3d(context, kind, *ne, *([1] * (3 - len(ne)))) for kind, ne, _ in inputs]
        node, view = build(context, *tensors)
        graph = base.ggml_new_graph(context)
        base.ggml_build_forward_expand(graph, view)
        if not base.ggml_backend_supports_op(self.backend, node):
            assert self.name != "CPU", "the CPU does every shape"
            pytest.skip(f"{self.name} leaves this shape or type to the CPU")
        buffer = base.ggml_backend_alloc_ctx_tensors(context, self.backend)
        assert buffer, "no memory for the test's tensors"
        for tensor, (_, _, data) in zip(tensors, inputs, strict=True):
            data = np.ascontiguousarray(data)
            assert data.nbytes == base.ggml_nbytes(tensor)
            base.ggml_backend_tensor_set(tensor, data.ctypes.data, 0, data.nbytes)
        assert base.ggml_backend_graph_compute(self.backend, graph) == 0
        base.ggml_backend_tensor_get(view, result.ctypes.data, 0, result.nbytes)
        base.ggml_backend_buffer_free(buffer)
        base.ggml_free(context)

    def pool(
        self, raw: Storage, pooled: Floats, gamma: Floats, ranges: Ints, r: int, kv_size: int, eps: float, rope: Rope
    ) -> Floats:
        """Pooled storage [n_rows, d] after the blocks of `ranges` [S, 4] were written."""
        d = pooled.shape[1]
        result = np.empty_like(pooled)

        def build(context: Any, *t: Any) -> Any:
            node = self.base.ggml_qsa_pool(context, *t, r, kv_size, eps, ctypes.byref(rope))
            return node, node

        inputs = [
            (type_id(raw.type), (d, len(raw.data)), raw.data),
            (0, (d, len(pooled)), pooled),
            (0, (d,), gamma),
            (I32, (4, len(ranges)), ranges),
        ]
        self._run(build, inputs, result)
        return result

    def _padded(self, q: Floats, padding: tuple[int, int]) -> tuple[Any, Any]:
        """Input and view of queries [T, H, D] that stand in rows with `padding` floats before and behind them."""
        n_tokens, h, d = q.shape
        wide = np.full((n_tokens, h, d + sum(padding)), np.nan, np.float32)
        wide[:, :, padding[0] : padding[0] + d] = q
        row = 4 * wide.shape[2]

        def view(context: Any, tensor: Any) -> Any:
            return self.base.ggml_view_3d(context, tensor, d, h, n_tokens, row, row * h, 4 * padding[0])

        return (0, wide.shape[::-1], wide), view

    def select(
        self, q: Floats, pooled: Floats, idx: NDArray[np.int64], r: int, kv_size: int, n_top: int,
        padding: tuple[int, int] = (0, 0),
    ) -> Ints:  # fmt: skip
        """Lists [T, n_top] for queries [T, h, d] of tokens in cells `idx`."""
        n_tokens, _, d = q.shape
        result = np.empty((n_tokens, n_top), np.int32)
        wide, view = self._padded(q, padding)

        def build(context: Any, q: Any, *t: Any) -> Any:
            node = self.base.ggml_qsa_select(context, view(context, q), *t, r, kv_size, n_top)
            return node, self.base.ggml_qsa_select_list(context, node)

        self._run(build, [wide, (0, (d, len(pooled)), pooled), (I64, (n_tokens,), idx)], result)
        return result

    def attn(
        self, q: Floats, k: Storage, v: Storage, idx: NDArray[np.int64], lists: Ints, r: int, kv_size: int, scale: float,
        padding: tuple[int, int] = (0, 0), skip: int = 0,
    ) -> Floats:  # fmt: skip
        """Output [T, H, D] for queries [T, H, D] and lists [T, n_top]; the caches are views behind `skip` rows."""
        head_size = q.shape[2]
        n_tokens = len(idx)
        n_embd = k.values.shape[1]
        result = np.empty_like(q)
        wide, view = self._padded(q, padding)

        def rows(context: Any, tensor: Any, x: Storage) -> Any:
            row = x.data.shape[1]
            return self.base.ggml_view_2d(context, tensor, n_embd, len(x.data), row, skip * row) if skip else tensor

        def build(context: Any, q: Any, k_all: Any, v_all: Any, *t: Any) -> Any:
            caches = rows(context, k_all, k), rows(context, v_all, v)
            node = self.base.ggml_qsa_attn(
                context, view(context, q), *caches, *t, r, kv_size, n_embd // head_size, scale
            )
            return node, self.base.ggml_qsa_attn_out(context, node)

        inputs = [
            wide,
            (type_id(k.type), (n_embd, skip + len(k.data)), np.pad(k.data, ((skip, 0), (0, 0)), constant_values=255)),
            (type_id(v.type), (n_embd, skip + len(v.data)), np.pad(v.data, ((skip, 0), (0, 0)), constant_values=255)),
            (I64, (n_tokens,), idx),
            (I32, (lists.shape[1], n_tokens), lists),
        ]
        self._run(build, inputs, result)
        return result


def scores(q: Floats, blocks: Floats) -> NDArray[np.float64]:
    """Score of every block [n, d] for one query [h, d]."""
    products = blocks.astype(np.float64) @ q.astype(np.float64).T
    return np.where(products > 0, products, 0.0).sum(axis=1)


def selected(values: NDArray[np.float64], n_top: int) -> NDArray[np.int64]:
    """Ascending numbers of the best blocks, the lower one of two equals."""
    return np.sort(np.argsort(-values, kind="stable")[:n_top])


def check_list(got: Ints, values: NDArray[np.float64], n_top: int) -> int:
    """Assert that a list is right but for blocks too close to the edge to call; returns how many of those differ."""
    n_listed = min(n_top, len(values))
    assert (got[n_listed:] == -1).all()
    listed = got[:n_listed]
    assert (np.diff(listed) > 0).all(), "a list is ascending"
    assert n_listed == 0 or (listed[0] >= 0 and listed[-1] < len(values)), "a list names visible blocks"
    differing = np.setxor1d(listed, selected(values, n_top))
    if len(differing):
        edge = np.sort(values)[-n_listed]
        assert (np.abs(values[differing] - edge) <= 1e-5 * abs(edge)).all(), "a clearly better block is missing"
    return len(differing) // 2


def attention(q: Floats, k: Storage, v: Storage, cells: list[NDArray[np.int64]], scale: float) -> NDArray[np.float64]:
    """Attention [T, H, D] of each token over its own cells."""
    n_tokens, n_head, head_size = q.shape
    n_kv_head = k.values.shape[1] // head_size
    out = np.empty(q.shape, np.float64)
    for t in range(n_tokens):
        keys = k.values[cells[t]].reshape(-1, n_kv_head, head_size)
        values = v.values[cells[t]].reshape(-1, n_kv_head, head_size)
        for head in range(n_head):
            kv_head = head // (n_head // n_kv_head)
            logits = scale * (keys[:, kv_head] @ q[t, head].astype(np.float64))
            weights = np.exp(logits - logits.max())
            out[t, head] = (weights / weights.sum()) @ values[:, kv_head]
    return out
