"""Which way rows are copied here: by cupy where all of them are on CUDA devices, else by threads."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from llamamg.abi import Abi
from llamamg.blocks import Cells
from llamamg.transfer.driver import DriverCopies
from llamamg.transfer.host import HostCopier
from llamamg.transfer.job import Copier
from llamamg.transfer.trial import error_of
from llamamg.transfer.ways import using


def usable_cupy(devices: Iterable[str]) -> tuple[Any, str]:
    """cupy and "", or None and why rows on these devices are not copied by it."""
    from llamamg.devices.hops_cupy import available

    names = sorted(devices)
    if not names or not all(name.startswith("CUDA") for name in names):
        return None, "it serves caches that are wholly on CUDA devices"
    cupy, reason = available(names)
    if cupy is None:
        return None, str(reason)
    try:
        n = int(cupy.cuda.runtime.getDeviceCount())
    except Exception as error:  # no driver
        return None, f"cupy finds no CUDA device ({error})"
    return (cupy, "") if n else (None, "cupy finds no CUDA device")


def way_of(devices: Iterable[str], native: Abi | None = None) -> str:
    """In words, how a cache on these devices (names; none: main memory) is copied to the host and back.

    With `native` a page is copied from each device, since a driver may refuse what it should do.
    """
    names = list(devices)
    if not names:
        return "by threads, in main memory"
    cupy, reason = usable_cupy(names)
    if cupy is None:
        return f"by threads through the backend's own copies ({reason})"
    driver = DriverCopies.load(native)
    if driver is None:
        return "by cupy, asynchronously on streams of its own, one by one"
    for name in sorted(names):
        error = error_of(cupy, driver, int(name.removeprefix("CUDA")))
        if error:
            return (
                f"by cupy, asynchronously on streams of its own, one by one: the driver makes none by itself ({error})"
            )
    return "by cupy, asynchronously on streams of its own, many in a call"


def pick_copier(cells: Cells) -> tuple[Copier, str]:
    """The way to copy, and a sentence that says why it is this one; `Copier.way` says it as it is later on."""
    copier = _copier(cells)
    using(copier)
    return copier, copier.way


def _copier(cells: Cells) -> Copier:
    devices = {plane.device for plane in cells.planes(0)}
    if devices <= {""}:
        return HostCopier(cells, why="the cache is in main memory")
    cupy, reason = usable_cupy(devices)
    if cupy is None:
        return HostCopier(cells, why=f"the cache is on {', '.join(sorted(devices - {''}))}; no cupy: {reason}")
    from llamamg.transfer.cuda import CudaCopier

    return CudaCopier(cells, cupy, driver=DriverCopies.load(getattr(cells, "native", None)))
