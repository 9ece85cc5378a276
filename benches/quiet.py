"""Is the machine idle? Timings taken beside somebody else's build are worth nothing.

$BENCH_WAIT_S: how many seconds to wait for an idle machine before each measurement (default 600).
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

TICKS_PER_S = os.sysconf("SC_CLK_TCK") if hasattr(os, "sysconf") else 100
BUSY_MAX = 0.04  # of all cores


def busy_fraction(seconds: float = 1.0) -> float:
    """Part of all cores' time that somebody used during the next `seconds`; -1.0 where the system does not tell."""
    before = _times()
    time.sleep(seconds)
    after = _times()
    if before is None or after is None or after[1] == before[1]:
        return -1.0
    return 1.0 - (after[0] - before[0]) / (after[1] - before[1])


def wait_until_quiet(timeout_s: float = float(os.environ.get("BENCH_WAIT_S", "600")), say: bool = True) -> float:
    """Wait until the machine was idle for a second; the busy fraction then, or at the end of the wait."""
    deadline, told = time.monotonic() + timeout_s, False
    while True:
        busy = busy_fraction()
        if busy <= BUSY_MAX or time.monotonic() > deadline:
            if busy > BUSY_MAX and say:
                print(f"measuring on a machine that is {busy:.0%} busy: expect noise", file=sys.stderr)
            return busy
        if say and not told:
            told = True
            print(f"waiting for the machine to be idle ({busy:.0%} busy now) …", file=sys.stderr)


class Others:
    """CPU time that processes which are not ours took in a `with` block, as a part of all cores' time."""

    def __init__(self, own_s: Callable[[], float]) -> None:
        self._own_s = own_s  # CPU seconds of everything that belongs to the measurement, this process left out
        self.busy = 0.0

    def __enter__(self) -> Others:
        self._before = self._now()
        return self

    def __exit__(self, *error: object) -> None:
        ticks, own = (after - before for after, before in zip(self._now(), self._before, strict=True))
        elapsed = max(1e-9, time.perf_counter() - self._started) * (os.cpu_count() or 1)
        self.busy = max(0.0, (ticks - own) / elapsed)

    def _now(self) -> tuple[float, float]:
        self._started = getattr(self, "_started", time.perf_counter())
        times = _times()
        busy_s = (times[1] - times[0]) / TICKS_PER_S if times else 0.0
        return busy_s, self._own_s() + time.process_time()


def cpu_s(pid: int) -> float:
    """CPU seconds that a process and its threads have used; -1.0 when it is gone."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return -1.0
    return (int(fields[11]) + int(fields[12])) / TICKS_PER_S


def _times() -> tuple[int, int] | None:
    """(idle, total) ticks over all cores."""
    try:
        first = Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]
    except OSError:
        return None
    ticks = [int(n) for n in first[:8]]
    return ticks[3] + ticks[4], sum(ticks)
