"""Which way rows are copied here: by cupy where all of them are on CUDA devices, else by threads."""

from __future__ import annotations

from typing import Any

from llamamg.blocks import Cells
from llamamg.transfer.host import HostCopier
from llamamg.transfer.job import Copier


def import_cupy() -> tuple[Any, str]:
    """cupy and "", or None and why it cannot be used."""
    try:
        import cupy
    except Exception as error:  # a missing driver is not an ImportError
        return None, f"cupy cannot be imported ({type(error).__name__}: {error}); install the extra cuda12 or cuda13"
    try:
        n = int(cupy.cuda.runtime.getDeviceCount())
    except Exception as error:
        return None, f"cupy finds no CUDA device ({error})"
    return (cupy, "") if n else (None, "cupy finds no CUDA device")


def pick_copier(cells: Cells) -> tuple[Copier, str]:
    """The way to copy, and a sentence that says why it is this one."""
    devices = {plane.device for plane in cells.planes(0)}
    if devices <= {""}:
        return HostCopier(cells), "the cache is in main memory"
    if not all(name.startswith("CUDA") for name in devices):
        return HostCopier(cells), f"the cache is on {', '.join(sorted(devices - {''}))}"
    cupy, reason = import_cupy()
    if cupy is None:
        return HostCopier(cells), reason
    from llamamg.transfer.cuda import CudaCopier

    return CudaCopier(cells, cupy), "asynchronous copies by cupy"
