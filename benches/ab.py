"""One plugin on and off under one load, in A-B-B-A blocks on the same resident sessions of one engine.

A difference is claimed only when the 99 % interval of the paired ratios is clear of zero and the effect is at least 1 %.
Exit status 1: the plugin applies and did nothing, or it changed a token that it promises to keep.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from tqdm import tqdm

from llamamg.config import Config
from llamamg.guard import GuardKind
from llamamg.plugins import discover
from llamamg.plugins.selection import declaration_of, unknown

from . import record
from .arguments import add_results, add_sizes, record_of, serve_flags, sizes_of
from .errors import BenchError
from .flags import config_of, model_path, opened, take_models, unavailable, with_plugin
from .judge import NOT_APPLICABLE, check_pairs, failed, judge, sentence, unmeasured
from .loads import LOADS, Load, Sizes
from .quiet import busy_fraction
from .session import Session
from .switching import Restarted, Toggled
from .tables import metric_lines

NAME = "ab"
HELP = "one plugin on and off under one load"
SERVE_FLAGS = True


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the command line."""
    parser.add_argument("--plugin", required=True, metavar="NAME", help="the plugin to switch")
    parser.add_argument(
        "--load", required=True, choices=tuple(LOADS), help="; ".join(f"{x.name}: {x.help}" for x in LOADS.values())
    )
    parser.add_argument(
        "--pairs",
        type=int,
        help="A-B pairs (default 40, mixed 10); from 30 on the interval is a bootstrap, below a t interval",
    )
    parser.add_argument(
        "--restart",
        action="store_true",
        help="two processes with a model each, for a plugin that cannot be switched while it runs",
    )
    add_sizes(parser)
    add_results(parser)


def run(args: argparse.Namespace) -> int:
    """Measure, keep, print."""
    sizes, load = sizes_of(args), LOADS[args.load]
    args.pairs = load.n_pairs if args.pairs is None else args.pairs
    check_pairs(args.pairs)
    found = discover()
    if args.plugin not in found:
        raise BenchError(unknown(args.plugin, found))
    declaration = declaration_of(args.plugin, found)
    if declaration.toggle == "restart" and not args.restart:
        raise BenchError(
            f"{args.plugin} can only be switched at the start of a server: add --restart to measure it with two processes"
        )
    models, given = take_models(args.flags)
    if len(models) > 1:
        raise BenchError("give one model; `llamamg bench ablation` takes several")
    model = model_path(models[0] if models else "demo")
    flags = serve_flags(model, (load,), sizes, given)
    config = config_of(flags)
    with record.ResultFolder(f"ab-{args.plugin}-{load.name}", args.results) as folder:
        busy = busy_fraction()
        with tqdm(total=2 * args.pairs, desc=f"{args.plugin}, {load.name}", unit="block", disable=None) as bar:
            row = _row(args, config, flags, load, sizes, declaration.guard.kind, bar)
        row = {"model": model.name, "load": load.name, "effect_unit": declaration.effect, **row}
        result = {
            "bench": NAME, "flags": record.without_paths(flags), "sizes": asdict(sizes), "busy_before": busy,
            "rows": [row], "record": record_of(config.build, model),
        }  # fmt: skip
        folder.write("result.json", result)
        folder.text("table.txt", table(result) + "\n")
    print(table(result))
    print(f"kept in {folder.final}", file=sys.stderr)
    return 1 if failed([row]) else 0


def _row(
    args: argparse.Namespace, config: Config, flags: list[str], load: Load, sizes: Sizes, guard: GuardKind, bar: Any
) -> dict[str, Any]:
    def told(done: int, total: int) -> None:
        bar.update(1)

    name = args.plugin
    try:
        if args.restart:
            with Restarted(flags, name, load, sizes) as sides:
                return judge(sides, name, load.metrics, guard, args.pairs, told, by_times=load.has_prompt)
        with opened(with_plugin(config, name, True)) as engine:
            return judge(
                Toggled(Session(engine, load, sizes), name),
                name,
                load.metrics,
                guard,
                args.pairs,
                told,
                by_times=load.has_prompt,
            )
    except Exception as error:
        reason = unavailable(error)
        if reason is None:
            raise
        return unmeasured(name, NOT_APPLICABLE, reason)


def table(result: Mapping[str, Any]) -> str:
    """The result for people."""
    lines = []
    for row in result["rows"]:
        lines.append(f"{row['plugin']}, load {row['load']}, {row['model']}: {sentence(row, row['effect_unit'])}")
        if not row.get("metrics"):
            continue
        lines.append(f"  {row['n_pairs']} pairs A-B-B-A, {row['how']}")
        lines.append(f"  {'':<12} {'on':>9} {'off':>9}      {'change':>8} {'99 % interval':>20}")
        lines += [f"  {line}" for line in metric_lines(row["metrics"])]
        on = row["tokens"]["on"]
        lines.append(f"  tokens: {on['n_compared']} compared, {on['n_ties']} near ties, {on['n_changed']} changes")
    return "\n".join(lines)


if __name__ == "__main__":
    from .program import alone

    sys.exit(alone(sys.modules[__name__]))
