"""Which device each tensor goes to: device lists, tensor splits and buffer-type overrides, as libllama wants them."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace
from typing import Any

from llamamg.config import ModelConfig
from llamamg.errors import LoadError
from llamamg.library import Library

# The expert tensors of a mixture, as llama-server's -cmoe means them.
EXPERTS = r"\.ffn_(up|down|gate|gate_up)_(ch|)exps"
DENSE = r"\.ffn_(up|down|gate)\."
VALUE_TYPES = ("int", "float", "bool", "str")  # in the order of libllama's enum


class _Override(ctypes.Structure):
    _fields_ = [("pattern", ctypes.c_char_p), ("buffer_type", ctypes.c_void_p)]


class Placement:
    """Holds the arrays that libllama's model parameters point into; keep it alive until the model is loaded."""

    def __init__(self, library: Library, config: ModelConfig) -> None:
        self._config, self._llama = config, library.llama
        self._ggml = _backend_functions(library)
        self._keep: list[Any] = []
        for endpoint in config.rpc:
            self._add_rpc(endpoint)

    def apply(self, params: Any) -> None:
        """Point `params` at the arrays."""
        params.devices = self._devices()
        params.tensor_buft_overrides = self._overrides()
        params.kv_overrides = self._metadata()
        parts = self._config.tensor_split
        if isinstance(parts, tuple) and parts:  # "auto" that nobody resolved leaves the choice to libllama
            n_max = self._llama.llama_max_devices()
            if len(parts) > n_max:
                raise LoadError(f"--tensor-split has {len(parts)} parts, there is room for {n_max} devices")
            split = (ctypes.c_float * n_max)(*parts)
            self._keep.append(split)
            params.tensor_split = split

    def names(self) -> list[str]:
        """Every device by name."""
        g = self._ggml
        return [g.ggml_backend_dev_name(g.ggml_backend_dev_get(i)).decode() for i in range(g.ggml_backend_dev_count())]

    def _devices(self) -> Any:
        wanted = self._config.devices
        if wanted is None:
            return None
        handles = []
        for name in wanted:
            handle = self._ggml.ggml_backend_dev_by_name(name.encode())
            if not handle:
                raise LoadError(
                    f"no device {name!r}: there are {', '.join(self.names()) or 'none'} (see `llamamg doctor`)"
                )
            handles.append(handle)
        array = (ctypes.c_void_p * (len(handles) + 1))(*handles, None)
        self._keep.append(array)
        return ctypes.cast(array, ctypes.c_void_p)

    def _buffer_types(self) -> dict[str, int]:
        g, found = self._ggml, {}
        for i in range(g.ggml_backend_dev_count()):
            kind = g.ggml_backend_dev_buffer_type(g.ggml_backend_dev_get(i))
            if kind:
                found[g.ggml_backend_buft_name(kind).decode()] = kind
        return found

    def _overrides(self) -> Any:
        c = self._config
        wanted = list(c.override_tensor)
        if c.cpu_moe:
            wanted.append((EXPERTS, "CPU"))
        wanted += [(rf"blk\.{i}{EXPERTS}", "CPU") for i in range(c.n_cpu_moe)]
        wanted += [(rf"blk\.{i}{DENSE}", "CPU") for i in range(c.n_cpu_ffn)]
        if not wanted:
            return None
        types = self._buffer_types()
        array = (_Override * (len(wanted) + 1))()
        for i, (pattern, name) in enumerate(wanted):
            if name not in types:
                raise LoadError(f"-ot {pattern}={name}: no such buffer type; there are {', '.join(sorted(types))}")
            text = pattern.encode()
            self._keep.append(text)
            array[i].pattern, array[i].buffer_type = text, types[name]
        self._keep.append(array)
        return ctypes.cast(array, ctypes.c_void_p)

    def _metadata(self) -> Any:
        wanted = self._config.override_kv
        if not wanted:
            return None
        array = (self._llama.llama_model_kv_override * (len(wanted) + 1))()  # an empty key ends it
        for entry, (key, kind, value) in zip(array, wanted, strict=False):
            if kind not in VALUE_TYPES or len(key.encode()) > 127 or len(value.encode()) > 127:
                raise LoadError(
                    f"--override-kv {key}={kind}:{value}: the type is int, float, bool or str, key and value are short"
                )
            entry.key, entry.tag = key.encode(), VALUE_TYPES.index(kind)
            try:
                match kind:
                    case "int":
                        entry.value.val_i64 = int(value)
                    case "float":
                        entry.value.val_f64 = float(value)
                    case "bool":
                        entry.value.val_bool = value.lower() in ("true", "1", "on")
                    case _:
                        entry.value.val_str = value.encode()
            except ValueError as error:
                raise LoadError(f"--override-kv {key}={kind}:{value}: {value!r} is no {kind}") from error
        self._keep.append(array)
        return array

    def _add_rpc(self, endpoint: str) -> None:
        g = self._ggml
        registry = g.ggml_backend_reg_by_name(b"RPC")
        if not registry:
            raise LoadError("--rpc needs the RPC backend, and this build has none: run `llamamg build`")
        address = g.ggml_backend_reg_get_proc_address(registry, b"ggml_backend_rpc_add_server")
        add = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_char_p)(address)
        server = add(endpoint.encode())
        if not server:
            raise LoadError(f"no rpc-server answers at {endpoint}: start one there, or check the address")
        g.ggml_backend_register(ctypes.c_void_p(server))


_VOID, _TEXT, _SIZE = ctypes.c_void_p, ctypes.c_char_p, ctypes.c_size_t
# library -> function -> (result, arguments)
_FUNCTIONS: dict[str, dict[str, tuple[Any, list[Any]]]] = {
    "libggml.so": {
        "ggml_backend_dev_count": (_SIZE, []),
        "ggml_backend_dev_get": (_VOID, [_SIZE]),
        "ggml_backend_dev_by_name": (_VOID, [_TEXT]),
        "ggml_backend_reg_by_name": (_VOID, [_TEXT]),
        "ggml_backend_register": (None, [_VOID]),
    },
    "libggml-base.so": {
        "ggml_backend_dev_name": (_TEXT, [_VOID]),
        "ggml_backend_dev_buffer_type": (_VOID, [_VOID]),
        "ggml_backend_buft_name": (_TEXT, [_VOID]),
        "ggml_backend_reg_get_proc_address": (_VOID, [_VOID, _TEXT]),
    },
}


def _backend_functions(library: Library) -> SimpleNamespace:
    """ggml's device functions with their types (llama_cpp's own binding of them looks in the wrong folder)."""
    found = SimpleNamespace()
    for file, functions in _FUNCTIONS.items():
        loaded = ctypes.CDLL(str(library.dir / file))
        for name, (result, arguments) in functions.items():
            function = getattr(loaded, name)
            function.restype, function.argtypes = result, arguments
            setattr(found, name, function)
    return found
