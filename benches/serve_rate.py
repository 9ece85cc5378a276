"""Generation rate through HTTP against llama-server and against the bare library: `python -m benches.serve_rate`.

The same client measures both servers: greedy, the end of text ignored, prompts never reused. The rate is counted on the
client's clock while all streams decode. A-B-B-A pairs; both sides stay loaded, and the CPU time of the idle one is recorded.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from . import client, launch, pairs
from .quiet import Others, wait_until_quiet
from .sides import BareLibrary, Server, SideError, llama_server, ours

BARS = {"llama-server": 0.98, "bare library": 0.97}
THREADS = {"llama-server": 2, "bare library": 1}
PLUGINS: dict[str, tuple[str, ...]] = {"off": ("--enable", "none"), "auto": ()}
N_CTX, N_SLOTS, N_BATCH, N_UBATCH = 8192, 4, 2048, 512
N_PREDICT = {1: 256, 4: 160}
SUBJECTS = ("a lighthouse", "the tea trade", "a small robot", "the northern sea", "an old clock", "bread", "a violin")
_run = itertools.count()


def flags(n_threads: int) -> list[str]:
    """The command line of both servers."""
    return [
        "-t", str(n_threads), "-c", str(N_CTX), "-np", str(N_SLOTS), "-b", str(N_BATCH), "-ub", str(N_UBATCH),
        "-ctk", "f16", "-ctv", "f16",
    ]  # fmt: skip


def bare_flags(n_threads: int) -> dict[str, Any]:
    """The same for the bare library."""
    return {
        "n_threads": n_threads, "n_threads_batch": n_threads, "n_ctx": N_CTX, "n_parallel": N_SLOTS,
        "n_batch": N_BATCH, "n_ubatch": N_UBATCH,
    }  # fmt: skip


def prompts(n_streams: int) -> list[str]:
    """Short prompts that no run had before."""
    run = next(_run)
    return [
        f"{run + 1}.{i + 1} Write a long story about {SUBJECTS[(run + i) % len(SUBJECTS)]}." for i in range(n_streams)
    ]


def rate(stamps: Sequence[Any]) -> float:
    """Tokens per second over all streams while all of them decode; `stamps` has one array of arrival times per stream."""
    begin, end = max(s[0] for s in stamps), min(s[-1] for s in stamps)
    if end <= begin:
        raise SideError("the streams did not overlap: nothing to measure")
    n = sum(int(((s > begin) & (s <= end)).sum()) for s in map(np.asarray, stamps))
    return float(n / (end - begin))


def server_rate(server: Server, texts: Sequence[str], n_predict: int) -> float:
    """One measurement through HTTP."""
    posts = [
        client.Post(
            server.url,
            "/completion",
            {
                "prompt": text, "n_predict": n_predict, "temperature": 0, "ignore_eos": True, "stream": True,
                "cache_prompt": False,
            },
        )
        for text in texts
    ]  # fmt: skip
    answers = client.run_loop(lambda: client.together(posts))
    for answer in answers:
        if answer.final.get("tokens_predicted") != n_predict or len(answer.stamps) < n_predict // 2:
            raise SideError(f"{server.name} generated {answer.final.get('tokens_predicted')} of {n_predict} tokens")
    return rate([answer.stamps for answer in answers])


def bare_rate(bare: BareLibrary, texts: Sequence[str], n_predict: int) -> float:
    """One measurement of the loop: the same count on its own clock."""
    answer = bare.generate(texts, n_predict)
    return rate([answer["stamps"]] * len(texts))


def same_text(a: Server, b: Server) -> bool:
    """Whether both servers answer one greedy request alike."""
    body = {"prompt": "Once upon a time", "n_predict": 48, "temperature": 0, "cache_prompt": False}
    return bool(a.post("/completion", body)["content"] == b.post("/completion", body)["content"])


class Idle:
    """CPU time of the side that should do nothing while the other one is measured."""

    def __init__(self) -> None:
        self.worst = 0.0

    @contextlib.contextmanager
    def watch(self, cpu_s: Callable[[], float]) -> Iterator[None]:
        """The largest busy fraction of one core over all `with` blocks."""
        before, started = cpu_s(), time.perf_counter()
        yield
        used = cpu_s() - before
        self.worst = max(self.worst, used / (time.perf_counter() - started))


def compare(
    us: Server, other: Server | BareLibrary, n_streams: int, n_pairs: int, bar: Any
) -> tuple[pairs.Pairs, float]:
    """Pairs of rates, and how busy the idle side was."""
    n_predict, idle = N_PREDICT[n_streams], Idle()
    texts: list[str] = []

    def side(which: Server | BareLibrary, rest: Server | BareLibrary) -> Callable[[], float]:
        def once() -> float:
            time.sleep(0.3)  # let the threads of the other side come to rest
            with idle.watch(rest.cpu_s):
                if isinstance(which, Server):
                    return server_rate(which, texts, n_predict)
                return bare_rate(which, texts, n_predict)

        return once

    measure_a, measure_b = side(us, other), side(other, us)
    texts[:] = prompts(n_streams)
    measure_a()  # once each unmeasured: pages, caches, first requests
    measure_b()
    n_done = 0

    def done(which: str, value: float) -> None:
        nonlocal n_done
        n_done += 1
        if n_done % 2 == 0:
            texts[:] = prompts(n_streams)  # both sides of a pair had the same ones
        bar.update()
        bar.set_postfix_str(f"{value:.1f} t/s")

    return pairs.measure(n_pairs, measure_a, measure_b, done), idle.worst


def run(
    model: Path,
    *,
    binary: Path | None = None,
    build: Path | None = None,
    n_pairs: int = 5,
    against: Sequence[str] = tuple(BARS),
    plugins: Sequence[str] = tuple(PLUGINS),
    n_streams: Sequence[int] = tuple(N_PREDICT),
) -> dict[str, Any]:
    """All rows. `binary` is another llama-server, `build` another library for the bare side."""
    rows: list[dict[str, Any]] = []
    total = len(against) * len(plugins) * len(n_streams) * n_pairs * 2
    with tqdm(total=total, desc="rates", unit="run") as bar:
        for opponent in against:
            n_threads = THREADS[opponent]
            other: Server | BareLibrary = (
                llama_server(model, flags(n_threads), binary)
                if opponent == "llama-server"
                else BareLibrary(model, bare_flags(n_threads), build)
            )
            with other:
                for chosen in plugins:
                    with ours(model, flags(n_threads), PLUGINS[chosen]) as us:
                        equal = same_text(us, other) if isinstance(other, Server) else None
                        for n in n_streams:
                            bar.set_description(f"{opponent}, plugins {chosen}, {n} stream{'s' * (n > 1)}")
                            rows.append(_row(us, other, opponent, chosen, n, n_pairs, equal, bar))
    return {
        "bench": "serve-rate",
        "flags": {name: flags(THREADS[name]) for name in against},
        "passed": all(row["passed"] for row in rows),
        "rows": rows,
    }


def _row(
    us: Server,
    other: Server | BareLibrary,
    opponent: str,
    chosen: str,
    n: int,
    n_pairs: int,
    equal: bool | None,
    bar: Any,
) -> dict[str, Any]:
    busy = wait_until_quiet()
    with Others(lambda: us.cpu_s() + other.cpu_s()) as others:
        values, idle = compare(us, other, n, n_pairs, bar)
    comparison = values.compare()
    return {
        "against": opponent,
        "n_threads": THREADS[opponent],
        "plugins": chosen,
        "n_streams": n,
        "n_predict": N_PREDICT[n],
        "busy_before": busy,
        "busy_others": others.busy,
        "idle_side_busy": idle,
        "same_text": equal,
        "ours_tps": values.a,
        "other_tps": values.b,
        "bar": BARS[opponent],
        **comparison.json(),
        "passed": comparison.median >= BARS[opponent],
    }


def table(result: dict[str, Any]) -> str:
    """The result for people."""
    lines = [
        "Generation rate through HTTP, median of pairs (A-B-B-A), ours / other",
        f"{'against':<13} {'-t':>2} {'plugins':<8} {'streams':>7} {'ours t/s':>9} {'other t/s':>9} {'ratio':>7} "
        f"{'99 % interval':>17} {'others':>7} {'bar':>5}",
    ]
    for row in result["rows"]:
        low, high = row["interval"]
        lines.append(
            f"{row['against']:<13} {row['n_threads']:>2} {row['plugins']:<8} {row['n_streams']:>7} "
            f"{np.median(row['ours_tps']):9.1f} {np.median(row['other_tps']):9.1f} {row['median']:7.3f} "
            f"{low:7.3f} .. {high:6.3f} {row['busy_others']:7.0%} {row['bar']:5.2f}  {'passed' if row['passed'] else 'MISSED'}"
        )
    return "\n".join(lines)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options shared with the gate."""
    parser.add_argument("--model", type=Path, help="model file (default: the demo model)")
    parser.add_argument("--llama-server", type=Path, help="unpatched llama-server (default: the built one)")
    parser.add_argument("--pairs", type=int, default=5, help="pairs per row (default 5)")


def main() -> int:
    """Run alone."""
    parser = argparse.ArgumentParser(prog="python -m benches.serve_rate", description=__doc__.split("\n")[0])
    add_arguments(parser)
    parser.add_argument("--against", choices=tuple(BARS), action="append", help="only this side")
    parser.add_argument("--plugins", choices=tuple(PLUGINS), action="append", help="only this setting")
    parser.add_argument("--streams", type=int, choices=tuple(N_PREDICT), action="append", help="only this many streams")
    parser.add_argument("--json", type=Path, help="also write the result to this file")
    args = parser.parse_args()
    if args.pairs < 2:
        parser.error("--pairs must be at least 2")
    from llamamg import demo

    model = args.model or demo.demo_model()
    result = run(
        model,
        binary=args.llama_server,
        n_pairs=args.pairs,
        against=args.against or tuple(BARS),
        plugins=args.plugins or tuple(PLUGINS),
        n_streams=args.streams or tuple(N_PREDICT),
    )
    return launch.close(result, table(result), args.json)


if __name__ == "__main__":
    launch.run(main)
