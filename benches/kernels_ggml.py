"""One ggml graph on one backend, with its tensors seen as arrays of the device."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from .errors import BenchError
from .kernels_device import Device

POINTER, INT, LONG, SIZE, FLOAT = ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64, ctypes.c_size_t, ctypes.c_float
F32, F16, I32, I64 = 0, 1, 26, 27
BYTES = {F32: 4, F16: 2, I32: 4, I64: 8}
DTYPES = {F32: np.float32, F16: np.float16, I32: np.int32, I64: np.int64}
CONTEXT_BYTES = 8 << 20  # of tensor descriptions


class Unsupported(BenchError):
    """The backend cannot compute a node; the text says which."""


class InitParams(ctypes.Structure):
    """struct ggml_init_params."""

    _fields_ = (("mem_size", SIZE), ("mem_buffer", POINTER), ("no_alloc", ctypes.c_bool))


SIGNATURES: dict[str, tuple[Any, list[Any]]] = {
    "ggml_init": (POINTER, [InitParams]),
    "ggml_free": (None, [POINTER]),
    "ggml_new_tensor_4d": (POINTER, [POINTER, INT, LONG, LONG, LONG, LONG]),
    "ggml_new_graph": (POINTER, [POINTER]),
    "ggml_build_forward_expand": (None, [POINTER, POINTER]),
    "ggml_graph_n_nodes": (INT, [POINTER]),
    "ggml_graph_node": (POINTER, [POINTER, INT]),
    "ggml_op_desc": (ctypes.c_char_p, [POINTER]),
    "ggml_get_data": (POINTER, [POINTER]),
    "ggml_nbytes": (SIZE, [POINTER]),
    "ggml_backend_alloc_ctx_tensors": (POINTER, [POINTER, POINTER]),
    "ggml_backend_buffer_free": (None, [POINTER]),
    "ggml_backend_free": (None, [POINTER]),
    "ggml_backend_graph_compute": (INT, [POINTER, POINTER]),
    "ggml_backend_supports_op": (ctypes.c_bool, [POINTER, POINTER]),
    "ggml_backend_get_device": (POINTER, [POINTER]),
    "ggml_backend_dev_backend_reg": (POINTER, [POINTER]),
    "ggml_backend_reg_get_proc_address": (POINTER, [POINTER, ctypes.c_char_p]),
    "ggml_mul_mat": (POINTER, [POINTER] * 3),
    "ggml_relu": (POINTER, [POINTER] * 2),
    "ggml_add": (POINTER, [POINTER] * 3),
    "ggml_cont": (POINTER, [POINTER] * 2),
    "ggml_permute": (POINTER, [POINTER, POINTER, INT, INT, INT, INT]),
    "ggml_get_rows": (POINTER, [POINTER] * 3),
    "ggml_top_k": (POINTER, [POINTER, POINTER, INT]),
    "ggml_reshape_3d": (POINTER, [POINTER, POINTER, LONG, LONG, LONG]),
    "ggml_view_2d": (POINTER, [POINTER, POINTER, LONG, LONG, SIZE, SIZE]),
    "ggml_view_3d": (POINTER, [POINTER, POINTER, LONG, LONG, LONG, SIZE, SIZE, SIZE]),
    "ggml_flash_attn_ext": (POINTER, [POINTER] * 5 + [FLOAT] * 3),
}


def bind(folder: Path, more: dict[str, tuple[Any, list[Any]]]) -> Any | None:
    """libggml-base of a build with typed functions; None when it lacks one of `more`."""
    base = ctypes.CDLL(str(folder / "libggml-base.so"))
    for name, (result, arguments) in {**SIGNATURES, **more}.items():
        try:
            function = getattr(base, name)
        except AttributeError:
            if name in more:
                return None
            raise
        function.restype, function.argtypes = result, arguments
    return base


class Graph:
    """`build(base, context, *inputs) -> tensor` is put into the graph `n` times over the same inputs.

    `inputs` are (type, sizes from the fastest one on, array or None). `run` gives the last result, as an array.
    """

    def __init__(
        self,
        device: Device,
        folder: Path,
        base: Any,
        inputs: list[tuple[int, tuple[int, ...], Any]],
        build: Callable[..., Any],
        result: tuple[int, tuple[int, ...]],
        n: int = 1,
    ) -> None:
        self._base, self._device, self._result = base, device, result
        self._backend = self._open(folder)
        self._context = base.ggml_init(InitParams(CONTEXT_BYTES, None, True))
        tensors = [base.ggml_new_tensor_4d(self._context, kind, *ne, *[1] * (4 - len(ne))) for kind, ne, _ in inputs]
        self._graph = base.ggml_new_graph(self._context)
        for _ in range(n):
            self._out = build(base, self._context, *tensors)
            base.ggml_build_forward_expand(self._graph, self._out)
        self._buffer = base.ggml_backend_alloc_ctx_tensors(self._context, self._backend)
        if not self._buffer:
            raise BenchError(f"{device.name} has no room for the tensors of a kernel")
        self._check_support()
        for tensor, (kind, ne, values) in zip(tensors, inputs, strict=True):
            if values is not None:
                self._array(tensor, kind, ne)[...] = values
        device.wait()  # ggml's streams do not wait for the array module's

    def _check_support(self) -> None:
        """Raises Unsupported: computing a graph with an operation that a backend lacks would end the process."""
        base = self._base
        for i in range(base.ggml_graph_n_nodes(self._graph)):
            node = base.ggml_graph_node(self._graph, i)
            if not base.ggml_backend_supports_op(self._backend, node):
                name = base.ggml_op_desc(node).decode()
                self.close()
                raise Unsupported(f"{self._device.name} has no {name} for these sizes")

    def _open(self, folder: Path) -> Any:
        ggml = ctypes.CDLL(str(folder / "libggml.so"))
        ggml.ggml_backend_init_by_name.restype = POINTER
        ggml.ggml_backend_init_by_name.argtypes = [ctypes.c_char_p, ctypes.c_char_p]
        backend = ggml.ggml_backend_init_by_name(self._device.backend.encode(), None)
        if not backend:
            raise BenchError(f"the native build has no device {self._device.backend}: see `llamamg doctor`")
        if self._device.kind == "cpu":
            base = self._base
            registry = base.ggml_backend_dev_backend_reg(base.ggml_backend_get_device(backend))
            address = base.ggml_backend_reg_get_proc_address(registry, b"ggml_backend_set_n_threads")
            ctypes.CFUNCTYPE(None, POINTER, ctypes.c_int)(address)(backend, self._device.n_threads)
        return backend

    def _array(self, tensor: Any, kind: int, ne: tuple[int, ...]) -> Any:
        """A tensor's memory as an array, the slowest size first. Nothing is copied."""
        address = self._base.ggml_get_data(tensor)
        shape, n_bytes = ne[::-1], BYTES[kind] * int(np.prod(ne))
        if self._device.kind == "cpu":
            raw = (ctypes.c_uint8 * n_bytes).from_address(address)
            return np.frombuffer(raw, DTYPES[kind]).reshape(shape)
        cupy = self._device.xp
        memory = cupy.cuda.UnownedMemory(address, n_bytes, self)
        return cupy.ndarray(shape, DTYPES[kind], cupy.cuda.MemoryPointer(memory, 0))

    def run(self) -> Any:
        """Compute; waits for the result, which lies in the graph's own memory."""
        code = self._base.ggml_backend_graph_compute(self._backend, self._graph)
        if code != 0:
            raise BenchError(f"ggml answered {code} when it computed a kernel's graph")
        return self._array(self._out, *self._result)

    def close(self) -> None:
        """Free everything."""
        self._base.ggml_backend_buffer_free(self._buffer)
        self._base.ggml_free(self._context)
        self._base.ggml_backend_free(self._backend)
