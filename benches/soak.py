"""Random arrivals and cancels over HTTP for minutes: no error, nothing left behind, and greedy answers as when alone.

First all sessions at once, then clients that come, leave early and come back. Afterwards every slot must be idle, memory
must be what it was early on, and answers are asked again with nothing else running. Where the tokens part, the answer alone
says how near the other token was, computed in up to three ways: a near tie in one of them is counted, anything else fails,
unless a control changes as many answers by itself: random weights amplify what other batch shapes round differently.
Exit status 1: something of this failed.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from . import grid_sides, record
from .arguments import add_results
from .errors import BenchError
from .flags import model_path, take_models
from .grid_watch import Nvml
from .program import alone
from .soak_client import Sizes
from .soak_equal import again
from .soak_judge import failures, table
from .soak_load import burst, soak
from .soak_memory import checkpoints_most

NAME = "soak"
HELP = "random arrivals and cancels for minutes: errors, leaks, and whether answers are as when alone"
SERVE_FLAGS = True
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
            n_slots = len(server.get("/slots"))
            log = server.process.log_tail(4 << 20) if server.process else ""
        if controls:
            found["equal"]["control"] = beside.result() if beside else controlled()
        found["bad_words_in_log"] = [word for word in BAD_WORDS if word in log]
        found["checkpoints_most"] = (
            None if side.url else checkpoints_most([*flags, *side.flags], dict(side.env), n_slots)
        )
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


if __name__ == "__main__":
    sys.exit(alone(sys.modules[__name__]))
