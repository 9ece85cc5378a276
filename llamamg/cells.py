"""The cells of libllama's contexts, for copies to and from host memory that run beside decodes of other sequences."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from llamamg.abi import Abi, ffi
from llamamg.blocks import N_ROWS, BlockLayout, Bytes, Cells, Fence, Indexes, Plane, StateCopy
from llamamg.errors import NativeError

Locate = Callable[[int], tuple[int, int]]


class NativeStateCopy(StateCopy):
    """As StateCopy."""

    def __init__(self, mg: Abi, locate: Locate, context: Any, handle: Any, n_bytes: int) -> None:
        self._mg, self._locate, self._context, self.n_bytes = mg, locate, context, n_bytes
        self._handle = ffi.gc(handle, mg.lib.mg_state_free)

    def copy(self, state: Bytes, begin: int, end: int) -> None:
        self.copy_at(state.ctypes.data + begin, begin, end)

    def copy_at(self, address: int, begin: int, end: int) -> None:
        if self._mg.lib.mg_state_copy(self._handle, ffi.cast("void *", address - begin), begin, end) != 0:
            raise self._mg.error()

    def detach(self) -> bool:
        if not hasattr(self._mg.lib, "mg_state_detach"):
            return False
        code = int(self._mg.lib.mg_state_detach(self._context, self._handle))
        if code < 0:
            raise self._mg.error()
        return code == 0

    def put(self, seq_id: int) -> None:
        address, local = self._locate(seq_id)
        if self._mg.lib.mg_state_put(ffi.cast("void *", address), local, self._handle) != 0:
            raise self._mg.error()

    def close(self) -> None:
        self._handle = None


class NativeFence(Fence):
    """As Fence."""

    def __init__(self, mg: Abi, handle: Any) -> None:
        self._mg, self._handle = mg, ffi.gc(handle, mg.lib.mg_fence_free)

    def wait(self) -> None:
        if self._mg.lib.mg_fence_wait(self._handle) != 0:
            raise self._mg.error()


class NativeCells(Cells):
    """As Cells. `locate` gives for a sequence id the address of its llama_context and the id it has there."""

    def __init__(self, mg: Abi, locate: Locate) -> None:
        self._mg, self._locate = mg, locate
        self.reason = ""  # why nothing can be copied; "": it can
        self.layout = BlockLayout(())
        self._devices: list[str] = []
        try:
            self._devices = [device.name for device in mg.devices()]
            planes = self.planes(0)
        except NativeError as error:
            self.reason = str(error).partition(": ")[2] or str(error)
        else:
            self.layout = BlockLayout(tuple((p.type, p.n_bytes, p.n_columns) for p in planes))

    @property
    def native(self) -> Abi:
        """The library that the contexts belong to."""
        return self._mg

    def _at(self, seq_id: int) -> tuple[Any, int]:
        address, local = self._locate(seq_id)
        return ffi.cast("void *", address), local

    def planes(self, seq_id: int) -> list[Plane]:
        context, seq = self._at(seq_id)
        n = int(self._mg.lib.mg_cells_planes(context, seq, ffi.NULL, 0))
        out = ffi.new("struct mg_plane[]", max(n, 1))
        if n < 0 or int(self._mg.lib.mg_cells_planes(context, seq, out, n)) != n:
            raise self._mg.error()
        return [
            Plane(
                int(ffi.cast("uintptr_t", p.data)),
                int(p.bytes),
                int(p.n_cells),
                int(p.n_columns),
                self._devices[p.device] if p.device >= 0 else "",
                int(p.type),
            )
            for p in out[0:n]
        ]

    def find(self, seq_id: int, pos: int, n: int) -> Indexes:
        context, seq = self._at(seq_id)
        cells = np.empty(n, np.int32)
        if self._mg.lib.mg_cells_find(context, seq, pos, n, _int32(cells)) != 0:
            raise self._mg.error()
        return cells

    def appends(self, seq_id: int, pos: int, n: int) -> bool:
        if not hasattr(self._mg.lib, "mg_cells_appends"):
            return False
        context, seq = self._at(seq_id)
        code = int(self._mg.lib.mg_cells_appends(context, seq, pos, n))
        if code < 0:
            raise self._mg.error()
        return code == 1

    def place(self, seq_id: int, pos: int, tokens: Indexes) -> Indexes:
        context, seq = self._at(seq_id)
        tokens = np.ascontiguousarray(tokens, np.int32)
        cells = np.empty(len(tokens), np.int32)
        code = self._mg.lib.mg_cells_place(context, seq, pos, len(tokens), _int32(tokens), _int32(cells))
        if code != 0:
            raise self._mg.error()
        return cells

    def adopt(self, seq_id: int, tokens: Indexes) -> int:
        if not hasattr(self._mg.lib, "mg_cells_adopt"):
            return 0
        context, seq = self._at(seq_id)
        tokens = np.ascontiguousarray(tokens, np.int32)
        n = int(self._mg.lib.mg_cells_adopt(context, seq, len(tokens), _int32(tokens)))
        if n < 0:
            raise self._mg.error()
        return n

    def empty(self, seq_id: int) -> None:
        """Take the cells from a long sequence quickly, before the library removes it; where that cannot be, nothing is done."""
        if hasattr(self._mg.lib, "mg_cells_empty"):
            context, seq = self._at(seq_id)
            self._mg.lib.mg_cells_empty(context, seq)

    def copy(self, seq_id: int, to_host: bool, planes: range, cell: int, n: int, block: int, row: int) -> None:
        context, seq = self._at(seq_id)
        code = self._mg.lib.mg_cells_copy(
            context, seq, to_host, planes.start, len(planes), cell, n, ffi.cast("void *", block), N_ROWS, row
        )
        if code != 0:
            raise self._mg.error()

    def fence(self, seq_id: int) -> Fence | None:
        if not hasattr(self._mg.lib, "mg_fence_new"):
            return None
        handle = self._mg.lib.mg_fence_new(self._at(seq_id)[0])
        if handle == ffi.NULL:
            raise self._mg.error()
        return NativeFence(self._mg, handle)

    def limit_states(self, n_bytes: int, n_left: int) -> None:
        if hasattr(self._mg.lib, "mg_state_limit"):
            self._mg.lib.mg_state_limit(n_bytes, n_left)

    def state_bytes(self) -> int:
        return int(self._mg.lib.mg_state_held()) if hasattr(self._mg.lib, "mg_state_held") else 0

    def memory_free(self) -> list[int]:
        names = {plane.device for plane in self.planes(0)}
        return [device.memory_free for device in self._mg.devices() if device.name in names]

    def save_state(self, seq_id: int) -> StateCopy:
        context, seq = self._at(seq_id)
        n_bytes = ffi.new("uint64_t *")
        handle = self._mg.lib.mg_state_save(context, seq, n_bytes)
        if handle == ffi.NULL:
            raise self._mg.error()
        return NativeStateCopy(self._mg, self._locate, context, handle, int(n_bytes[0]))

    def load_state(self, seq_id: int, state: Bytes) -> StateCopy:
        context, seq = self._at(seq_id)
        handle = self._mg.lib.mg_state_load(context, seq, ffi.cast("void *", state.ctypes.data), len(state))
        if handle == ffi.NULL:
            raise self._mg.error()
        return NativeStateCopy(self._mg, self._locate, context, handle, len(state))


def _int32(array: Indexes) -> Any:
    return ffi.cast("int32_t *", array.ctypes.data)
