"""Which way rows are copied here: by cupy where all of them are on CUDA devices, else by threads."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from llamamg.blocks import Cells
from llamamg.transfer.host import HostCopier
from llamamg.transfer.job import Copier


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


def way_of(devices: Iterable[str]) -> str:
    """In words, how a cache on these devices (names; none: main memory) is copied to the host and back."""
    names = list(devices)
    if not names:
        return "by threads, in main memory"
    cupy, reason = usable_cupy(names)
    if cupy is not None:
        return "by cupy, asynchronously on streams of its own"
    return f"by threads through the backend's own copies ({reason})"


def pick_copier(cells: Cells) -> tuple[Copier, str]:
    """The way to copy, and a sentence that says why it is this one."""
    devices = {plane.device for plane in cells.planes(0)}
    if devices <= {""}:
        return HostCopier(cells), "the cache is in main memory"
    cupy, reason = usable_cupy(devices)
    if cupy is None:
        return HostCopier(cells), f"the cache is on {', '.join(sorted(devices - {''}))}; no cupy: {reason}"
    from llamamg.transfer.cuda import CudaCopier
    from llamamg.transfer.driver import DriverCopies

    driver = DriverCopies.load(getattr(cells, "native", None))
    way = "cupy, many in a call" if driver is not None else "cupy"
    return CudaCopier(cells, cupy, driver=driver), f"asynchronous copies by {way}"
