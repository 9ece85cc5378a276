"""The cells of libllama's contexts, for copies to and from host memory that run beside decodes of other sequences."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from llamamg.abi import Abi, NativeError, ffi
from llamamg.blocks import N_ROWS, BlockLayout, Bytes, Cells, Indexes, Plane, StateCopy


class NativeStateCopy(StateCopy):
    """As StateCopy."""

    def __init__(self, mg: Abi, handle: Any, n_bytes: int) -> None:
        self._mg, self._handle, self.n_bytes = mg, handle, n_bytes

    def copy(self, state: Bytes, begin: int, end: int) -> None:
        if self._mg.lib.mg_state_copy(self._handle, ffi.cast("void *", state.ctypes.data), begin, end) != 0:
            raise self._mg.error()

    def close(self) -> None:
        if self._handle is not None:
            self._mg.lib.mg_state_free(self._handle)
            self._handle = None


class NativeCells(Cells):
    """As Cells. `locate` gives for a sequence id the address of its llama_context and the id it has there."""

    def __init__(self, mg: Abi, locate: Callable[[int], tuple[int, int]]) -> None:
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

    def place(self, seq_id: int, pos: int, tokens: Indexes) -> Indexes:
        context, seq = self._at(seq_id)
        tokens = np.ascontiguousarray(tokens, np.int32)
        cells = np.empty(len(tokens), np.int32)
        code = self._mg.lib.mg_cells_place(context, seq, pos, len(tokens), _int32(tokens), _int32(cells))
        if code != 0:
            raise self._mg.error()
        return cells

    def copy(self, seq_id: int, to_host: bool, planes: range, cell: int, n: int, block: int, row: int) -> None:
        context, seq = self._at(seq_id)
        code = self._mg.lib.mg_cells_copy(
            context, seq, to_host, planes.start, len(planes), cell, n, ffi.cast("void *", block), N_ROWS, row
        )
        if code != 0:
            raise self._mg.error()

    def save_state(self, seq_id: int) -> StateCopy:
        context, seq = self._at(seq_id)
        n_bytes = ffi.new("uint64_t *")
        handle = self._mg.lib.mg_state_save(context, seq, n_bytes)
        if handle == ffi.NULL:
            raise self._mg.error()
        return NativeStateCopy(self._mg, handle, int(n_bytes[0]))

    def load_state(self, seq_id: int, state: Bytes) -> StateCopy:
        context, seq = self._at(seq_id)
        handle = self._mg.lib.mg_state_load(context, seq, ffi.cast("void *", state.ctypes.data), len(state))
        if handle == ffi.NULL:
            raise self._mg.error()
        return NativeStateCopy(self._mg, handle, len(state))


def _int32(array: Indexes) -> Any:
    return ffi.cast("int32_t *", array.ctypes.data)
