"""One cell of the mixed load over HTTP: sessions that decode, and prompts that arrive while they do."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from . import client
from .errors import BenchError
from .sides import Server, SideError

SETTLED = 5  # events of every decoder before anything is counted
START_S = 600.0
FREE_S = 30.0


@dataclass(frozen=True, slots=True)
class Cell:
    """How many of each, and how long."""

    n_decoders: int
    n_prompts: int

    @property
    def n_slots(self) -> int:
        """Slots it takes."""
        return self.n_decoders + self.n_prompts


@dataclass(slots=True)
class Decoder:
    """Arrivals of one session, seconds."""

    stamps: list[float] = field(default_factory=list)

    def on_event(self, payload: bytes, now: float) -> None:
        """A token came."""
        self.stamps.append(now)


def measure(
    server: Server,
    cell: Cell,
    residents: Sequence[list[int] | str],
    arriving: Sequence[list[int] | str],
    n_predict: int,
    alone_s: float,
) -> dict[str, Any]:
    """One measurement. Raises BenchError, ServerError or SideError."""
    values: dict[str, Any] = client.run_loop(lambda: _measure(server, cell, residents, arriving, n_predict, alone_s))
    wait_free(server)
    return values


async def _measure(
    server: Server,
    cell: Cell,
    residents: Sequence[list[int] | str],
    arriving: Sequence[list[int] | str],
    n_predict: int,
    alone_s: float,
) -> dict[str, Any]:
    decoders = [Decoder() for _ in range(cell.n_decoders)]
    tasks = [
        asyncio.ensure_future(client.Post(server.url, "/completion", _body(text, n_predict), decoder.on_event).run())
        for text, decoder in zip(residents, decoders, strict=True)
    ]
    try:
        await _settled(tasks, decoders)
        begin = time.perf_counter()
        answers: list[client.Answer] = []
        if arriving:
            answers = await client.together(client.Post(server.url, "/completion", _body(text, 1)) for text in arriving)
        else:
            await asyncio.sleep(alone_s)
        end = max((answer.t_end for answer in answers), default=time.perf_counter())
        _still_running(tasks)
    finally:
        for task in tasks:
            task.cancel()  # closes the connection, which ends the request
        await asyncio.gather(*tasks, return_exceptions=True)
    return figures(decoders, answers, begin, end)


def _body(prompt: list[int] | str, n_predict: int) -> dict[str, Any]:
    return {
        "prompt": prompt, "n_predict": n_predict, "temperature": 0, "ignore_eos": True, "stream": True,
        "cache_prompt": False,
    }  # fmt: skip


async def _settled(tasks: Sequence[asyncio.Future[Any]], decoders: Sequence[Decoder]) -> None:
    until = time.monotonic() + START_S
    while any(len(decoder.stamps) < SETTLED for decoder in decoders):
        _still_running(tasks)
        if time.monotonic() > until:
            raise BenchError(f"the sessions did not begin to decode within {START_S:.0f} s")
        await asyncio.sleep(0.01)


def _still_running(tasks: Sequence[asyncio.Future[Any]]) -> None:
    for task in tasks:
        if task.done():
            task.result()  # an error of the server, if that is why
            raise BenchError("a session ended before the prompts were computed: give a larger --n-predict and -c")


def figures(decoders: Sequence[Decoder], answers: Sequence[client.Answer], begin: float, end: float) -> dict[str, Any]:
    """Gaps that ended inside the window, tokens in it, and the prompts' rate. Raises BenchError when no gap ended there."""
    gaps_ms: list[float] = []
    n_tokens = 0
    for decoder in decoders:
        stamps = np.asarray(decoder.stamps)
        inside = (stamps[1:] > begin) & (stamps[1:] <= end)
        gaps_ms += (1e3 * np.diff(stamps)[inside]).tolist()
        n_tokens += int(inside.sum())
        # A stall that outlasts the window is a gap too.
        gaps_ms.append(1e3 * (end - float(stamps[stamps <= end][-1])))
    if n_tokens == 0 and not answers:
        raise BenchError("no token came while the sessions were watched: give a larger --alone")
    n_prompt = [_n_prompt(answer) for answer in answers]
    p50, p99 = (float(v) for v in np.percentile(gaps_ms, (50, 99)))
    return {
        "itl_ms": {"p50": p50, "p99": p99, "max": max(gaps_ms)},
        "decode_tps": n_tokens / (end - begin),
        "window_s": end - begin,
        "n_prompt": n_prompt,
        "prefill_tps": sum(n_prompt) / (end - begin) if answers else 0.0,
        "ttft_ms": [1e3 * (answer.t_end - answer.t_sent) for answer in answers],
    }


def _n_prompt(answer: client.Answer) -> int:
    n = int((answer.final.get("timings") or {}).get("prompt_n") or answer.final.get("tokens_evaluated", 0))
    if n <= 0:
        raise SideError("the server does not say how many prompt tokens it computed (`timings.prompt_n`)")
    return n


def wait_free(server: Server) -> None:
    """Until the cancelled sessions have left their slots; servers without /slots get a moment."""
    until = time.monotonic() + FREE_S
    while time.monotonic() < until:
        with contextlib.suppress(SideError):
            if not any(slot.get("is_processing") for slot in server.get("/slots")):
                return
            time.sleep(0.05)
            continue
        time.sleep(1.0)
        return
    raise BenchError(f"{server.name} still computes {FREE_S:.0f} s after its clients left")
