"""Decode groups: sessions side by side in 1, 2, … contexts, on the devices of this machine or over rpc-servers started here.

    llamamg bench groups -m model.gguf -ngl 99 --sessions 5 --groups 1,2,3,4 --depth 4k,20k --one CUDA0,CUDA1 --stock
    llamamg bench groups -m demo --rpc-servers 2 --sessions 2 --groups 1,2

The model is loaded once for all numbers of groups. `--one` adds steps of 1, 2, … sessions on one device, and from them the
best rate that groups over all devices could have; `--stock` adds the plain library: one context, and as many as sessions.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from tqdm import tqdm

from . import groups_table, program, record
from .arguments import NO_CACHE, add_results
from .errors import BenchError
from .flags import config_of, model_path, take_models
from .grid_cells import parse_depths
from .groups_side import N_OWN, N_WARM
from .json_child import JsonChild
from .pipeline import builds, numbers
from .quiet import busy_fraction
from .rpc_servers import rpc_servers

NAME = "groups"
HELP = "sessions that decode in 1, 2, … contexts at once, on several devices or over rpc-servers started here"
SERVE_FLAGS = True
PLUGIN = "decode-groups"
Row = dict[str, Any]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the bench."""
    add = parser.add_argument
    add("--sessions", default="2", metavar="LIST", help="sessions side by side (default %(default)s)")
    add("--groups", default="1,2", metavar="LIST", help="decode groups; 1 is one context (default %(default)s)")
    add("--rpc-servers", type=int, default=0, metavar="N",
        help="start N rpc-servers on this machine and spread over them")  # fmt: skip
    add("--rpc-threads", default="1,2", metavar="LIST", help="threads of each rpc-server (default %(default)s)")
    add("--rpc-program", type=Path, metavar="FILE", help="the ggml-rpc-server (default: the built one)")
    add("--depth", default="32", metavar="LIST", help="tokens that each session holds, as 4k,20k (default %(default)s)")
    add("--tokens", type=int, default=96, help="tokens that each session generates (default %(default)s)")
    add("--repeats", type=int, default=3, help="measurements of each row; the median counts (default %(default)s)")
    add("--one", default="", metavar="DEVICE[,DEVICE]",
        help="also 1, 2, … sessions in one context on this device alone; with a second one, --stock's there meanwhile")  # fmt: skip
    add("--stock", action="store_true", help="also the unpatched library: one context, and one for each session")
    add("--stages", type=int, default=0,
        help="equal stages that the best possible rate is computed for (default: as many as --one or --rpc-servers)")  # fmt: skip
    add_results(parser)


def run(args: argparse.Namespace) -> int:
    """Measure, keep, print."""
    for name, least in (("tokens", 16), ("repeats", 1), ("rpc_servers", 0)):
        if getattr(args, name) < least:
            raise BenchError(f"--{name.replace('_', '-')} must be at least {least}")
    plan = Plan(args)
    stages = args.stages or args.rpc_servers or len(plan.one)
    busy = busy_fraction(0.5)
    with record.ResultFolder(NAME, args.results) as folder, tqdm(desc=NAME, unit="run", disable=None) as bar:
        runs: dict[tuple[Any, ...], list[Row]] = {}
        for row in plan.rows():
            runs.setdefault(groups_table.key(row), []).append(row)
            bar.update(1)
        rows = [groups_table.joined(runs[key]) for key in sorted(runs)]
        result = {
            "bench": NAME,
            "rpc_servers": args.rpc_servers,
            "sizes": {"depths": plan.depths, "n_tokens": args.tokens, "repeats": args.repeats},
            "busy_before": busy,
            "rows": rows,
            "best": groups_table.best(rows, stages),
            "uneven": groups_table.uneven(rows),
            "record": record.everything(model=plan.model_record(), flags=record.without_paths(plan.flags)),
        }
        if args.stock:
            result["stock_build"] = record.build(plan.stock_build())
        folder.write("result.json", result)
        folder.text("table.txt", groups_table.table(result) + "\n")
    print(groups_table.table(result))
    print(f"kept in {folder.final}", file=sys.stderr)
    return 0


class Plan:
    """What is to be measured, and the processes that do it."""

    def __init__(self, args: argparse.Namespace) -> None:
        self._args, self._children = args, list[JsonChild]()
        self.sessions, self.groups = numbers(args.sessions, "--sessions"), numbers(args.groups, "--groups")
        self._threads = numbers(args.rpc_threads, "--rpc-threads") if args.rpc_servers else [0]
        self.depths = parse_depths(args.depth)
        self.one = [name for name in args.one.split(",") if name]
        if len(self.one) > 2:
            raise BenchError("--one takes a device, and perhaps a second one for --stock")
        if args.stock and args.rpc_servers:
            raise BenchError("--stock goes with devices of this machine, or with --rpc, not with --rpc-servers")
        models, given = take_models(args.flags)
        if len(models) > 1:
            raise BenchError("give one model")
        self._model = model_path(models[0] if models else "demo")
        n_slots = max(self.sessions)
        # Those that decode first, or in a faster group, go on until the slowest has its tokens.
        n_ctx = n_slots * -(-(max(self.depths) + N_OWN + N_WARM + 4 * args.tokens + 256) // 256) * 256
        own = ["-np", str(n_slots), "--no-kv-unified", "-c", str(n_ctx), "-lv", "2", "--ctx-checkpoints", "0"]
        self.flags = ["-m", str(self._model), *own, *NO_CACHE, *given]
        config_of(self.flags)  # what is wrong with them is said before anything is started
        if args.stock:
            self.stock_build()

    def model_record(self) -> dict[str, Any]:
        """For the result."""
        return record.model(self._model)

    def stock_build(self) -> Path:
        """The unpatched library. Raises BenchError."""
        return builds(argparse.Namespace(upstream=True))["unpatched"]

    def rows(self) -> Iterator[Row]:
        """Everything, measured. What runs on one device each is measured at the same time."""
        if self.one:
            one = [self._ours_on_one]
            if self._args.stock:
                one.append(lambda: self._stock("one", ["--device", self.one[-1]]))
            with ThreadPoolExecutor(len(self.one)) as pool:
                measured = [pool.submit(lambda rows=rows: list(rows())) for rows in one]
                try:
                    for rows in measured:
                        yield from rows.result()
                except BaseException:
                    for child in self._children:  # the other one need not be waited for
                        child.stop()
                    raise
        yield from self._ours_on_all()
        if self._args.stock:
            yield from self._stock("all", [])

    def _ours_on_one(self) -> Iterator[Row]:
        flags = [*self.flags, "--device", self.one[0], *group_flags(1)]
        with self._child("run on one device", "groups_side", {"flags": flags}) as child:
            self._open(child, flags, 1)
            what = {"side": "ours", "devices": "one", "rpc_threads": None, "n_groups": 1}
            for depth in self.depths:
                for n in range(1, max(self.sessions) + 1):
                    for _ in range(self._args.repeats):
                        yield self._run(child, depth, n, **what)
            if len(self.depths) > 1 and max(self.sessions) > 1:
                for _ in range(self._args.repeats):
                    yield self._run(child, self.depths[-1], max(self.sessions), shallow=self.depths[0], **what)

    def _ours_on_all(self) -> Iterator[Row]:
        repeats = self._args.repeats
        # Over rpc-servers of several numbers of threads these take turns; else one process measures everything.
        turns = [(t, 1) for _ in range(repeats) for t in self._threads] if self._args.rpc_servers else [(0, repeats)]
        for n_threads, n_repeats in turns:
            # Groups at the servers' most threads are no use: they compute at the same time.
            groups = self.groups if n_threads == min(self._threads) else [g for g in self.groups if g == 1]
            if groups:
                yield from self._contexts(n_threads, groups, n_repeats)

    def _contexts(self, n_threads: int, groups: Sequence[int], n_repeats: int) -> Iterator[Row]:
        args = self._args
        with contextlib.ExitStack() as stack:
            flags = self.flags
            if args.rpc_servers:
                endpoints = stack.enter_context(rpc_servers(args.rpc_servers, n_threads, args.rpc_program))
                flags = [*flags, "--rpc", ",".join(endpoints)]
            child = stack.enter_context(self._child("run on all devices", "groups_side", {"flags": flags}))
            for repeat in range(n_repeats):
                for n_groups in groups if repeat % 2 == 0 else groups[::-1]:
                    self._open(child, [*flags, *group_flags(n_groups)], n_groups)
                    for depth in self.depths:
                        for n in self.sessions:
                            what = {"devices": "all", "rpc_threads": n_threads or None, "n_groups": n_groups}
                            row = self._run(child, depth, n, side="ours", **what)
                            if n_groups > 1 and n > 1 and not row["effect"]:
                                raise BenchError(f"{n_groups} groups never had two batches in flight")
                            yield row

    def _child(self, *what: Any) -> JsonChild:
        self._children.append(JsonChild(*what))
        return self._children[-1]

    def _open(self, child: JsonChild, flags: Sequence[str], n_groups: int) -> None:
        found = child.ask("open", flags=flags)["groups"]
        if len(found) != min(n_groups, max(self.sessions)):
            raise BenchError(f"{n_groups} groups were asked for and there are {len(found)}")
        child.ask("run", depths=self.depths[:1], n_tokens=16)

    def _run(self, child: JsonChild, depth: int, n: int, shallow: int = 0, **what: Any) -> Row:
        """`shallow`: all but one session hold so little."""
        depths = [depth, *[shallow or depth] * (n - 1)]
        answer = child.ask("run", depths=depths, n_tokens=self._args.tokens)
        return {**what, "depth": depth, "shallow": shallow, "n_sessions": n, **answer}

    def _stock(self, devices: str, flags: Sequence[str]) -> Iterator[Row]:
        n, env = max(self.sessions), {"LLAMAMG_BUILD": str(self.stock_build())}
        order = {"flags": [*self.flags, *flags]}
        with self._child(f"plain library on {devices}", "groups_stock", order, env) as child:
            for depth in self.depths:
                for _ in range(self._args.repeats):
                    for n_contexts in sorted({1, n}):
                        what = {"side": "unpatched", "devices": devices, "rpc_threads": None, "n_groups": n_contexts}
                        yield self._run_stock(child, depth, n, n_contexts, what)

    def _run_stock(self, child: JsonChild, depth: int, n: int, n_contexts: int, what: Row) -> Row:
        answer = child.ask("run", depth=depth, n_sessions=n, n_contexts=n_contexts, n_tokens=self._args.tokens)
        return {**what, "depth": depth, "shallow": 0, "n_sessions": n, "effect": 0, **answer}


def group_flags(n_groups: int) -> list[str]:
    """Flags of llamamg serve for so many groups; their own defaults otherwise."""
    if n_groups == 1:
        return ["--disable", PLUGIN]
    return ["--enable", PLUGIN, "--plugin-option", f"{PLUGIN}.groups={n_groups}"]


if __name__ == "__main__":
    sys.exit(program.alone(sys.modules[__name__]))
