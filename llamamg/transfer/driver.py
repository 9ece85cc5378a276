"""Many copies in one call that the interpreter has no part in, by the CUDA driver's own functions."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence as Seq
from dataclasses import dataclass

from llamamg.abi import Abi, ffi

PART_BYTES = 1 << 20  # at least, mostly one copy of 1 to 2 MiB, some 40 us: what copies of a decode wait for
N_PARTS = 3  # on their way at once
FUNCTIONS = ("cuMemcpy2DAsync_v2", "cuEventRecord", "cuEventSynchronize")


@dataclass(frozen=True, slots=True)
class Copy:
    """`height` rows of `width` bytes; from one row to the next it is a pitch."""

    target: int
    source: int
    target_pitch: int
    source_pitch: int
    width: int
    height: int = 1


class DriverCopies:
    """`functions` are the addresses of the three FUNCTIONS."""

    def __init__(self, mg: Abi, functions: Seq[int]) -> None:
        self._lib = mg.lib
        self._cuda = ffi.new("struct mg_cuda *", [ffi.cast("void *", address) for address in functions])

    @staticmethod
    def load(mg: Abi | None) -> DriverCopies | None:
        """None where the driver or the native build lacks what it takes."""
        if mg is None or not hasattr(mg.lib, "mg_copies"):
            return None
        try:
            driver = ctypes.CDLL("libcuda.so.1")
            found = [ctypes.cast(getattr(driver, name), ctypes.c_void_p).value or 0 for name in FUNCTIONS]
        except (OSError, AttributeError):
            return None
        return DriverCopies(mg, found)

    def run(self, to_host: bool, copies: Seq[Copy], stream: int, events: Seq[int]) -> int:
        """Copy and wait for it, on the device that is the current one of this thread; the driver's error, 0: none."""
        n = len(copies)
        rows = ffi.new("struct mg_copy[]", n)
        for row, c in zip(rows, copies, strict=True):
            row.target, row.source = ffi.cast("void *", c.target), ffi.cast("void *", c.source)
            row.target_pitch, row.source_pitch, row.width, row.height = (
                c.target_pitch,
                c.source_pitch,
                c.width,
                c.height,
            )
        handles = ffi.new("void *[]", [ffi.cast("void *", event) for event in events])
        return int(
            self._lib.mg_copies(
                self._cuda, to_host, rows, n, PART_BYTES, ffi.cast("void *", stream), handles, len(events)
            )
        )
