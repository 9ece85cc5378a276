"""What one native kernel is to `bench kernels`: how to make its inputs, run it, check it, and what it has to move."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Protocol

from .kernels_device import Device

# Modules with `cases(device) -> list[Case]`; another one is added by naming it here.
MODULES = ("kernels_sampling", "kernels_qsa")


class Prepared(Protocol):
    """A kernel with its inputs on the device."""

    def run(self) -> Any:
        """Compute once. The result as an array on the device or the host."""

    def close(self) -> None:
        """Give everything back."""


@dataclass(frozen=True, slots=True)
class Check:
    """A result compared with float64. `error` is in the unit that `what` names."""

    ok: bool
    error: float
    what: str


@dataclass(frozen=True, slots=True)
class Case:
    """One kernel at one size.

    `n_bytes` must cross memory once, whatever the code does; `n_flops` are multiplications and additions.
    `check(result)` computes the same in float64. `upstream` prepares what stock llama.cpp does instead; None: nothing to
    compare with, and `upstream_note` says why. `unavailable` says why the case cannot run with this build.
    """

    name: str
    size: str
    n_bytes: int
    n_flops: int
    prepare: Callable[[], Prepared]
    check: Callable[[Any], Check]
    upstream: Callable[[], Prepared] | None = None
    upstream_check: Callable[[Any], Check] | None = None  # where upstream's result has another form
    upstream_note: str = ""
    unavailable: str = ""
    launches_per_run: int = 1


def registry(device: Device) -> list[Case]:
    """The cases of all modules for a device."""
    package = __package__ or "benches"
    return [case for name in MODULES for case in import_module(f"{package}.{name}").cases(device)]
