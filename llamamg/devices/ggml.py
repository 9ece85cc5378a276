"""Small graphs and copies on any ggml device, through ctypes: enough to measure one."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from llamamg.errors import LoadError

POINTER, INT, LONG, SIZE = ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64, ctypes.c_size_t
F32, Q8_0 = 0, 8
_DESCRIPTIONS = 1 << 20  # bytes for the descriptions of tensors and graphs
_N_NODES = 512


class DeviceError(LoadError):
    """A device that cannot be measured; the text is a sentence."""


class _InitParams(ctypes.Structure):
    _fields_ = (("mem_size", SIZE), ("mem_buffer", POINTER), ("no_alloc", ctypes.c_bool))


# library -> function -> (result, arguments)
_FUNCTIONS: dict[str, dict[str, tuple[Any, list[Any]]]] = {
    "libggml.so": {
        "ggml_backend_dev_by_name": (POINTER, [ctypes.c_char_p]),
    },
    "libggml-base.so": {
        "ggml_init": (POINTER, [_InitParams]),
        "ggml_free": (None, [POINTER]),
        "ggml_new_tensor_2d": (POINTER, [POINTER, INT, LONG, LONG]),
        "ggml_new_graph_custom": (POINTER, [POINTER, SIZE, ctypes.c_bool]),
        "ggml_build_forward_expand": (None, [POINTER, POINTER]),
        "ggml_nbytes": (SIZE, [POINTER]),
        "ggml_get_name": (ctypes.c_char_p, [POINTER]),
        "ggml_mul_mat": (POINTER, [POINTER] * 3),
        "ggml_add": (POINTER, [POINTER] * 3),
        "ggml_backend_dev_init": (POINTER, [POINTER, ctypes.c_char_p]),
        "ggml_backend_dev_backend_reg": (POINTER, [POINTER]),
        "ggml_backend_reg_get_proc_address": (POINTER, [POINTER, ctypes.c_char_p]),
        "ggml_backend_free": (None, [POINTER]),
        "ggml_backend_alloc_ctx_tensors": (POINTER, [POINTER, POINTER]),
        "ggml_backend_buffer_free": (None, [POINTER]),
        "ggml_backend_graph_compute": (INT, [POINTER, POINTER]),
        "ggml_backend_synchronize": (None, [POINTER]),
        "ggml_backend_tensor_set": (None, [POINTER, POINTER, SIZE, SIZE]),
        "ggml_backend_tensor_get": (None, [POINTER, POINTER, SIZE, SIZE]),
        "ggml_backend_tensor_copy": (None, [POINTER] * 2),
        "ggml_backend_tensor_copy_async": (None, [POINTER] * 4),
    },
}


@cache
def functions(folder: Path) -> SimpleNamespace:
    """ggml's functions of a build, with their types."""
    found = SimpleNamespace()
    for file, wanted in _FUNCTIONS.items():
        library = ctypes.CDLL(str(folder / file))
        for name, (result, arguments) in wanted.items():
            function = getattr(library, name)
            function.restype, function.argtypes = result, arguments
            setattr(found, name, function)
    return found


class Backend:
    """One device, opened. `with Backend(...) as backend:`. Raises DeviceError."""

    def __init__(self, folder: Path, device: str, n_threads: int = 1) -> None:
        self.g, self.name, self._n_threads = functions(folder), device, n_threads
        self.is_remote = device.startswith("RPC")
        self.handle: Any = None

    def __enter__(self) -> Backend:
        g = self.g
        device = g.ggml_backend_dev_by_name(self.name.encode())
        self.handle = g.ggml_backend_dev_init(device, None) if device else None
        if not self.handle:
            raise DeviceError(f"{self.name} cannot be opened: see `llamamg doctor` for the devices of this build")
        registry = g.ggml_backend_dev_backend_reg(device)
        if address := g.ggml_backend_reg_get_proc_address(registry, b"ggml_backend_set_n_threads"):
            ctypes.CFUNCTYPE(None, POINTER, ctypes.c_int)(address)(self.handle, self._n_threads)
        return self

    def __exit__(self, *_: object) -> None:
        self.g.ggml_backend_free(self.handle)

    def wait(self) -> None:
        """Until everything submitted to it is done."""
        self.g.ggml_backend_synchronize(self.handle)


class Tensors:
    """Tensors in a device's memory, and the graph that `build(g, context, *inputs)` makes of them. Raises DeviceError.

    `inputs` are (type, sizes from the fastest one on).
    """

    def __init__(
        self,
        backend: Backend,
        inputs: Sequence[tuple[int, tuple[int, int]]],
        build: Callable[..., Any] | None = None,
    ) -> None:
        g = self._g = backend.g
        self._backend = backend
        self._context = g.ggml_init(_InitParams(_DESCRIPTIONS, None, True))
        self.inputs = [g.ggml_new_tensor_2d(self._context, kind, *sizes) for kind, sizes in inputs]
        self._graph, self._out = None, None
        if build is not None:
            self._graph = g.ggml_new_graph_custom(self._context, _N_NODES, False)
            self._out = build(g, self._context, *self.inputs)
            g.ggml_build_forward_expand(self._graph, self._out)
        self._buffer = g.ggml_backend_alloc_ctx_tensors(self._context, backend.handle)
        if not self._buffer:
            g.ggml_free(self._context)
            raise DeviceError(f"{backend.name} has no memory for a measurement: free some and try again")

    def __enter__(self) -> Tensors:
        return self

    def __exit__(self, *_: object) -> None:
        self._backend.wait()
        self._g.ggml_backend_buffer_free(self._buffer)
        self._g.ggml_free(self._context)

    def write(self, i: int, data: bytes) -> None:
        """Fill input `i`, with `data` again and again."""
        n_bytes = self._g.ggml_nbytes(self.inputs[i])
        whole = (data * -(-n_bytes // len(data)))[:n_bytes]
        self._g.ggml_backend_tensor_set(self.inputs[i], whole, 0, n_bytes)

    def read(self, i: int) -> bytes:
        """Content of input `i`."""
        n_bytes = self._g.ggml_nbytes(self.inputs[i])
        out = ctypes.create_string_buffer(n_bytes)
        self._g.ggml_backend_tensor_get(self.inputs[i], out, 0, n_bytes)
        return out.raw

    def duplicate(self, source: int, target: int) -> None:
        """Copy one input over another of the same shape, inside the device."""
        self._g.ggml_backend_tensor_copy(self.inputs[source], self.inputs[target])

    def compute(self) -> None:
        """Run the graph and wait for it."""
        code = self._g.ggml_backend_graph_compute(self._backend.handle, self._graph)
        if code != 0:
            raise DeviceError(f"{self._backend.name} could not compute a measurement's graph (ggml says {code})")
        if self._backend.is_remote:
            touch(self._g, self._out)

    def arrived(self) -> None:
        """Until input 0 has what was sent to it."""
        if self._backend.is_remote:
            touch(self._g, self.inputs[0])


def touch(g: SimpleNamespace, tensor: Any) -> None:
    """Read one value. Waiting for a device behind ggml-rpc waits for the sending only; an answer comes after everything."""
    g.ggml_backend_tensor_get(tensor, ctypes.create_string_buffer(4), 0, 4)
