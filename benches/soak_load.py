"""All sessions at once, then clients that come and go while memory is looked at, then the same requests alone."""

from __future__ import annotations

import argparse
import asyncio
import random
import time
from collections.abc import Callable
from typing import Any

from tqdm import tqdm

from . import client
from .grid_prompts import Prompts, n_vocab
from .grid_watch import Nvml
from .mixed_cell import wait_free
from .sides import Server
from .soak_client import Counts, Kept, Sizes, ask, body, live
from .soak_equal import again
from .soak_memory import look


def drawn(server: Server, args: argparse.Namespace, rnd: random.Random) -> Callable[[int], list[int]]:
    """Prompts of so many tokens; the same ones for the same state of `rnd`."""
    ids = Prompts(args.seed, n_vocab(server))

    def prompt(n: int) -> list[int]:
        made = ids.make(rnd.randrange(1 << 30), n, 0)
        assert isinstance(made, list)
        return made

    return prompt


def burst(server: Server, sizes: Sizes, args: argparse.Namespace) -> Counts:
    """As many requests as there are slots, all at once, and again. The same ones on every server."""
    counts, prompt = Counts(), drawn(server, args, random.Random(args.seed))
    for _ in range(args.bursts):
        client.run_loop(lambda: _burst(server.url, args.sessions, prompt, sizes, counts))
        wait_free(server)
    return counts


def soak(server: Server, nvml: Nvml, sizes: Sizes, args: argparse.Namespace) -> dict[str, Any]:
    """All at once, then coming and going, then alone."""
    rnd = random.Random(args.seed + 1)
    prompt, together = drawn(server, args, rnd), burst(server, sizes, args)
    counts, seconds = Counts(), 0.0
    memory: list[dict[str, Any]] = []
    if args.seconds > 0:
        n_clients = args.clients or 2 * args.sessions
        begin = time.monotonic()
        with tqdm(total=round(args.seconds), desc="soak", unit="s", disable=None) as bar:
            watch = [lambda: look(server, nvml), memory]
            client.run_loop(lambda: _come_and_go(server.url, n_clients, args, rnd, prompt, sizes, counts, watch, bar))
        seconds = time.monotonic() - begin
        wait_free(server)
        memory.append(look(server, nvml))
    sample = rnd.sample(counts.kept, min(args.sample, len(counts.kept)))
    every = {"burst": together.kept, "soak": sample}
    equal = {name: again(server, kept, name) for name, kept in every.items() if kept}
    n_busy = sum(bool(slot.get("is_processing")) for slot in server.get("/slots"))
    return {
        "burst": together.json(), "soak": counts.json(), "soak_s": round(seconds, 1), "memory_mib": memory,
        "equal": equal, "n_busy_slots": n_busy, "alive": server.process is None or server.process.alive(),
    }  # fmt: skip


async def _burst(url: str, n: int, prompt: Any, sizes: Sizes, counts: Counts) -> None:
    prompts = [prompt(sizes.n_prompt - i) for i in range(n)]
    answers = await asyncio.gather(*(ask(url, body(tokens, sizes.n_predict)) for tokens in prompts))
    for tokens, answer in zip(prompts, answers, strict=True):
        assert answer is not None
        counts.n_finished += 1
        counts.n_tokens += len(answer["tokens"])
        counts.kept.append(Kept(tokens, sizes.n_predict, list(answer["tokens"])))


async def _come_and_go(
    url: str,
    n_clients: int,
    args: argparse.Namespace,
    rnd: random.Random,
    prompt: Any,
    sizes: Sizes,
    counts: Counts,
    watch: list[Any],
    bar: Any,
) -> None:
    end = time.monotonic() + args.seconds
    tasks = [
        asyncio.ensure_future(
            live(url, random.Random(rnd.random()), prompt, sizes, counts, lambda: time.monotonic() >= end)
        )
        for _ in range(n_clients)
    ]
    try:
        read, memory = watch
        looks = [end - args.seconds * part for part in (0.7, 0.35, 0.0)]  # the first one after a third of it
        while looks:
            await asyncio.sleep(min(1.0, max(0.0, looks[0] - time.monotonic())))
            bar.update(max(0, min(round(args.seconds - (end - time.monotonic())), bar.total) - bar.n))
            bar.set_postfix_str(f"{counts.n_finished} answered, {counts.n_cancelled} left, {len(counts.errors)} errors")
            if time.monotonic() >= looks[0]:
                memory.append(await asyncio.to_thread(read))
                looks.pop(0)
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
