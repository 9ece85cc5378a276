"""What a server occupies while it is measured: memory of its processes, and of each GPU memory, load and PCIe traffic."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

PERIOD_S = 0.25
PAGE = os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else 4096


def session_pids(leader: int, proc: Path = Path("/proc")) -> list[int]:
    """The processes of a session, its leader included; [] where /proc does not tell."""
    found = []
    for folder in proc.glob("[0-9]*"):
        try:
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[3]) == leader:
            found.append(int(folder.name))
    return found


def rss_mib(pids: list[int], proc: Path = Path("/proc")) -> float | None:
    """Resident memory of processes, mapped files included; None when nothing could be read."""
    total = 0
    for pid in pids:
        with contextlib.suppress(OSError, IndexError, ValueError):
            total += int((proc / str(pid) / "statm").read_text().split()[1])
    return round(total * PAGE / 2**20, 1) if total else None


@dataclass(slots=True)
class Seen:
    """Samples of one phase, for each device."""

    pid: int
    devices: list[dict[str, list[float]]] = field(default_factory=list)
    rss_mib: float | None = None

    def summary(self) -> dict[str, Any]:
        """Means and maxima; devices are left out where there was nothing to ask."""
        return {"host_rss_mib": self.rss_mib, "devices": [_summary(samples) for samples in self.devices]}


def _summary(samples: dict[str, list[float]]) -> dict[str, Any]:
    result: dict[str, Any] = {"n_samples": max((len(v) for v in samples.values()), default=0)}
    for name, values in samples.items():
        if values:
            result[name] = {"mean": round(float(np.mean(values)), 2), "max": round(float(np.max(values)), 2)}
    return result


class Nvml:
    """The GPUs through nvidia-ml-py; without it, or without GPUs, there are none."""

    def __init__(self) -> None:
        self._nvml: Any = None
        self._handles: list[Any] = []
        try:
            import pynvml  # type: ignore[import-not-found,import-untyped,unused-ignore]

            pynvml.nvmlInit()
        except Exception:  # no package, no driver, no permission: all mean that nothing can be asked
            return
        self._nvml = pynvml
        self._handles = [pynvml.nvmlDeviceGetHandleByIndex(i) for i in range(pynvml.nvmlDeviceGetCount())]

    def __len__(self) -> int:
        return len(self._handles)

    def sample(self, index: int, pids: set[int]) -> dict[str, float]:
        """One reading of a device; what it does not support is missing."""
        nvml, handle, found = self._nvml, self._handles[index], {}
        with contextlib.suppress(nvml.NVMLError):
            found["gpu_percent"] = float(nvml.nvmlDeviceGetUtilizationRates(handle).gpu)
        with contextlib.suppress(nvml.NVMLError):
            found["memory_mib"] = nvml.nvmlDeviceGetMemoryInfo(handle).used / 2**20
        with contextlib.suppress(nvml.NVMLError):
            own = [p.usedGpuMemory for p in nvml.nvmlDeviceGetComputeRunningProcesses(handle) if p.pid in pids]
            if own and all(own):
                found["process_memory_mib"] = sum(own) / 2**20
        for name, counter in (("pcie_tx_mb_s", 0), ("pcie_rx_mb_s", 1)):
            with contextlib.suppress(nvml.NVMLError):
                found[name] = nvml.nvmlDeviceGetPcieThroughput(handle, counter) * 1024 / 1e6  # it counts KiB
        return found

    def close(self) -> None:
        """Give the library back."""
        if self._nvml is not None:
            self._nvml.nvmlShutdown()
            self._nvml, self._handles = None, []


class Watch:
    """Samples a server's processes during `with watch.phase() as seen:`. `pid` <= 0: a server that is not ours to look at."""

    def __init__(self, pid: int, nvml: Nvml) -> None:
        self._pid, self._nvml = pid, nvml

    @contextlib.contextmanager
    def phase(self) -> Iterator[Seen]:
        """Samples until the block ends; memory is read once more at its end."""
        seen = Seen(self._pid)
        with _Sampler(seen, self._nvml) if len(self._nvml) else contextlib.nullcontext():
            yield seen
        if self._pid > 0:
            seen.rss_mib = rss_mib(session_pids(self._pid))


class _Sampler:
    """A thread that wakes four times a second."""

    def __init__(self, seen: Seen, nvml: Nvml) -> None:
        self._seen, self._nvml = seen, nvml
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="grid-watch", daemon=True)

    def __enter__(self) -> None:
        self._seen.devices = [{} for _ in range(len(self._nvml))]
        self._pids = set(session_pids(self._seen.pid)) if self._seen.pid > 0 else set()
        self._thread.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stop.wait(PERIOD_S):
            for index, samples in enumerate(self._seen.devices):
                for name, value in self._nvml.sample(index, self._pids).items():
                    samples.setdefault(name, []).append(value)
