"""Copies between devices, as the scheduler makes them between two stages of a model."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llamamg.devices.ggml import F32, Backend, DeviceError, Tensors
from llamamg.devices.speed import typical_s

SMALL_BYTES = 64 << 10  # about the activations of a token
LARGE_BYTES = 64 << 20
REMOTE_BYTES = 4 << 20  # the large copy where a network may be between
TIME_S = 0.1
_ROW = 1024  # values


@dataclass(frozen=True, slots=True)
class Hop:
    """Copies from one device to another. `path` says how: `ggml` is what a decode does."""

    source: str
    target: str
    path: str
    latency_s: float  # of the small copy, host calls included
    bytes_per_s: float  # of the large one

    def seconds(self, n_bytes: float) -> float:
        """What a copy of this size takes."""
        return self.latency_s + n_bytes / self.bytes_per_s

    def json(self) -> dict[str, Any]:
        return {
            "from": self.source,
            "to": self.target,
            "path": self.path,
            "latency_us": round(1e6 * self.latency_s, 2),
            "gb_s": round(self.bytes_per_s / 1e9, 3),
        }


def measure(folder: Path, source: str, target: str, remote: bool = False, time_s: float = TIME_S) -> Hop:
    """The hop that a model split over these two devices takes. Raises DeviceError, also when a copy is wrong."""
    with Backend(folder, source) as a, Backend(folder, target) as b:
        small = _copy_s(a, b, SMALL_BYTES, time_s)
        n_large = REMOTE_BYTES if remote else LARGE_BYTES
        large = _copy_s(a, b, n_large, time_s)
    # Where latency is not above noise the difference could be nothing: then the whole time counts.
    moving = large - small if large > 1.5 * small else large
    return Hop(source, target, "ggml", small, n_large / moving)


def _copy_s(a: Backend, b: Backend, n_bytes: int, time_s: float) -> float:
    shape = [(F32, (_ROW, n_bytes // 4 // _ROW))]
    with Tensors(a, shape) as source, Tensors(b, shape) as target:
        content = os.urandom(1 << 16)
        source.write(0, content)
        target.write(0, bytes(1 << 16))

        def copy() -> None:
            a.g.ggml_backend_tensor_copy_async(a.handle, b.handle, source.inputs[0], target.inputs[0])
            a.wait()
            b.wait()
            target.arrived()

        taken = typical_s(copy, time_s, 50)
        if target.read(0) != source.read(0):
            raise DeviceError(f"a copy from {a.name} to {b.name} arrived changed: do not use these two together")
    return taken


def all_pairs(names: Sequence[str]) -> list[tuple[str, str]]:
    """Every ordered pair: a hop may be slower one way."""
    return [(a, b) for a in names for b in names if a != b]
