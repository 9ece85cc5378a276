"""Memory and devices, sampled while a phase of the grid runs."""

from __future__ import annotations

import sys
import time
import types
from pathlib import Path
from typing import Any

import pytest
from llamamg_benches import grid_watch
from llamamg_benches.grid_watch import PAGE, Nvml, Watch, rss_mib, session_pids


def test_memory_of_a_process_and_what_it_started(tmp_path: Path) -> None:
    for pid, session, pages in ((10, 10, 300), (11, 10, 200), (12, 9, 700)):
        folder = tmp_path / str(pid)
        folder.mkdir()
        (folder / "stat").write_text(f"{pid} (a) b) S 1 {session} {session} 0")
        (folder / "statm").write_text(f"9999 {pages} 1")
    pids = session_pids(10, tmp_path)
    assert sorted(pids) == [10, 11]
    assert rss_mib(pids, tmp_path) == round(500 * PAGE / 2**20, 1)
    assert rss_mib([77], tmp_path) is None


class FakeNvml(types.ModuleType):
    """One GPU that does not count PCIe traffic; process 10 has memory on it and 99 is somebody else's."""

    class NVMLError(Exception):
        """As in the real one."""

    def nvmlInit(self) -> None: ...
    def nvmlShutdown(self) -> None: ...

    def nvmlDeviceGetCount(self) -> int:
        return 1

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        return index

    def nvmlDeviceGetUtilizationRates(self, handle: int) -> Any:
        return types.SimpleNamespace(gpu=80)

    def nvmlDeviceGetMemoryInfo(self, handle: int) -> Any:
        return types.SimpleNamespace(used=3000 << 20)

    def nvmlDeviceGetComputeRunningProcesses(self, handle: int) -> Any:
        return [types.SimpleNamespace(pid=pid, usedGpuMemory=mib << 20) for pid, mib in ((10, 2000), (99, 500))]

    counts_pcie = False

    def nvmlDeviceGetPcieThroughput(self, handle: int, counter: int) -> int:
        if not self.counts_pcie:
            raise self.NVMLError
        return 1_000_000 if counter else 2_000_000  # KiB/s; 1 is NVML_PCIE_UTIL_RX_BYTES


def test_gpus_are_sampled_while_a_phase_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml("pynvml"))
    monkeypatch.setattr(grid_watch, "session_pids", lambda pid: [10])
    monkeypatch.setattr(grid_watch, "PERIOD_S", 0.01)
    with Watch(10, Nvml()).phase() as seen:
        deadline = time.monotonic() + 10
        while len(seen.devices[0].get("gpu_percent", [])) < 2 and time.monotonic() < deadline:
            time.sleep(0.01)
    [device] = seen.summary()["devices"]
    assert device["gpu_percent"] == {"mean": 80.0, "max": 80.0}
    assert device["memory_mib"]["max"] == 3000.0
    assert device["process_memory_mib"]["max"] == 2000.0
    assert "pcie_rx_mb_s" not in device


def test_pcie_traffic_is_read_in_both_directions(monkeypatch: pytest.MonkeyPatch) -> None:
    module = FakeNvml("pynvml")
    module.counts_pcie = True
    monkeypatch.setitem(sys.modules, "pynvml", module)
    found = Nvml().sample(0, {10})
    assert (found["pcie_rx_mb_s"], found["pcie_tx_mb_s"]) == (1024.0, 2048.0)


def test_without_the_package_nothing_is_sampled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    with Watch(-1, Nvml()).phase() as seen:
        pass
    assert seen.summary() == {"host_rss_mib": None, "devices": []}
