"""Who used the cores: the measurement or somebody else."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import pytest

from benches.quiet import Others, busy_fraction, cpu_s

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
SPIN = "import time\nend = time.time() + 30\nwhile time.time() < end: pass"


def test_cpu_time_of_a_process_is_read_and_a_gone_one_is_told() -> None:
    child = subprocess.Popen([sys.executable, "-c", SPIN])
    try:
        deadline = time.monotonic() + 20
        while cpu_s(child.pid) < 0.2 and time.monotonic() < deadline:
            time.sleep(0.05)
        assert cpu_s(child.pid) >= 0.2
        with Others(lambda: 0.0) as foreign:
            time.sleep(1.0)
        with Others(lambda: cpu_s(child.pid)) as own:
            before = cpu_s(child.pid)
            time.sleep(1.0)
            used = cpu_s(child.pid) - before
        assert foreign.busy > 0
        assert own.busy <= 1.02 - 0.9 * used / (os.cpu_count() or 1)
    finally:
        child.kill()
        child.wait()
    assert cpu_s(child.pid) == -1.0


def test_the_busy_fraction_is_a_fraction() -> None:
    assert 0.0 <= busy_fraction(0.2) <= 1.0
