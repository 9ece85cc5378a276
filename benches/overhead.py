"""Python overhead per decode step, with a live consumer: `python -m benches.overhead`.

The engine's real loop thread runs; decode and sampling are faked at the native boundary (benches/fake_decode.py). Its
events go through the real hand-off to an event loop thread that renders them as server-sent events, into the ASGI app
(`asgi`) or through uvicorn's sockets to a client process (`http`). Overhead of a step is the time from the begin of one
decode to the begin of the next, less the time the decode was told to take: waking up, waiting for the interpreter lock
and everything the engine thread does are in it.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from llamamg.config import Config, ModelConfig, PluginsConfig
from llamamg.server.app import App, build_app
from llamamg.server.prepare import PrepareContext

from . import client, launch, record
from .fake_decode import TimedDecode, precise_sleep, timed_engine
from .quiet import wait_until_quiet

LIMIT_US = 150.0
N_SLOTS = 8
N_WARM = 50
PLUGINS = {"off": PluginsConfig(none=True), "auto": PluginsConfig()}


class Consumer:
    """An event loop on its own thread with the real app in it."""

    def __init__(self, engine: Any) -> None:
        self.engine = engine
        self.app: App = build_app(Config(ModelConfig(Path("fake.gguf"))))
        self.loop: asyncio.AbstractEventLoop = _new_loop()
        self.n_bytes = 0
        self._thread = threading.Thread(target=self._run, name="loop", daemon=True)

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        self.loop.run_forever()

    def start(self) -> None:
        """Start the thread, attach the engine, start it too."""
        self._thread.start()

        async def attach() -> None:
            config = self.app.config
            none: Any = None  # no chat template: /completion only
            context = PrepareContext(
                self.engine.vocab, none, config.generation, self.engine.n_ctx_slot, self.engine.n_slots, 30.0
            )
            self.app.service.attach(self.engine, {}, context=context)

        self.call(attach())
        self.engine.start()

    def call(self, coroutine: Any) -> Any:
        """Run a coroutine on the loop and wait for it."""
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result()

    def cpu_s(self) -> float:
        """CPU seconds of the event loop thread."""

        async def now() -> float:
            return time.thread_time()

        return float(self.call(now()))

    def stop(self) -> None:
        """End engine, app and loop."""
        self.engine.stop(0.0)
        self.loop.call_soon_threadsafe(self.app.service.close)
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(5.0)
        self.loop.close()

    async def post(self, body: dict[str, Any]) -> None:
        """One request straight into the ASGI app; its answer is counted and dropped."""
        data = json.dumps(body).encode()
        scope = {
            "type": "http", "method": "POST", "path": "/completion", "raw_path": b"/completion", "query_string": b"",
            "headers": [(b"content-type", b"application/json")], "root_path": "", "scheme": "http",
            "http_version": "1.1", "asgi": {"version": "3.0"}, "client": None, "server": None,
        }  # fmt: skip
        messages = [{"type": "http.request", "body": data, "more_body": False}]

        async def receive() -> dict[str, Any]:
            if messages:
                return messages.pop()
            await asyncio.Event().wait()
            raise AssertionError

        async def send(message: Any) -> None:
            self.n_bytes += len(message.get("body", b""))

        await self.app(scope, receive, send)


def _new_loop() -> asyncio.AbstractEventLoop:
    with contextlib.suppress(ImportError):
        import uvloop

        loop: asyncio.AbstractEventLoop = uvloop.new_event_loop()
        return loop
    return asyncio.new_event_loop()


def body_of(slot: int, n_predict: int) -> dict[str, Any]:
    """A streaming request."""
    return {"prompt": [65 + slot] * 8, "n_predict": n_predict, "temperature": 0, "stream": True}


@contextlib.contextmanager
def streams(consumer: Consumer, kind: str, n_predict: int) -> Iterator[Callable[[], bool]]:
    """N_SLOTS requests in flight through `kind`; leaving waits for their end. Gives a function: have they ended?"""
    bodies = [body_of(i, n_predict) for i in range(N_SLOTS)]
    if kind == "asgi":
        running = [asyncio.run_coroutine_threadsafe(consumer.post(body), consumer.loop) for body in bodies]
        yield lambda: any(future.done() for future in running)
        for future in running:
            future.result()
        return
    with _uvicorn(consumer) as url:
        child = subprocess.Popen(
            [sys.executable, "-m", f"{__package__}.overhead", "--be-client", url, json.dumps(bodies)],
            cwd=Path(__file__).resolve().parent.parent,
        )
        try:
            yield lambda: child.poll() is not None
            if child.wait(60) != 0:
                raise client.ServerError("the client process failed; its message is above")
        finally:
            if child.poll() is None:
                child.kill()


@contextlib.contextmanager
def _uvicorn(consumer: Consumer) -> Iterator[str]:
    """The app behind the sockets it is served with."""
    import uvicorn

    port = record.free_port()
    config = uvicorn.Config(
        consumer.app, port=port, http="httptools", ws="none", lifespan="off", log_config=None, access_log=False,
        log_level="critical", server_header=False, date_header=False,
    )  # fmt: skip
    server = uvicorn.Server(config)
    server.capture_signals = contextlib.nullcontext  # type: ignore[method-assign,assignment]  # not the main thread
    serving = asyncio.run_coroutine_threadsafe(server.serve(), consumer.loop)
    while not server.started:
        time.sleep(0.01)
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        serving.result(10)


def be_client(url: str, bodies: list[dict[str, Any]]) -> None:
    """What the client process does."""
    posts = [client.Post(url, "/completion", body) for body in bodies]
    for answer in client.run_loop(lambda: client.together(posts)):
        assert answer.final["tokens_predicted"] == bodies[0]["n_predict"], answer.final


def measure(kind: str, plugins: str, decode_s: float, n_steps: int) -> dict[str, Any]:
    """One run; microseconds per step."""
    n_predict = n_steps + 2 * N_WARM
    decode = TimedDecode(decode_s, n_predict + 4 * N_SLOTS)
    engine = timed_engine(decode, N_SLOTS, 16 * ((n_predict + 64) // 16 + 1), PLUGINS[plugins])
    consumer = Consumer(engine)
    consumer.start()
    try:
        loop_cpu = [0.0, 0.0]
        title = f"{kind}, plugins {plugins}"
        with streams(consumer, kind, n_predict) as ended, tqdm(total=n_steps, desc=title, leave=False) as bar:
            while decode.n < N_WARM and not ended():
                time.sleep(0.05)
            first, loop_cpu[0] = decode.n, consumer.cpu_s()
            while decode.n < n_steps and not ended():
                time.sleep(0.2)
                bar.update(min(decode.n, n_steps) - bar.n)
            last, loop_cpu[1] = decode.n, consumer.cpu_s()
    finally:
        consumer.stop()
    if engine.error is not None:
        raise RuntimeError(f"the engine stopped: {engine.error!r}")
    # Only steps in which all slots decoded, one token each.
    full = decode.n_tokens[: decode.n] == N_SLOTS
    starts, cpu = decode.starts[: decode.n], decode.cpu[: decode.n]
    both = full[:-1] & full[1:]
    both[:N_WARM] = False
    over = 1e6 * (np.diff(starts)[both] - decode_s)
    engine_cpu = 1e6 * np.diff(cpu)[both]
    return {
        "consumer": kind,
        "plugins": plugins,
        "decode_ms": 1e3 * decode_s,
        "n_slots": N_SLOTS,
        "n_steps": int(both.sum()),
        "overhead_us": {
            "p10": float(np.percentile(over, 10)),
            "median": float(np.median(over)),
            "mean": float(over.mean()),
            "p90": float(np.percentile(over, 90)),
            "p99": float(np.percentile(over, 99)),
            "max": float(over.max()),
        },
        "engine_cpu_us": float(engine_cpu.mean()),
        "loop_cpu_us": 1e6 * (loop_cpu[1] - loop_cpu[0]) / max(1, last - first),
        "bytes": consumer.n_bytes,
    }


def floor_us(decode_s: float, n: int = 400) -> dict[str, float]:
    """What a bare loop of such decodes costs on this machine: the part of the overhead that is waking up."""
    out: list[float] = []

    def loop() -> None:
        precise_sleep()
        previous = time.perf_counter()
        for _ in range(n):
            left = decode_s - (time.perf_counter() - previous)
            time.sleep(max(0.0, left))
            now = time.perf_counter()
            out.append(1e6 * (now - previous - decode_s))
            previous = now

    thread = threading.Thread(target=loop)
    thread.start()
    thread.join()
    return {"median": float(np.median(out)), "p99": float(np.percentile(out, 99))}


def run(decode_s: float = 0.005, n_steps: int = 1500, only: str = "") -> dict[str, Any]:
    """All rows. The engine's process settings are the server's."""
    from llamamg.server.run import SWITCH_INTERVAL_S

    sys.setswitchinterval(SWITCH_INTERVAL_S)
    busy = wait_until_quiet()
    rows = []
    for kind in ("asgi", "http"):
        for plugins in PLUGINS:
            if not only or only in (kind, f"{kind}-{plugins}"):
                rows.append(measure(kind, plugins, decode_s, n_steps))
    worst = max(row["overhead_us"]["median"] for row in rows)
    return {
        "bench": "overhead",
        "busy_before": busy,
        "switch_interval_s": SWITCH_INTERVAL_S,
        "floor_us": floor_us(decode_s),
        "limit_us": LIMIT_US,
        "worst_median_us": worst,
        "passed": worst <= LIMIT_US,
        "rows": rows,
    }


def table(result: dict[str, Any]) -> str:
    """The result for people."""
    lines = [
        f"Python overhead per decode step, {N_SLOTS} busy slots, decode of {result['rows'][0]['decode_ms']:g} ms "
        f"(bar: median at most {LIMIT_US:g} µs; a bare loop costs {result['floor_us']['median']:.0f})",
        f"{'consumer':<9} {'plugins':<8} {'p10':>7} {'median':>7} {'p99':>7} {'max':>7}   {'CPU engine':>10} {'CPU loop':>9}  µs",
    ]
    for row in result["rows"]:
        o = row["overhead_us"]
        lines.append(
            f"{row['consumer']:<9} {row['plugins']:<8} {o['p10']:7.1f} {o['median']:7.1f} {o['p99']:7.1f} {o['max']:7.1f}   "
            f"{row['engine_cpu_us']:10.1f} {row['loop_cpu_us']:9.1f}"
        )
    return "\n".join([*lines, "passed" if result["passed"] else "MISSED"])


def main() -> int:
    """Run alone."""
    parser = argparse.ArgumentParser(prog="python -m benches.overhead", description=__doc__.split("\n")[0])
    parser.add_argument("--decode-ms", type=float, default=5.0, help="time each fake decode takes (default 5)")
    parser.add_argument("--steps", type=int, default=1500, help="steps per row (default 1500)")
    parser.add_argument("--only", default="", help="one consumer: asgi or http, or one row, e.g. asgi-off")
    parser.add_argument("--json", type=Path, help="also write the result to this file")
    parser.add_argument("--be-client", nargs=2, metavar=("URL", "BODIES"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.be_client:
        be_client(args.be_client[0], json.loads(args.be_client[1]))
        return 0
    result = run(args.decode_ms / 1e3, args.steps, args.only)
    return launch.close(result, table(result), args.json)


if __name__ == "__main__":
    launch.run(main)
