"""One page copied from a device by the driver's own functions: whether that works is only known afterwards."""

from __future__ import annotations

from typing import Any

from llamamg.transfer.driver import N_PARTS, Copy, DriverCopies

PAGE_BYTES = 4096


def error_of(cupy: Any, driver: DriverCopies, device: int) -> str:
    """What went wrong on the device of this number; "": nothing."""
    try:
        with cupy.cuda.Device(device):
            stream = cupy.cuda.Stream(non_blocking=True)
            events = [cupy.cuda.Event(block=True, disable_timing=True) for _ in range(N_PARTS)]
            source, target = cupy.cuda.alloc(PAGE_BYTES), cupy.cuda.alloc_pinned_memory(PAGE_BYTES)
            events[0].record(stream)  # the runtime's context becomes this thread's
            page = Copy(int(target.ptr), int(source.ptr), PAGE_BYTES, PAGE_BYTES, PAGE_BYTES)
            error = driver.run(True, [page], stream.ptr, [event.ptr for event in events])
    except Exception as fault:  # cupy's own kinds, which are known only where it is there
        return f"{type(fault).__name__}: {fault}"
    return f"error {error}" if error else ""
