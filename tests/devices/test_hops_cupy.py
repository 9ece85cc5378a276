"""Copies by cupy on a runtime that only counts and checks: this machine has no GPU."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from llamamg.devices import hops_cupy


class CudaError(RuntimeError):
    """As cupy.cuda.runtime.CUDARuntimeError."""


class Runtime:
    """Two cards. `on` holds the ordered pairs with peer access; memory must be freed and used on its own device."""

    CUDARuntimeError = CudaError

    def __init__(self, can: bool = True, on: tuple[tuple[int, int], ...] = ()) -> None:
        self.can, self.on, self.device = can, set(on), 0
        self.memory: dict[int, int] = {}
        self.streams: dict[int, int] = {}
        self.host: set[int] = set()
        self.copies: list[tuple[str, bool]] = []
        self._next = 1

    def _new(self) -> int:
        self._next += 1
        return self._next

    def getDeviceCount(self) -> int:
        return 2

    def setDevice(self, device: int) -> None:
        assert device in (0, 1)
        self.device = device

    def malloc(self, n_bytes: int) -> int:
        self.memory[pointer := self._new()] = self.device
        return pointer

    def free(self, pointer: int) -> None:
        assert self.memory.pop(pointer) == self.device

    def hostAlloc(self, n_bytes: int, flags: int) -> int:
        self.host.add(pointer := self._new())
        return pointer

    def freeHost(self, pointer: int) -> None:
        self.host.remove(pointer)

    def streamCreate(self) -> int:
        self.streams[stream := self._new()] = self.device
        return stream

    def streamDestroy(self, stream: int) -> None:
        assert self.streams.pop(stream) == self.device

    def streamSynchronize(self, stream: int) -> None:
        assert stream in self.streams

    def deviceCanAccessPeer(self, a: int, b: int) -> int:
        return int(self.can)

    def deviceEnablePeerAccess(self, b: int) -> None:
        assert self.can
        if (self.device, b) in self.on:
            raise CudaError("already on")
        self.on.add((self.device, b))

    def deviceDisablePeerAccess(self, b: int) -> None:
        self.on.remove((self.device, b))

    def memcpyPeerAsync(self, to: int, b: int, source: int, a: int, n_bytes: int, stream: int) -> None:
        assert (self.memory[to], self.memory[source], self.streams[stream]) == (b, a, self.device)
        self.copies.append(("peer", (a, b) in self.on))

    def memcpyAsync(self, to: int, source: int, n_bytes: int, kind: int, stream: int) -> None:
        assert kind == 2
        assert to in self.host
        assert self.memory[source] == self.streams[stream] == self.device

    def memcpy(self, to: int, source: int, n_bytes: int, kind: int) -> None:
        assert kind == 1
        assert source in self.host
        assert self.memory[to] == self.device
        self.copies.append(("pinned", False))


@pytest.fixture
def runtime(request: pytest.FixtureRequest) -> Iterator[Runtime]:
    found = Runtime(**getattr(request, "param", {}))
    before = set(found.on)
    yield found
    assert found.on == before, "peer access is as it was"
    assert not found.memory
    assert not found.host
    assert not found.streams


def paths(runtime: Runtime, a: str = "CUDA0", b: str = "CUDA1") -> list[str]:
    cupy: Any = SimpleNamespace(cuda=SimpleNamespace(runtime=runtime))
    found = hops_cupy.measure(cupy, a, b, time_s=0.001)
    assert all(hop.source == a and hop.target == b and hop.latency_s > 0 for hop in found)
    return [hop.path for hop in found]


def test_three_paths_where_cards_can_see_each_other(runtime: Runtime) -> None:
    assert paths(runtime) == ["pinned", "driver", "peer"]
    assert {("peer", True), ("peer", False), ("pinned", False)} == set(runtime.copies)
    assert paths(runtime, "CUDA1", "CUDA0") == ["pinned", "driver", "peer"]


@pytest.mark.parametrize("runtime", [{"can": False}], indirect=True)
def test_two_where_they_cannot(runtime: Runtime) -> None:
    assert paths(runtime) == ["pinned", "driver"]


@pytest.mark.parametrize("runtime", [{"on": ((0, 1),)}], indirect=True)
def test_peer_access_that_was_on_is_not_called_off(runtime: Runtime) -> None:
    assert paths(runtime) == ["pinned", "peer"]


def test_memory_is_given_back_after_an_error(runtime: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> None:
        raise CudaError("no luck")

    monkeypatch.setattr(runtime, "memcpyPeerAsync", broken)
    with pytest.raises(CudaError):
        paths(runtime)


def test_what_is_missing_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "none of the devices" in hops_cupy.available(["RPC0", "CPU"])[1]
    monkeypatch.setitem(__import__("sys").modules, "cupy", None)
    monkeypatch.delenv("GGML_CUDA_DEVICES", raising=False)
    assert "pip install" in hops_cupy.available(["CUDA0", "CUDA1"])[1]
    monkeypatch.setenv("GGML_CUDA_DEVICES", "2")
    assert "GGML_CUDA_DEVICES" in hops_cupy.available(["CUDA0", "CUDA1"])[1]
