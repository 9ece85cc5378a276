"""Requests that come and go: one HTTP request that can be broken off, and random lives made of such requests."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from . import client
from .client import ServerError


@dataclass(frozen=True, slots=True)
class Sizes:
    """Bounds of what is drawn."""

    n_prompt: int  # tokens of the longest prompt
    n_predict: int  # of the longest answer
    part_cancelled: float = 0.3
    pause_s: float = 0.5  # mean between two requests of a client


@dataclass(frozen=True, slots=True)
class Kept:
    """A request that was answered whole, to be asked again alone."""

    prompt: list[int]
    n_predict: int
    tokens: list[int]


@dataclass(slots=True)
class Counts:
    """What happened."""

    n_finished: int = 0
    n_cancelled: int = 0
    n_tokens: int = 0
    errors: list[str] = field(default_factory=list)
    kept: list[Kept] = field(default_factory=list)

    def json(self) -> dict[str, Any]:
        return {
            "n_finished": self.n_finished,
            "n_cancelled": self.n_cancelled,
            "n_tokens": self.n_tokens,
            "errors": self.errors[:20],
            "n_errors": len(self.errors),
        }


def body(prompt: list[int], n_predict: int, stream: bool = False, n_probs: int = 0) -> dict[str, Any]:
    """A greedy request that ends by its length alone."""
    return {
        "prompt": prompt, "n_predict": n_predict, "temperature": 0, "ignore_eos": True, "stream": stream,
        "return_tokens": True, "n_probs": n_probs, "cache_prompt": False,
    }  # fmt: skip


async def ask(
    url: str, request: dict[str, Any], leave_after: int | None = None, leave_s: float | None = None
) -> dict[str, Any] | None:
    """The answer of a request that is not streamed; None when we left: after so many events, or so many seconds.

    Raises ServerError for an error answer and ConnectionError for a broken one.
    """
    parts = urlsplit(url)
    reader, writer = await asyncio.open_connection(parts.hostname, parts.port, limit=1 << 24)
    try:
        writer.write(client.encode(url, "/completion", json.dumps(request).encode()))
        await writer.drain()
        if leave_after is not None:
            seen = 0
            while seen < leave_after:
                line = await reader.readline()
                if not line:
                    return None  # it was over before we left
                seen += line.startswith(b"data: ")
                if line.startswith((b'data: {"error"', b"HTTP/1.1 4", b"HTTP/1.1 5")):
                    raise ServerError(line.decode(errors="replace")[:300])
            return None
        try:
            answer = await asyncio.wait_for(reader.read(), leave_s)
        except TimeoutError:
            return None
        except asyncio.TimeoutError:  # another class before Python 3.11
            return None
    finally:
        writer.close()
    head, _, text = answer.partition(b"\r\n\r\n")
    if b" 200 " not in head[:16]:
        raise ServerError(f"the server said {(head[:80] + text[:200])!r}")
    whole: dict[str, Any] = json.loads(text)
    return whole


async def live(
    url: str,
    rnd: random.Random,
    prompt: Callable[[int], list[int]],
    sizes: Sizes,
    counts: Counts,
    over: Callable[[], bool],
) -> None:
    """One client: asks, waits, leaves early now and then, until it is over."""
    while not over():
        n_prompt = int(sizes.n_prompt ** rnd.uniform(0.4, 1.0))
        n_predict = rnd.randint(1, sizes.n_predict)
        tokens = prompt(max(1, n_prompt))
        try:
            if rnd.random() < sizes.part_cancelled:
                if rnd.random() < 0.5:
                    await ask(url, body(tokens, n_predict, stream=True), leave_after=rnd.randint(0, n_predict))
                else:
                    await ask(url, body(tokens, n_predict), leave_s=rnd.expovariate(2.0))
                counts.n_cancelled += 1
            else:
                answer = await ask(url, body(tokens, n_predict))
                assert answer is not None
                got = list(answer["tokens"])
                if len(got) != n_predict:
                    counts.errors.append(f"{len(got)} tokens came where {n_predict} were asked for")
                counts.n_finished += 1
                counts.n_tokens += len(got)
                counts.kept.append(Kept(tokens, n_predict, got))
        except (ServerError, OSError, ValueError, KeyError) as error:
            counts.errors.append(f"{type(error).__name__}: {error}")
            await asyncio.sleep(0.2)  # a server that is gone is not asked a thousand times
        await asyncio.sleep(rnd.expovariate(1 / sizes.pause_s))
