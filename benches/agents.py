"""Agents that come and go over HTTP: how long the same work takes, and how much of it is computed twice.

Each agent is a conversation: a long first prompt, then turns that append a tool's output to all that was said, with pauses
in which the tool would run. With more agents than slots the server has to keep the others' conversations elsewhere. Every
side gets the same turns; exit status 1: a turn failed. Everything that is not an option below goes to the servers.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from statistics import median
from typing import Any

from tqdm import tqdm

from . import client, grid_sides, record
from .agents_load import Agent, Sizes, Turn, figures, longest, together
from .arguments import add_results
from .errors import BenchError
from .flags import model_path, take_models
from .grid_prompts import Prompts, n_vocab
from .mixed_cell import wait_free
from .program import alone
from .quiet import busy_fraction
from .sides import Server

NAME = "agents"
HELP = "conversations that come and go: time for the same turns, TTFT, and tokens computed twice"
SERVE_FLAGS = True


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the command line."""
    add = parser.add_argument
    add("--agents", type=int, default=5, metavar="N", help="conversations at once (default 5)")
    add("--slots", type=int, metavar="N", help="slots of the servers (default: as many as agents)")
    add("--turns", type=int, default=12, metavar="N", help="turns of each agent (default 12)")
    add("--prompt", type=int, default=1500, metavar="N", help="tokens of the longest first prompt (default 1500)")
    add("--tool", type=int, default=100, metavar="N", help="mean tokens that a turn appends (default 100)")
    add("--n-predict", type=int, default=64, metavar="N", help="tokens of the longest answer (default 64)")
    add("--pause", type=float, default=0.3, metavar="S", help="mean seconds between two turns (default 0.3)")
    add("--repeats", type=int, default=1, metavar="N", help="runs of each side, each of a fresh server (default 1)")
    add("--side", action="append", default=[], metavar="SIDE",
        help="as in `llamamg bench grid`; repeat it for several (default: ours and upstream)")  # fmt: skip
    add("--seed", type=int, default=1, metavar="S", help="of everything that is drawn (default 1)")
    add("--synthetic", metavar="TEXT", help="how the model was generated, in place of a hash of a large file")
    add("--llama-server", type=Path, metavar="FILE", help="unpatched llama-server (default: the built one)")
    add_results(parser)


def run(args: argparse.Namespace) -> int:
    """Measure, keep, print."""
    for name, least in (
        ("agents", 1), ("turns", 1), ("prompt", 2), ("tool", 1), ("n_predict", 2), ("pause", 0), ("repeats", 1),
    ):  # fmt: skip
        if getattr(args, name) < least:
            raise BenchError(f"--{name.replace('_', '-')} must be at least {least}")
    n_slots = args.agents if args.slots is None else args.slots
    if n_slots < 1:
        raise BenchError("--slots must be at least 1")
    sides = grid_sides.parse(args.side or ("ours", "upstream"), args.llama_server)
    if args.repeats > 1 and any(side.url is not None for side in sides):
        raise BenchError("--repeats takes a fresh server each time, and one that runs already is none: leave it out")
    models, given = take_models(args.flags)
    if len(models) > 1:
        raise BenchError("give one model; every side serves the same one")
    model = model_path(models[0] if models else "demo") if any(side.url is None for side in sides) else None
    sizes = Sizes(args.prompt, args.tool, args.n_predict, args.pause)
    n_tokens = longest(_agents(sizes, args, None))
    cache = [] if {"-cram", "--cache-ram"} & set(given) else ["--cache-ram", "8192"]  # what both servers start with
    flags = grid_sides.serve_flags([*cache, *given], n_slots, n_tokens)
    checks = grid_sides.Checks(n_slots, n_tokens)
    runs: dict[str, list[dict[str, Any]]] = {side.name: [] for side in sides}
    with record.ResultFolder(NAME, args.results) as folder:
        checks.check_running(sides)
        total = len(sides) * args.repeats * args.agents * args.turns
        with tqdm(total=total, desc=NAME, unit="turn", disable=None) as bar:
            for repeat in range(args.repeats):
                for side in sides if repeat % 2 == 0 else sides[::-1]:
                    bar.set_description(side.label)
                    with side.server(model or Path(), flags) as server:
                        checks.check(server)
                        runs[side.name].append(_measure(server, sizes, args, bar))
        result = {
            "bench": NAME,
            "sides": [side.json(flags) for side in sides],
            "sizes": {
                "n_agents": args.agents, "n_slots": n_slots, "n_turns": args.turns, "n_prompt": args.prompt,
                "n_tool": args.tool, "n_predict": args.n_predict, "pause_s": args.pause, "seed": args.seed,
            },
            "rows": [{"side": name, "runs": made} for name, made in runs.items()],
            "record": record.everything(
                model=record.model(model, args.synthetic) if model else None, flags=record.without_paths(flags)
            ),
        }  # fmt: skip
        folder.write("result.json", record.scrubbed(result))
        folder.text("table.txt", table(result) + "\n")
    print(table(result))
    print(f"kept in {folder.final}", file=sys.stderr)
    return 0


def _agents(sizes: Sizes, args: argparse.Namespace, ids: Prompts | None) -> list[Agent]:
    made = ids or Prompts(args.seed, 2)  # only their lengths are asked for
    return [Agent(i, sizes.draw(args.seed, i, args.turns), made) for i in range(args.agents)]


def _measure(server: Server, sizes: Sizes, args: argparse.Namespace, bar: Any) -> dict[str, Any]:
    ids = Prompts(args.seed, n_vocab(server))
    warm = Agent(args.agents, Sizes(16, 4, 4, 0.0).draw(args.seed, args.agents, 2), ids)

    def told(turn: Turn) -> None:
        bar.update(1)

    try:
        client.run_loop(lambda: together(server.url, [warm], lambda turn: None))
        busy = busy_fraction(0.5)
        agents = _agents(sizes, args, ids)
        begin = time.perf_counter()
        client.run_loop(lambda: together(server.url, agents, told))
        wall_s = time.perf_counter() - begin
    except client.ServerError as error:
        raise BenchError(f"{server.name}: {error}") from error
    wait_free(server)
    return {"busy_before": busy, **figures(agents, wall_s)}


def table(result: Mapping[str, Any]) -> str:
    """The result for people: medians of the runs."""
    sizes = result["sizes"]
    lines = [
        f"{sizes['n_agents']} agents of {sizes['n_turns']} turns, {sizes['n_slots']} slots; first prompts up to "
        f"{sizes['n_prompt']} tokens, then about {sizes['n_tool']} a turn",
        f"{'side':<12} {'time':>8} {'TTFT p50':>9} {'p95':>9} {'ITL p50':>8} {'p95':>8} {'new':>8} {'again':>8} {'lost':>5}",
        f"{'':<12} {'s':>8} {'ms':>9} {'ms':>9} {'ms':>8} {'ms':>8} {'tokens':>8} {'tokens':>8} {'turns':>5}",
    ]
    for row in result["rows"]:
        runs = row["runs"]

        def of(name: str, key: str, runs: list[dict[str, Any]] = runs) -> float:
            return float(median(run[name].get(key, float("nan")) for run in runs))

        counts = [median(run[name] for run in runs) for name in ("n_new", "n_again", "n_lost")]
        lines.append(
            f"{row['side']:<12} {median(run['wall_s'] for run in runs):8.2f} {of('ttft_ms', 'p50'):9.1f} "
            f"{of('ttft_ms', 'p95'):9.1f} {of('itl_ms', 'p50'):8.2f} {of('itl_ms', 'p95'):8.2f} "
            f"{counts[0]:8.0f} {counts[1]:8.0f} {counts[2]:5.0f}"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(alone(sys.modules[__name__]))
