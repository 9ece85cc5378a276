"""Random arrivals and cancels over HTTP for minutes: no error, nothing left behind, and greedy answers as when alone.

First all sessions at once, then clients that come, leave early and come back. Afterwards every slot must be idle, memory
must be what it was early on, and answers are asked again with nothing else running. Where the tokens part, the answer alone
says how near the other token was, computed in up to three ways: a near tie in one of them is counted, anything else fails,
unless a control changes as many answers by itself: random weights amplify what other batch shapes round differently.
Exit status 1: something of this failed.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import random
import re
import sys
import time
import urllib.request
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from llamamg.guard import TIE_MARGIN

from . import client, grid_sides, record
from .arguments import add_results
from .errors import BenchError
from .flags import model_path, take_models
from .grid_prompts import Prompts, n_vocab
from .grid_watch import Nvml, rss_mib, session_pids
from .mixed_cell import wait_free
from .program import alone
from .sides import Server
from .soak_client import Counts, Kept, Sizes, ask, body, live

NAME = "soak"
HELP = "random arrivals and cancels for minutes: errors, leaks, and whether answers are as when alone"
SERVE_FLAGS = True
N_PROBS = 20  # candidates looked at where an answer differs
CONTROL_SPARE = 0.1  # part of the answers that may change beyond the control's: it is small, and luck counts
SPARE_MIB, SPARE_PART = 96.0, 0.05  # memory that may come: allocators keep some
BAD_WORDS = ("Traceback (most recent call last)", "quarantine", "CUDA error", "GGML_ASSERT")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the command line."""
    add = parser.add_argument
    add(
        "--seconds",
        type=float,
        default=300.0,
        metavar="S",
        help="how long clients come and go; 0: only all at once (default 300)",
    )
    add("--sessions", type=int, default=5, metavar="N", help="slots, and requests of the first burst (default 5)")
    add("--clients", type=int, metavar="N", help="clients that come and go (default: twice the slots)")
    add("--prompt", type=int, default=2000, metavar="N", help="tokens of the longest prompt (default 2000)")
    add("--n-predict", type=int, default=96, metavar="N", help="tokens of the longest answer (default 96)")
    add(
        "--sample",
        type=int,
        default=12,
        metavar="N",
        help="answers of the soak that are asked again alone (default 12)",
    )
    add("--bursts", type=int, default=1, metavar="N", help="how often all sessions ask at once before that (default 1)")
    add(
        "--control",
        metavar="SIDE",
        help="the same bursts on this side too: how often answers change there by themselves",
    )
    add("--together", action="store_true",
        help="run the control beside the side: less time, the model twice in memory; with --seconds 0 only")  # fmt: skip
    add("--side", default="ours", metavar="SIDE", help="the server, as in `llamamg bench grid` (default ours)")
    add("--seed", type=int, default=1, metavar="S", help="of everything that is drawn (default 1)")
    add("--llama-server", type=Path, metavar="FILE", help="unpatched llama-server (default: the built one)")
    add_results(parser)


def run(args: argparse.Namespace) -> int:
    """Soak, keep, print."""
    for name, least in (("seconds", 0), ("sessions", 1), ("bursts", 1), ("prompt", 8), ("n_predict", 1), ("sample", 0)):
        if getattr(args, name) < least:
            raise BenchError(f"--{name.replace('_', '-')} must be at least {least}")
    if args.together and args.seconds:
        raise BenchError("--together is for --seconds 0: memory is watched in a longer run")
    side, *others = grid_sides.parse([args.side, *([args.control] if args.control else [])], args.llama_server)
    models, given = take_models(args.flags)
    if len(models) > 1:
        raise BenchError("give one model")
    model = model_path(models[0] if models else "demo")
    flags = ["--metrics", *grid_sides.serve_flags(given, args.sessions, args.prompt + args.n_predict)]
    sizes = Sizes(args.prompt, args.n_predict)
    controls = [control.server(model, flags) for control in others]

    def controlled() -> dict[str, Any]:
        with controls[0] as server:
            return again(server, burst(server, sizes, args).kept, "control")

    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(record.ResultFolder(NAME, args.results))
        pool = stack.enter_context(ThreadPoolExecutor(1))
        beside = pool.submit(controlled) if args.together and controls else None
        for server in controls:  # after an error the thread is not waited for any longer than it takes to say so
            stack.callback(lambda process=server.process: process and process.stop())
        with side.server(model, flags) as server, contextlib.closing(Nvml()) as nvml:
            grid_sides.check_room(server, args.sessions, args.prompt + args.n_predict)
            found = soak(server, nvml, sizes, args)
            log = server.process.log_tail(4 << 20) if server.process else ""
        if controls:
            found["equal"]["control"] = beside.result() if beside else controlled()
        found["bad_words_in_log"] = [word for word in BAD_WORDS if word in log]
        found["failures"] = failures(found)
        result = {
            "bench": NAME,
            "side": side.json(flags),
            "control": [control.json(flags) for control in others],
            "sizes": {"n_prompt": args.prompt, "n_predict": args.n_predict, "seconds": args.seconds},
            **found,
            "record": record.everything(model=record.model(model)),
        }
        folder.write("soak.json", record.scrubbed(result))
        folder.text("table.txt", table(result) + "\n")
        folder.text("server.log", record.scrubbed(log))
    print(table(result))
    print(f"kept in {folder.final}", file=sys.stderr)
    return 1 if found["failures"] else 0


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
            watch = [lambda: memory_mib(server, nvml), memory]
            client.run_loop(lambda: _come_and_go(server.url, n_clients, args, rnd, prompt, sizes, counts, watch, bar))
        seconds = time.monotonic() - begin
        wait_free(server)
        memory.append(memory_mib(server, nvml))
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


def memory_mib(server: Server, nvml: Nvml) -> dict[str, Any]:
    """Of the server's processes on the host, what of it are checkpoints, and of each device."""
    kept = checkpoints_mib(server)
    host = rss_mib(session_pids(server.process.pid)) if server.process else None
    return {
        "host": host,
        "checkpoints": kept,
        "devices": [round(nvml.sample(i, set()).get("memory_mib", 0.0), 1) for i in range(len(nvml))],
    }


def checkpoints_mib(server: Server) -> float:
    """Main memory of the states that slots keep: it comes and goes with them. 0 where the server does not tell."""
    try:
        with urllib.request.urlopen(server.url + "/metrics", timeout=30) as answer:
            text = answer.read().decode()
    except (OSError, ValueError):
        return 0.0
    said = re.search(r"^llamamg:checkpoint_bytes (\S+)$", text, re.MULTILINE)
    return round(float(said[1]) / (1 << 20), 1) if said else 0.0


def again(server: Server, kept: Sequence[Kept], name: str) -> dict[str, Any]:
    """Each request by itself; how many tokens were the same, and what the others were."""
    counts: dict[str, Any] = {"n": len(kept), "n_equal": 0, "n_ties": 0, "changed": []}
    for one in tqdm(kept, desc=f"{name}, alone", unit="request", disable=None):
        answer = server.post("/completion", body(one.prompt, one.n_predict, n_probs=N_PROBS))
        tokens = list(answer["tokens"])
        if tokens == one.tokens:
            counts["n_equal"] += 1
            continue
        at = next((i for i, (a, b) in enumerate(zip(tokens, one.tokens, strict=False)) if a != b), -1)
        behind = float("inf")
        if at >= 0:
            behind = behind_by(answer, at, one.tokens[at])
            if behind >= TIE_MARGIN:
                behind = min(behind, *otherwise(server, one, at))
        if behind < TIE_MARGIN:
            counts["n_ties"] += 1
        else:
            said = None if np.isinf(behind) else round(behind, 3)
            counts["changed"].append({"at": at, "n_prompt": len(one.prompt), "behind_nats": said})
    return counts


def otherwise(server: Server, one: Kept, at: int) -> list[float]:
    """How far the token is behind when the text up to it is computed in other batches: at once, and in two pieces.

    A quantized model with experts does not give one answer: what counts as changed must be changed in all of them.
    """
    text, found = [*one.prompt, *one.tokens[:at]], []
    for n_first in (0, len(text) * 2 // 3):
        if n_first:
            server.post("/completion", {**body(text[:n_first], 1), "id_slot": 0})
        again = {**body(text, 1, n_probs=N_PROBS), "id_slot": 0, "cache_prompt": n_first > 0}
        found.append(behind_by(server.post("/completion", again), 0, one.tokens[at]))
    return found


def behind_by(answer: dict[str, Any], at: int, token: int) -> float:
    """How far a token was behind the best one at this place, in nats; infinite when it is not among the best."""
    top = answer["completion_probabilities"][at]["top_logprobs"]
    best = max(candidate["logprob"] for candidate in top)
    found = [candidate["logprob"] for candidate in top if candidate["id"] == token]
    return float(best - found[0]) if found else float("inf")


def failures(found: dict[str, Any]) -> list[str]:
    """What is wrong, a sentence each."""
    out = []
    control = found["equal"].get("control", {})
    by_itself = len(control.get("changed", ())) / max(1, control.get("n", 0))
    for name in ("burst", "soak"):
        if found[name]["n_errors"]:
            out.append(f"{name}: {found[name]['n_errors']} errors, the first: {found[name]['errors'][0]}")
        equal = found["equal"].get(name, {})
        changed = equal.get("changed", ())
        far = [one for one in changed if one["behind_nats"] is None]
        if far:  # rounding does not do that, however often a control's answers change
            out.append(
                f"{name}: {len(far)} answers have a token that is not among the {N_PROBS} best, the first: {far[0]}"
            )
        elif len(changed) > (by_itself + CONTROL_SPARE * bool(control)) * equal.get("n", 0):
            out.append(f"{name}: {len(changed)} answers differ from the same request alone, the first: {changed[0]}")
    if found["n_busy_slots"]:
        out.append(f"{found['n_busy_slots']} slots are still busy after everybody left")
    if not found["alive"]:
        out.append("the server's process has ended")
    if found["bad_words_in_log"]:
        out.append(f"the server's log has {', '.join(found['bad_words_in_log'])}")
    return [*out, *_leaks(found["memory_mib"])]


def _leaks(memory: Sequence[dict[str, Any]]) -> list[str]:
    if len(memory) < 2:
        return []
    first, last = memory[0], memory[-1]
    # What the slots hold at the moment is no leak.
    held = last.get("checkpoints", 0.0) - first.get("checkpoints", 0.0)
    places = [("main memory", first["host"], last["host"] and last["host"] - held)]
    places += [(f"GPU {i}", a, b) for i, (a, b) in enumerate(zip(first["devices"], last["devices"], strict=True))]
    return [
        f"{what} grew from {a:.0f} to {b:.0f} MiB"
        for what, a, b in places
        if a is not None and b is not None and b > a * (1 + SPARE_PART) + SPARE_MIB
    ]


def table(result: dict[str, Any]) -> str:
    """The result for people."""
    soaked, lines = result["soak"], []
    lines.append(
        f"{result['soak_s']:.0f} s: {soaked['n_finished']} answered, {soaked['n_cancelled']} left early, "
        f"{soaked['n_tokens']} tokens, {soaked['n_errors']} errors"
    )
    for name, equal in result["equal"].items():
        lines.append(
            f"{name}: {equal['n']} asked again alone, {equal['n_equal']} equal, {equal['n_ties']} near ties, "
            f"{len(equal['changed'])} changed"
        )
    for look in result["memory_mib"]:
        lines.append(
            f"memory MiB: host {look['host']}, of it checkpoints {look.get('checkpoints', 0.0)}, devices {look['devices']}"
        )
    return "\n".join([*lines, *(f"FAILED: {sentence}" for sentence in result["failures"])])


if __name__ == "__main__":
    sys.exit(alone(sys.modules[__name__]))
