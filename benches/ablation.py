"""Every plugin once: those that are on are switched off one by one, the others on, under each load and on each model.

Without -m: the demo model, the micro hybrid, and for plugins that apply to neither the hybrid over two rpc-servers here.

One engine per model; only plugins that are fixed at the start get two processes of their own. A load in which a plugin
does nothing takes one block and gives no bar. Exit status 1: a plugin that applies acted nowhere, or changed a token that
it promises to keep.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

from tqdm import tqdm

from llamamg.engine import Engine
from llamamg.plugins import Found, PluginDeclaration, PluginError, PluginView, discover
from llamamg.plugins.selection import declaration_of, unknown

from . import record, rpc_servers
from .ablation_still import still_rows
from .ablation_table import plot, summary, table
from .arguments import add_results, add_sizes, record_of, serve_flags, sizes_of
from .errors import BenchError
from .flags import config_of, model_path, opened, take_models, unavailable
from .judge import NOT_APPLICABLE, NOT_MEASURED, check_pairs, judge, unmeasured
from .loads import LOADS, Load, Sizes
from .quiet import busy_fraction
from .session import Session, check_room
from .switching import Restarted, Toggled

NAME = "ablation"
HELP = "every plugin once: what each one gains, under each load, on each model"
SERVE_FLAGS = True
# What a plugin waits for its user to choose; the cache is off in other rows.
CHOICES = {"spec": ["--spec-type", "suffix"], "async-cache": ["-cram", "1024"]}
# What a plugin needs to have something to do over the rpc-servers: a short prompt in several ubatches that look alike, which
# the gate would cut into pieces too small for a pipeline.
OVER_RPC = {"prefill-pipeline": ["-ub", "64", "--disable", "prefill-gate"]}
# Rounding of quantized activations sends a token of a random model to another block, and cuts of prompts depend on times.
DEFAULT_MODELS = ("demo", "micro-f32")
DEFAULT_SIZES = Sizes(depth=128, n_tokens=24, n_prompt=384)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the command line."""
    parser.add_argument("--plugin", action="append", metavar="NAME", help="only this plugin; may be given again")
    parser.add_argument("--load", action="append", choices=tuple(LOADS), help="only this load; may be given again")
    parser.add_argument("--pairs", type=int, default=40, help="A-B pairs at most (default 40, mixed 10)")
    parser.add_argument(
        "--minutes",
        type=float,
        default=7.0,
        help="measure fewer pairs where those would take longer in all; starts and rows without an effect come on top (default 7)",
    )
    add_sizes(parser, DEFAULT_SIZES)
    add_results(parser)


@dataclass(slots=True)
class Case:
    """One row to be measured."""

    plugin: str
    was_on: bool
    load: Load


def run(args: argparse.Namespace) -> int:
    """Measure, keep, print."""
    check_pairs(args.pairs)
    sizes = sizes_of(args)
    found = discover()
    for name in args.plugin or ():
        if name not in found:
            raise BenchError(unknown(name, found))
    wanted = args.plugin or [name for name, entry in found.items() if entry.broken is None]
    loads = [LOADS[name] for name in args.load or LOADS]
    names, given = take_models(args.flags)
    models = [model_path(name) for name in names or DEFAULT_MODELS]
    starts = [serve_flags(model, loads, sizes, given) for model in models]
    configs = [config_of(flags) for flags in starts]  # every mistake is said before anything is measured
    deadline = time.monotonic() + 60 * args.minutes
    rows: list[dict[str, Any]] = []
    with record.ResultFolder(NAME, args.results) as folder:
        busy = busy_fraction()
        n_rows = len(models) * len(loads) * len(wanted)
        with tqdm(total=n_rows, desc="ablation", unit="row", disable=None) as bar, contextlib.ExitStack() as stack:

            def measure(label: str, flags: list[str], plugins: list[str]) -> None:
                left_s = partial(share_s, deadline, n_loads=len(loads))
                ablation = Ablation(flags, sizes, args.pairs, lambda: left_s(bar.total - bar.n), found)
                for row in ablation.rows(plugins, loads, bar):
                    unit = declaration_of(row["plugin"], found).effect
                    rows.append({"model": label, "effect_unit": unit, **row})

            for model, flags in zip(models, starts, strict=True):
                measure(model.name, flags, wanted)
            for name in [] if names else [name for name in applied_nowhere(rows) if name in CHOICES]:
                bar.total += len(loads)
                flags = serve_flags(models[0], loads, sizes, [*given, *CHOICES[name]])
                measure(models[0].name, flags, [name])
                starts.append(flags)
            lacking = [] if names or "--rpc" in given else applied_nowhere(rows)
            if lacking and rpc_servers.program() is not None:
                # What needs several devices gets two, last: a device stays registered as long as the process.
                bar.total += len(loads) * len(lacking)
                endpoints = stack.enter_context(rpc_servers.rpc_servers(2))
                over_rpc = [*given, "--rpc", ",".join(endpoints), "-ngl", "99"]
                for more, plugins in over_rpc_starts(lacking):
                    flags = serve_flags(models[-1], loads, sizes, [*over_rpc, *more])
                    measure(f"{models[-1].name} on two rpc-servers", flags, plugins)
                    starts.append(flags)
        result: dict[str, Any] = {
            "bench": NAME,
            "flags": [record.without_paths(flags) for flags in starts],
            "sizes": asdict(sizes),
            "busy_before": busy,
            "plugins": summary(rows),
            "rows": rows,
            "record": record_of(configs[0].build, *models),
        }
        folder.write("result.json", result)
        folder.write("plot.json", plot(result))
        folder.text("table.txt", table(result) + "\n")
    print(table(result))
    print(f"kept in {folder.final}", file=sys.stderr)
    return 0 if all(entry["ok"] for entry in result["plugins"].values()) else 1


def applied_nowhere(rows: list[dict[str, Any]]) -> list[str]:
    """Plugins that were not applicable in any row."""
    names = dict.fromkeys(row["plugin"] for row in rows)
    return [name for name in names if all(row["status"] == NOT_APPLICABLE for row in rows if row["plugin"] == name)]


def over_rpc_starts(plugins: list[str]) -> list[tuple[list[str], list[str]]]:
    """Flags that a start over rpc-servers needs beside the others, and the plugins that are measured in it."""
    plain = [name for name in plugins if name not in OVER_RPC]
    return [([], plain)] * bool(plain) + [(OVER_RPC[name], [name]) for name in plugins if name in OVER_RPC]


def share_s(deadline: float, n_left: int, n_loads: int) -> float:
    """Seconds for the next row. Most plugins act under about one load and the other rows cost next to nothing."""
    return max(0.0, deadline - time.monotonic()) / max(1.0, n_left / n_loads)


class Ablation:
    """All rows of one model."""

    def __init__(
        self,
        flags: list[str],
        sizes: Sizes,
        n_pairs: int,
        budget_s: Callable[[], float],
        found: Mapping[str, Found],
    ) -> None:
        self._found = found
        self._flags, self._sizes, self._n_pairs, self._budget_s = flags, sizes, n_pairs, budget_s

    def rows(self, wanted: list[str], loads: list[Load], bar: Any) -> list[dict[str, Any]]:
        """Measure; the bar goes on by one for each load and plugin."""
        out: list[dict[str, Any]] = []
        later: list[Case] = []
        with opened(config_of(self._flags)) as engine:
            was_on = {view.name: view.enabled for view in engine.plugins.views()}
            for load in loads:  # what does not fit is said before anything is measured
                check_room(engine, load, self._sizes)
            for load in loads:
                model = engine.config.model.path.stem[:20]
                bar.set_description(f"{model}, {load.name}, all of them")
                still = still_rows(engine, load, self._sizes, wanted, self._found)
                for name in wanted:
                    began = time.monotonic()
                    view = _view(engine, name)  # it may have failed under the load before
                    case = Case(name, was_on[name], load)
                    bar.set_description(f"{model}, {load.name}, {name}")
                    if name in still:
                        row: dict[str, Any] | None = still[name]
                    else:
                        row = None if view.toggle == "restart" else self._here(engine, view, case)
                    if row is None:
                        later.append(case)
                    else:
                        out.append({**_facts(case), **row, "took_s": time.monotonic() - began})
                        bar.update(1)
        for case in later:
            began = time.monotonic()
            bar.set_description(f"{case.load.name}, {case.plugin}, two processes")
            out.append({**_facts(case), **self._apart(case), "took_s": time.monotonic() - began})
            bar.update(1)
        return out

    def _here(self, engine: Engine, view: PluginView, case: Case) -> dict[str, Any] | None:
        """Toggled in this process; None for a plugin that turns out to need a restart."""
        if not case.was_on and view.reason is not None:
            return unmeasured(case.plugin, NOT_APPLICABLE, view.reason)
        if view.quarantined is not None:
            return unmeasured(case.plugin, NOT_MEASURED, view.quarantined)
        try:
            if not case.was_on:
                engine.plugins.toggle(case.plugin, True)
        except PluginError as error:
            if "restart with" in str(error):  # what it asks for at the start cannot be given to a running context
                return None
            failed = _view(engine, case.plugin).quarantined is not None
            return unmeasured(case.plugin, NOT_MEASURED if failed else NOT_APPLICABLE, unavailable(error) or str(error))
        needing = [name for name in engine.plugins.enabled() if case.plugin in self._declaration(name).requires]
        for name in needing:  # they go with it, on both sides
            engine.plugins.toggle(name, False)
        try:
            sides = Toggled(Session(engine, case.load, self._sizes), case.plugin)
            return {**self._judged(sides, case), "without": needing}
        finally:
            for name, enabled in ((case.plugin, case.was_on), *((name, True) for name in needing)):
                if _view(engine, name).enabled != enabled:
                    engine.plugins.toggle(name, enabled)

    def _apart(self, case: Case) -> dict[str, Any]:
        try:
            with Restarted(self._flags, case.plugin, case.load, self._sizes) as sides:
                return self._judged(sides, case)
        except BenchError as error:
            reason = unavailable(error)
            if reason is None:
                raise
            return unmeasured(case.plugin, NOT_APPLICABLE, reason)

    def _declaration(self, name: str) -> PluginDeclaration:
        return declaration_of(name, self._found)

    def _judged(self, sides: Toggled | Restarted, case: Case) -> dict[str, Any]:
        guard = self._declaration(case.plugin).guard.kind
        try:
            return judge(
                sides,
                case.plugin,
                case.load.metrics,
                guard,
                min(self._n_pairs, case.load.n_pairs),
                budget_s=self._budget_s(),
                by_times=case.load.has_prompt,
            )
        except BenchError as error:
            if unavailable(error) is not None:
                raise
            return unmeasured(case.plugin, NOT_MEASURED, str(error))


def _view(engine: Engine, name: str) -> PluginView:
    return next(view for view in engine.plugins.views() if view.name == name)


def _facts(case: Case) -> dict[str, Any]:
    return {"load": case.load.name, "mode": "one off" if case.was_on else "one on"}


if __name__ == "__main__":
    from .program import alone

    sys.exit(alone(sys.modules[__name__]))
