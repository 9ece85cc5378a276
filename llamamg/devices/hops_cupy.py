"""Copies between CUDA devices by cupy: straight from peer to peer, left to the driver, and through pinned host memory."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from llamamg.devices.hops import LARGE_BYTES, SMALL_BYTES, Hop
from llamamg.devices.speed import typical_s

TO_HOST, TO_DEVICE = 2, 1  # cudaMemcpyKind
_CUDA = re.compile(r"CUDA(\d+)$")
TIME_S = 0.1


def available(names: Sequence[str]) -> tuple[Any, str]:
    """cupy and "", or None and the sentence that says what is missing."""
    if not any(_CUDA.match(name) for name in names):
        return None, "none of the devices is a CUDA device: cupy has nothing to add"
    if os.environ.get("GGML_CUDA_DEVICES"):
        return None, "GGML_CUDA_DEVICES makes several devices of one: cupy cannot tell them apart"
    try:
        import cupy
    except ImportError:
        return (
            None,
            "cupy is not installed: pip install 'llamamg[cuda13]' (or cuda12) tells peer and staged copies apart",
        )
    return cupy, ""


def measure(cupy: Any, source: str, target: str, time_s: float = TIME_S) -> list[Hop]:
    """Hops by path: `driver` (peer access off), `peer` (on, where the devices can), `pinned` (through host memory)."""
    rt, a, b = cupy.cuda.runtime, _index(source), _index(target)
    found = []
    with _memory(rt, a) as memory_a, _memory(rt, b) as memory_b, _pinned(rt) as host, _stream(rt, a) as stream:

        def straight(n_bytes: int) -> Callable[[], None]:
            def copy() -> None:
                rt.setDevice(a)
                rt.memcpyPeerAsync(memory_b, b, memory_a, a, n_bytes, stream)
                rt.streamSynchronize(stream)

            return copy

        def staged(n_bytes: int) -> Callable[[], None]:
            def copy() -> None:
                rt.setDevice(a)
                rt.memcpyAsync(host, memory_a, n_bytes, TO_HOST, stream)
                rt.streamSynchronize(stream)
                rt.setDevice(b)
                rt.memcpy(memory_b, host, n_bytes, TO_DEVICE)

            return copy

        def hop(path: str, copier: Callable[[int], Callable[[], None]]) -> Hop:
            small = typical_s(copier(SMALL_BYTES), time_s, 50)
            large = typical_s(copier(LARGE_BYTES), time_s, 50)
            moving = large - small if large > 1.5 * small else large
            return Hop(source, target, path, small, LARGE_BYTES / moving)

        found.append(hop("pinned", staged))
        as_found = hop("driver", straight)
        if not rt.deviceCanAccessPeer(a, b):
            return [*found, as_found]
        with _peer_access(rt, a, b) as was_on:
            # libggml switches peer access on with GGML_CUDA_P2P: then the copy was direct already.
            found += [replace(as_found, path="peer")] if was_on else [as_found, hop("peer", straight)]
    return found


def _index(name: str) -> int:
    match = _CUDA.match(name)
    assert match is not None
    return int(match.group(1))


def is_cuda(name: str) -> bool:
    """Whether cupy can see the device."""
    return _CUDA.match(name) is not None


@contextmanager
def _peer_access(rt: Any, a: int, b: int) -> Iterator[bool]:
    """Peer access from `a` to `b`; whether somebody had switched it on before. What was off is off again afterwards."""
    rt.setDevice(a)
    try:
        rt.deviceEnablePeerAccess(b)
    except rt.CUDARuntimeError:
        yield True
        return
    try:
        yield False
    finally:
        rt.setDevice(a)
        if hasattr(rt, "deviceDisablePeerAccess"):  # not in old versions
            rt.deviceDisablePeerAccess(b)


@contextmanager
def _memory(rt: Any, device: int) -> Iterator[int]:
    rt.setDevice(device)
    pointer = rt.malloc(LARGE_BYTES)
    try:
        yield pointer
    finally:
        rt.setDevice(device)
        rt.free(pointer)


@contextmanager
def _pinned(rt: Any) -> Iterator[int]:
    pointer = rt.hostAlloc(LARGE_BYTES, 1)  # 1: pinned for every device
    try:
        yield pointer
    finally:
        rt.freeHost(pointer)


@contextmanager
def _stream(rt: Any, device: int) -> Iterator[int]:
    rt.setDevice(device)
    stream = rt.streamCreate()
    try:
        yield stream
    finally:
        rt.setDevice(device)
        rt.streamDestroy(stream)
