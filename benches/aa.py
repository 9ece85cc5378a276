"""Does the comparison itself lie? The same thing twice, and a plugin that slows every step, each many times for real.

A-A: a plugin that only counts; a difference may be claimed in at most 2 of 20 runs. Slow: a plugin that waits for 5 % of
every step; it must be found in at least 18 of 20.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tqdm import tqdm

from llamamg import Guard, hookimpl, plugin
from llamamg.batch import Batch
from llamamg.guard import GuardKind
from llamamg.plugins import Found, PluginSet, discover

from . import record
from .arguments import add_results, add_sizes, record_of, serve_flags, sizes_of
from .errors import BenchError
from .flags import config_of, model_path, opened, take_models, with_plugin
from .judge import check_pairs, judge
from .loads import LOADS, Sizes
from .quiet import busy_fraction
from .session import Session
from .switching import Toggled

NAME = "aa"
HELP = "the comparison compared with itself: no difference where there is none, 5 % found where it is"
SERVE_FLAGS = True
SLOWER = 0.05
DEFAULT_SIZES = Sizes(depth=32, n_tokens=24)


@plugin(
    name="bench-same", summary="counts steps", helps="nothing", hurts="nothing", guard=Guard.exact(), effect="steps"
)
class Same:
    """On and off are the same thing."""

    def __init__(self) -> None:
        self.effect = 0

    @hookimpl
    def batch_done(self, batch: Batch, elapsed_s: float) -> None:
        """Count."""
        self.effect += 1


@plugin(name="bench-slow", summary="waits", helps="nothing", hurts="everything", guard=Guard.exact(), effect="steps")
class Slow:
    """Every step takes SLOWER longer."""

    def __init__(self) -> None:
        self.effect = 0

    @hookimpl
    def batch_done(self, batch: Batch, elapsed_s: float) -> None:
        """Wait busily: a sleep would let the clock of the core fall."""
        self.effect += 1
        until = time.perf_counter() + SLOWER * elapsed_s
        while time.perf_counter() < until:
            pass


PLUGINS = (Same, Slow)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the command line."""
    parser.add_argument("--runs", type=int, default=20, help="comparisons of each kind (default 20)")
    parser.add_argument("--pairs", type=int, default=40, help="A-B pairs in each (default 40)")
    parser.add_argument("--load", choices=tuple(LOADS), default="solo", help="default: solo")
    parser.add_argument("--steps-to", type=Path, metavar="FILE", help="only record the times of single decode steps")
    parser.add_argument("--steps", type=int, default=4000, help="how many of them (default 4000)")
    add_sizes(parser, DEFAULT_SIZES)
    add_results(parser)


def run(args: argparse.Namespace) -> int:
    """Measure, keep, print."""
    check_pairs(args.pairs)
    sizes, load = sizes_of(args), LOADS[args.load]
    models, given = take_models(args.flags)
    model = model_path(models[0] if models else "demo")
    if args.steps_to is not None:
        sizes = Sizes(sizes.depth, 500, sizes.n_prompt)
    flags = serve_flags(model, (load,), sizes, given)
    config = config_of(flags)
    found = dict(discover())
    for cls in PLUGINS:
        declaration = cls.declaration  # type: ignore[attr-defined]
        found[declaration.name] = Found(declaration.name, False, "this bench", cls, declaration)
        config = with_plugin(config, declaration.name, True)
    if args.steps_to is not None:
        return record_steps(args, config, found, flags, sizes)
    with record.ResultFolder(NAME, args.results) as folder:
        busy = busy_fraction()
        kinds: dict[str, list[dict[str, Any]]] = {"same": [], "slow": []}
        with (
            opened(config, PluginSet(config.plugins, found)) as engine,
            tqdm(total=2 * args.runs, desc=NAME, unit="run", disable=None) as bar,
        ):
            for cls in PLUGINS:
                engine.plugins.toggle(cls.declaration.name, False)  # type: ignore[attr-defined]
            for _ in range(args.runs):
                for kind, rows in kinds.items():
                    sides = Toggled(Session(engine, load, sizes), f"bench-{kind}")
                    rows.append(judge(sides, f"bench-{kind}", load.metrics, GuardKind.EXACT, args.pairs))
                    engine.plugins.toggle(f"bench-{kind}", False)
                    bar.update(1)
        result = {
            "bench": NAME, "flags": record.without_paths(flags), "load": load.name, "sizes": asdict(sizes),
            "busy_before": busy, "metric": load.metrics[0], "claims": claims(kinds, load.metrics), "runs": kinds,
            "record": record_of(config.build, model),
        }  # fmt: skip
        folder.write("result.json", result)
        folder.text("table.txt", table(result) + "\n")
    print(table(result))
    print(f"kept in {folder.final}", file=sys.stderr)
    same, slow = (result["claims"][kind][load.metrics[0]] for kind in kinds)
    return 0 if same["n"] <= 0.1 * args.runs and slow["n_worse"] >= 0.9 * args.runs else 1


def claims(kinds: dict[str, list[dict[str, Any]]], metrics: tuple[str, ...]) -> dict[str, Any]:
    """How often a difference was claimed, and how often a worsening."""
    out: dict[str, Any] = {}
    for kind, rows in kinds.items():
        out[kind] = {}
        for name in metrics:
            verdicts = [row["metrics"][name]["better"] for row in rows if row.get("metrics")]
            out[kind][name] = {
                "n_runs": len(rows),
                "n": sum(verdict is not None for verdict in verdicts),
                "n_worse": sum(verdict is False for verdict in verdicts),
            }
    return out


def table(result: Mapping[str, Any]) -> str:
    """The result for people."""
    lines = [f"load {result['load']}; differences claimed on {result['metric']}:"]
    for kind, name in (("same", "the same twice"), ("slow", f"{100 * SLOWER:.0f} % slower")):
        count = result["claims"][kind][result["metric"]]
        lines.append(f"  {name:<15} {count['n']:>3} of {count['n_runs']}, of them worse: {count['n_worse']}")
    return "\n".join(lines)


def record_steps(args: argparse.Namespace, config: Any, found: dict[str, Found], flags: list[str], sizes: Sizes) -> int:
    """Write the times of real decode steps, for the tests' fake clock."""
    try:
        args.steps_to.touch()
    except OSError as error:
        raise BenchError(f"{args.steps_to} cannot be written: {error.strerror}") from error
    steps_ms: list[float] = []
    busy = busy_fraction()
    with (
        opened(config, PluginSet(config.plugins, found)) as engine,
        tqdm(total=args.steps, desc="steps", disable=None) as bar,
    ):
        for cls in PLUGINS:
            engine.plugins.toggle(cls.declaration.name, False)  # type: ignore[attr-defined]
        stamps: list[float] = []

        def clock() -> float:
            stamps.append(time.perf_counter())
            return stamps[-1]

        session = Session(engine, LOADS["solo"], sizes, clock)
        session.prepare()
        while len(steps_ms) < args.steps:
            stamps.clear()
            session.block()
            # the first stamps are the prompt's token and the begin of the window
            new = [1e3 * (b - a) for a, b in itertools.pairwise(stamps[2:])]
            steps_ms += new
            bar.update(len(new))
    facts = {
        "what": "times of consecutive single decode steps", "flags": record.without_paths(flags),
        "model": config.model.path.name, "busy_before": busy, "load_average": record.everything()["load"],
        "machine": record.machine(),
    }  # fmt: skip
    steps_ms = [round(ms, 3) for ms in steps_ms[: args.steps]]
    args.steps_to.write_text(json.dumps({**facts, "step_ms": steps_ms}) + "\n")
    return 0


if __name__ == "__main__":
    from .program import alone

    sys.exit(alone(sys.modules[__name__]))
