"""What a 250 000-token prompt costs a streaming neighbour before its prefill begins: `python -m benches.big_prompt`.

A neighbour decodes; a request of 1 to 2 MB arrives, as text and as a list of token ids. Compared are the largest gap
between the neighbour's tokens from the arrival to the begin of the prefill, and in an equally long window just before.
`nothing` is the control: the same two windows with no request, which shows what the machine does by itself.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import socket
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np
from tqdm import tqdm

from llamamg import paths, synth

from . import client, launch
from .quiet import wait_until_quiet
from .serve_rate import PLUGINS
from .sides import Server, SideError, llama_server, ours

LIMIT_MS = 2.0
N_PROMPT = 250_000
N_CTX_SLOT = 262_144
KINDS = ("text", "ids", "nothing")
WORDS = (  # noqa: SIM905 - each is one token in most vocabularies
    " the of and to in a is that for it as was with be by on not he his but at are this have from or had an they which "
    "one you were all her she there would their we him been has when who will no more if out so up said what its about "
    "than into them can only other time new some could these two may first then do any like my now over such our man me "
    "even most made after also did many off before must well back through years much where your way down should because"
).split()
FLAGS = ["-t", "1", "-tb", "1", "-c", str(2 * N_CTX_SLOT), "-np", "2", "-b", "2048", "-ub", "512", "-cram", "0"]


class Neighbour:
    """A stream that decodes all the time, on a thread of its own. `stamps` only grows."""

    def __init__(self, url: str) -> None:
        self.stamps: list[float] = []
        self.error: BaseException | None = None
        body = {
            "prompt": "Once upon a time",
            "n_predict": N_CTX_SLOT - 100,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
        }
        self._post = client.Post(url, "/completion", body, lambda payload, now: self.stamps.append(now))
        self._loop: asyncio.AbstractEventLoop | None = None
        self._task: asyncio.Task[Any] | None = None
        self._thread = threading.Thread(target=self._run, name="neighbour", daemon=True)

    def __enter__(self) -> Neighbour:
        self._thread.start()
        self.wait(len(self.stamps) + 100)
        return self

    def __exit__(self, *error: object) -> None:
        loop, task = self._loop, self._task
        if loop is not None and task is not None:
            loop.call_soon_threadsafe(task.cancel)
        self._thread.join(5.0)

    def _run(self) -> None:
        async def main() -> None:
            self._loop, self._task = asyncio.get_running_loop(), asyncio.current_task()
            await self._post.run()

        try:
            client.run_loop(main)
            self.error = SideError("the neighbour's stream ended too early")
        except asyncio.CancelledError:
            return
        except BaseException as error:
            self.error = error

    def wait(self, n_stamps: int, timeout_s: float = 120.0) -> None:
        """Until it has received that many tokens. Raises what ended it."""
        deadline = time.monotonic() + timeout_s
        while len(self.stamps) < n_stamps:
            if self.error is not None:
                raise self.error
            if time.monotonic() > deadline:
                raise SideError("the neighbour's stream stands still")
            time.sleep(0.01)

    def largest_gap_ms(self, begin: float, end: float) -> float:
        """Largest wait for a token inside the window: gaps that lie in it, and what of a longer one does."""
        stamps = np.array(self.stamps)
        first = max(0, int(np.searchsorted(stamps, begin)) - 1)
        last = int(np.searchsorted(stamps, end, side="right"))
        inside = np.append(stamps[first:last], end)  # the gap that `end` cuts counts as far as it had come
        inside[0] = max(inside[0], begin) if stamps[first] < begin else inside[0]
        return 1e3 * float(np.diff(inside).max())


def big_request(url: str, body: bytes) -> tuple[float, float, int]:
    """Send it and hang up when its prefill is seen to run: (sent from, prefill began, prompt tokens), perf_counter seconds."""
    parts = urlsplit(url)
    cutter, head = client.EventCutter(), b""
    request = client.encode(url, "/completion", body)
    with socket.create_connection((parts.hostname or "127.0.0.1", parts.port or 80), timeout=300.0) as link:
        t_sent = time.perf_counter()
        link.sendall(request)
        while data := link.recv(1 << 16):
            now = time.perf_counter()
            if b"\r\n\r\n" not in head:
                head += data
                if b" 200 " not in head[:16] and b"\r\n\r\n" in head:
                    raise SideError(f"the long request was refused: {head[:600].decode('utf-8', 'replace')}")
                data = head.partition(b"\r\n\r\n")[2]
            for payload in cutter.feed(data):
                progress = json.loads(payload).get("prompt_progress")
                if progress and progress["processed"] > progress["cache"]:
                    # It was booked when the first part was done; `time_ms` ago that began (whole milliseconds).
                    return t_sent, now - 1e-3 * progress["time_ms"], int(progress["total"])
    raise SideError("the server closed the connection before the prefill began")


def bodies(server: Server, seed: int) -> dict[str, bytes]:
    """The long request in both forms; no two seeds share a beginning."""
    rnd = random.Random(seed)
    rest = {
        "n_predict": 1, "temperature": 0, "stream": True, "return_progress": True, "cache_prompt": False,
    }  # fmt: skip
    words = rnd.choices(WORDS, k=N_PROMPT - 16)
    text = f"{seed}:" + "".join(" " + word for word in words)
    ids = [rnd.randrange(1000, 40_000) for _ in range(N_PROMPT)]
    return {
        "text": json.dumps({"prompt": text, **rest}).encode(),
        "ids": json.dumps({"prompt": ids, **rest}).encode(),
    }


def once(server: Server, neighbour: Neighbour, kind: str, body: bytes, typical_s: float) -> dict[str, Any]:
    """One arrival, or for `nothing` a pause as long as an arrival usually takes."""
    if kind == "nothing":
        begin = time.perf_counter()
        time.sleep(typical_s)
        end, n_tokens = time.perf_counter(), 0
    else:
        begin, end, n_tokens = big_request(server.url, body)
    length = end - begin
    neighbour.wait(len(neighbour.stamps) + 20)
    before = neighbour.largest_gap_ms(begin - length, begin)
    during = neighbour.largest_gap_ms(begin, end)
    return {
        "kind": kind, "n_tokens": n_tokens, "bytes": len(body), "window_s": length,
        "before_ms": before, "during_ms": during, "added_ms": during - before,
    }  # fmt: skip


def measure(server: Server, n_repeats: int, kinds: Sequence[str]) -> list[dict[str, Any]]:
    """All arrivals, the kinds taking turns."""
    runs: list[dict[str, Any]] = []
    typical_s = 1.0
    with Neighbour(server.url) as neighbour, tqdm(total=n_repeats * len(kinds), desc=server.name, unit="run") as bar:
        sent = bodies(server, 0)
        for kind in kinds:
            if kind in sent:  # once unmeasured: the first one starts the parse process, if nothing did before
                begin, end, _ = big_request(server.url, sent[kind])
                typical_s = end - begin
        for i in range(n_repeats):
            sent = bodies(server, i + 1)
            for kind in kinds:
                time.sleep(max(1.0, 2.5 * typical_s))  # the window before, undisturbed by us
                run = once(server, neighbour, kind, sent.get(kind, b""), typical_s)
                if kind != "nothing":
                    typical_s = run["window_s"]
                runs.append(run)
                bar.set_postfix_str(f"{kind} {run['added_ms']:+.2f} ms")
                bar.update()
    return runs


def summary(server: str, plugins: str, runs: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """One row per kind."""
    rows = []
    for kind in dict.fromkeys(run["kind"] for run in runs):
        of_kind = [run for run in runs if run["kind"] == kind]
        added = np.array([run["added_ms"] for run in of_kind])
        rows.append(
            {
                "server": server,
                "plugins": plugins,
                "kind": kind,
                "n": len(of_kind),
                "n_tokens": of_kind[0]["n_tokens"],
                "bytes": of_kind[0]["bytes"],
                "window_s": float(np.median([run["window_s"] for run in of_kind])),
                "before_ms": float(np.median([run["before_ms"] for run in of_kind])),
                "during_ms": float(np.median([run["during_ms"] for run in of_kind])),
                "added_ms": {"median": float(np.median(added)), "max": float(added.max()), "min": float(added.min())},
                "passed": kind == "nothing" or float(np.median(added)) <= LIMIT_MS,
            }
        )
    return rows


def run(
    model: Path | None = None,
    *,
    n_repeats: int = 7,
    plugins: str = "auto",
    kinds: Sequence[str] = KINDS,
    binary: Path | None = None,
    reference: bool = False,
) -> dict[str, Any]:
    """Our server; with `reference` llama-server after it, for comparison only."""
    model = model or micro_model()
    busy = wait_until_quiet()
    with ours(model, FLAGS, PLUGINS[plugins]) as server:
        runs = measure(server, n_repeats, kinds)
    rows = summary("ours", plugins, runs)
    passed = all(row["passed"] for row in rows)
    if reference:
        with llama_server(model, FLAGS, binary) as server:
            others = measure(server, n_repeats, kinds)
        rows += summary("llama-server", "", others)
        runs = runs + [{**run, "server": "llama-server"} for run in others]
    return {
        "bench": "big-prompt",
        "busy_before": busy,
        "flags": FLAGS,
        "limit_ms": LIMIT_MS,
        "model": model.name,
        "passed": passed,
        "rows": rows,
        "runs": runs,
    }


def micro_model() -> Path:
    """The synthetic micro model, written once."""
    path = paths.home() / "models" / "micro-bench.gguf"
    if not path.is_file():
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(".part.gguf")
        synth.write_model(partial, progress=True)
        partial.replace(path)
    return path


def table(result: dict[str, Any]) -> str:
    """The result for people."""
    lines = [
        f"Largest gap of a streaming neighbour while a {N_PROMPT:,}-token prompt arrives (bar: median {LIMIT_MS:g} ms more)",
        f"{'server':<13} {'arrives':<8} {'MB':>5} {'until prefill':>13} {'before':>8} {'during':>8} "
        f"{'added: median':>14} {'min':>7} {'max':>7}  ms",
    ]
    for row in result["rows"]:
        a = row["added_ms"]
        verdict = (
            "" if row["kind"] == "nothing" or row["server"] != "ours" else ("passed" if row["passed"] else "MISSED")
        )
        lines.append(
            f"{row['server']:<13} {row['kind']:<8} {row['bytes'] / 1e6:5.2f} {row['window_s']:11.2f} s "
            f"{row['before_ms']:8.2f} {row['during_ms']:8.2f} {a['median']:+14.2f} {a['min']:+7.2f} {a['max']:+7.2f}  {verdict}"
        )
    return "\n".join(lines)


def main() -> int:
    """Run alone."""
    parser = argparse.ArgumentParser(prog="python -m benches.big_prompt", description=__doc__.split("\n")[0])
    parser.add_argument("--model", type=Path, help="model file (default: the synthetic micro model)")
    parser.add_argument("--repeats", type=int, default=7, help="arrivals of each kind (default 7)")
    parser.add_argument("--plugins", choices=tuple(PLUGINS), default="auto", help="plugins of our server")
    parser.add_argument("--kind", choices=KINDS, action="append", help="only this kind")
    parser.add_argument("--reference", action="store_true", help="measure llama-server too")
    parser.add_argument("--llama-server", type=Path, help="unpatched llama-server (default: the built one)")
    parser.add_argument("--json", type=Path, help="also write the result to this file")
    args = parser.parse_args()
    result = run(
        args.model,
        n_repeats=args.repeats,
        plugins=args.plugins,
        kinds=args.kind or KINDS,
        binary=args.llama_server,
        reference=args.reference,
    )
    return launch.close(result, table(result), args.json)


if __name__ == "__main__":
    launch.run(main)
