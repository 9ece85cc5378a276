"""Times of the QSA kernels: CUDA graphs of many layers, each with its own data: L2 is as cold as in a model."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import cupy as cp
import formats as fm
import numpy as np


def graph_us(calls: list[Callable[[], None]], repeats: int = 15) -> float:
    """Median time of one call, from replays of a graph of all calls."""
    s = cp.cuda.Stream(non_blocking=True)
    with s:
        for c in calls:
            c()
        s.synchronize()
        s.begin_capture()
        for c in calls:
            c()
        graph = s.end_capture()
        for _ in range(3):
            graph.launch(s)
        s.synchronize()
        times = []
        for _ in range(repeats):
            a, b = cp.cuda.Event(), cp.cuda.Event()
            a.record(s)
            graph.launch(s)
            b.record(s)
            b.synchronize()
            times.append(cp.cuda.get_elapsed_time(a, b) * 1000 / len(calls))
    return float(np.median(times))


def copy_gbs() -> float:
    a = cp.random.random(1 << 28, dtype=cp.float32)
    b = cp.empty_like(a)
    us = graph_us(
        [lambda: cp.cuda.runtime.memcpyAsync(b.data.ptr, a.data.ptr, a.nbytes, 3, cp.cuda.get_current_stream().ptr)] * 4
    )
    kernel = cp.ElementwiseKernel("float32 x", "float32 y", "y = x", "copy")
    us = min(us, graph_us([lambda: kernel(a, b)] * 4))
    start, stop = cp.cuda.Event(), cp.cuda.Event()
    for _ in range(3):
        start.record()
        for _ in range(8):
            cp.copyto(b, a)
        stop.record()
        stop.synchronize()
        us = min(us, cp.cuda.get_elapsed_time(start, stop) * 1000 / 8)
    return 2 * a.nbytes / us / 1000


def attn_calls(check: Any, x: Any, count: int, t: int, shared: float) -> list[Callable[[], None]]:
    """Calls over one cache, each with lists of its own: together they touch more than L2 holds."""
    calls = []
    for _ in range(count):
        y = check.Attn.__new__(check.Attn)
        y.__dict__.update(x.__dict__)
        y.tokens(np.arange(x.kv_size - 1 - t, x.kv_size - 1), shared)
        calls.append(y.run)
    return calls


def pool_once(check: Any, raw: Any, kind: int, pooled: Any, gamma: Any, ranges: Any, n: int) -> None:
    check.must(
        check.LIB.qsa_pool(
            raw.data.ptr,
            raw.shape[1],
            kind,
            pooled.data.ptr,
            gamma.data.ptr,
            ranges.data.ptr,
            1,
            128,
            2,
            n,
            64,
            1e-6,
            1e7,
            check.stream(),
        )
    )


def run(check: Any, results: dict[str, Any]) -> None:
    bw = copy_gbs()
    results["copy_gbs"] = bw
    results["device"] = cp.cuda.runtime.getDeviceProperties(0)["name"].decode()
    print(f"copy {bw:.0f} GB/s", flush=True)

    def report(name: str, us: float, n_bytes: float, flops: float = 0.0, peak: float = 0.0) -> None:
        floor = max(n_bytes / bw / 1000, flops / peak / 1e6 if peak else 0.0)
        results["times"].append(
            {"name": name, "us": us, "gb": n_bytes / 1e9, "floor_us": floor, "of_floor": floor / us}
        )
        print(f"{name:44s} {us:9.2f} us  floor {floor:8.2f} us  {100 * floor / us:5.1f} %", flush=True)

    n = 262144
    for kind in (fm.Q8_0, fm.Q4_0):
        x = check.Attn(256, 24, 2, kind, kind, n, 1, 4, 512)
        cell = 2 * fm.row_bytes(kind, 512)

        for t, count, shared in ((1, 64, 0.0), (5, 16, 0.0), (512, 4, 0.0), (512, 4, 0.9)):
            calls = attn_calls(check, x, count, t, shared)
            flops = t * 2051 * 256 * 24 * 4 * 16 / 12
            name = f"attn {fm.NAMES[kind]} T={t} 262k" + (" lists 90% shared" if shared else "")
            report(name, graph_us(calls), t * 2051.0 * cell, flops, 700e12)
        del x
        cp.get_default_memory_pool().free_all_blocks()

    layers = [check.Select(128, 4, n, 1, 512) for _ in range(12)]
    for depth in (5000, 65536, n - 1):
        for t, rows in ((1, 64), (9, 64), (512, 64), (512, 128)):
            if t == 9 and depth != n - 1:
                continue
            check.ROWS = rows
            for x in layers:
                x.tokens(np.arange(max(0, depth - t), max(0, depth - t) + t))
            use = layers if t <= 16 else layers[:2]
            nb = depth / 4
            n_bytes = nb * 512 + t * nb * 8
            flops = t * nb * 128 * 4 * 2
            for what, part in ((3, "select"), (1, "  score (first chunk)"), (2, "  pick (first chunk)")):
                share = 1.0 if what == 3 else min(t, rows) / t
                us = graph_us([partial(x.run, what) for x in use])
                report(
                    f"{part} T={t} depth {depth}" + (f" R={rows}" if t > 64 else ""),
                    us,
                    (n_bytes if what != 2 else t * nb * 4) * share,
                    flops * share if what != 2 else 0.0,
                    67e12,
                )
    check.ROWS = 128
    for kind, lo in ((fm.F16, n // 4 - 1), (fm.F16, n // 4 - 128), (fm.F16, 0), (fm.Q8_0, 0)):
        raw = fm.random_rows(cp, kind, n, 128, check.RNG)
        gamma = cp.ones(128, dtype=cp.float32)
        pooled = layers[0].pooled
        ranges = cp.asarray(np.array([[0, lo, n // 4, 0]], dtype=np.int32))

        call = partial(pool_once, check, raw, kind, pooled, gamma, ranges, n)
        count = n // 4 - lo
        report(f"pool {fm.NAMES[kind]} {count} blocks", graph_us([call] * 8), count * (4.0 * raw.shape[1] + 512))
