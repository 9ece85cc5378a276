"""How long the server's interpreter lock is held while a 250 000-token prompt arrives: `python -m benches.lock_hold`.

The server runs with one more thread, a probe that asks for the interpreter lock every quarter of a millisecond and notes
how long it had to wait: what the engine thread would have waited at that moment. Where the system allows it the probe has
real-time priority, so that waiting for a processor core is not counted as waiting for the lock.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np

from . import launch
from .big_prompt import FLAGS, Neighbour, big_request, bodies, micro_model
from .quiet import wait_until_quiet
from .sides import ours

LIMIT_MS = 1.0
TICK_S = 0.00025
PROBE = "LLAMAMG_BENCH_PROBE"  # in the server's environment: the file the probe writes


def probe(path: Path) -> None:
    """Run in the server: note (time, wait) pairs until the process ends; written every 50 ms, a block at a time."""
    try:
        os.sched_setscheduler(threading.get_native_id(), os.SCHED_FIFO, os.sched_param(1))
    except (AttributeError, OSError):
        print("lock_hold: no real-time priority, waits for a core are counted too", file=sys.stderr)
    clock, sleep = time.perf_counter, time.sleep
    with path.open("wb", buffering=0) as out:
        while True:
            block = np.empty((200, 2))
            for row in block:
                begin = clock()
                sleep(TICK_S)  # gives the lock away and asks for it again
                end = clock()
                row[0], row[1] = end, end - begin - TICK_S
            out.write(block.tobytes())


def serve() -> int:
    """The server's entry point with the probe beside it."""
    from llamamg.cli import main

    threading.Thread(target=probe, args=(Path(os.environ[PROBE]),), daemon=True).start()
    return main(sys.argv[1:])


def waits_ms(data: np.ndarray, begin: float, end: float) -> np.ndarray:
    """The probe's waits inside a window."""
    inside = data[(data[:, 0] >= begin) & (data[:, 0] <= end)]
    return 1e3 * np.maximum(inside[:, 1], 0.0)


def run(model: Path, n_repeats: int) -> dict[str, Any]:
    """Arrivals of both kinds; the largest wait of each, and of an equally long window before it."""
    busy = wait_until_quiet()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "waits"
        os.environ[PROBE] = str(file)
        try:
            with ours(model, FLAGS, module="benches.lock_hold") as server, Neighbour(server.url):
                windows = []
                big_request(server.url, bodies(server, 0)["ids"])
                for i in range(n_repeats):
                    for kind, body in bodies(server, i + 1).items():
                        time.sleep(1.5)
                        windows.append((kind, *big_request(server.url, body)[:2]))
                time.sleep(0.5)
        finally:
            del os.environ[PROBE]
        raw = np.frombuffer(file.read_bytes())
    data = raw[: len(raw) // 2 * 2].reshape(-1, 2)
    runs = [
        {
            "kind": kind,
            "window_s": end - begin,
            "n_samples": len(waits_ms(data, begin, end)),
            "largest_ms": float(waits_ms(data, begin, end).max()),
            "before_ms": float(waits_ms(data, begin - (end - begin), begin).max()),
        }
        for kind, begin, end in windows
    ]
    largest = float(np.median([r["largest_ms"] for r in runs]))
    return {
        "bench": "lock-hold",
        "busy_before": busy,
        "limit_ms": LIMIT_MS,
        "passed": largest <= LIMIT_MS,
        "runs": runs,
    }


def table(result: dict[str, Any]) -> str:
    """The result for people."""
    lines = [
        f"{'arrives':<8} {'n':>3} {'before: median':>15} {'during: median':>15} {'max':>7}  ms waited for the lock"
    ]
    for kind in dict.fromkeys(r["kind"] for r in result["runs"]):
        of_kind = [r for r in result["runs"] if r["kind"] == kind]
        before, during = ([r[key] for r in of_kind] for key in ("before_ms", "largest_ms"))
        lines.append(
            f"{kind:<8} {len(of_kind):>3} {np.median(before):15.2f} {np.median(during):15.2f} {max(during):7.2f}"
        )
    return "\n".join(lines)


def main() -> int:
    """Run alone."""
    if PROBE in os.environ:
        return serve()
    parser = argparse.ArgumentParser(prog="python -m benches.lock_hold", description=__doc__.split("\n")[0])
    parser.add_argument("--model", type=Path, help="model file (default: the synthetic micro model)")
    parser.add_argument("--repeats", type=int, default=7, help="arrivals of each kind (default 7)")
    parser.add_argument("--json", type=Path, help="also write the result to this file")
    args = parser.parse_args()
    result = run(args.model or micro_model(), args.repeats)
    return launch.close(result, table(result), args.json)


if __name__ == "__main__":
    launch.run(main)
