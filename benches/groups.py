"""Decode groups: sessions side by side in 1, 2, … contexts, on the devices of this machine or over rpc-servers started here.

    llamamg bench groups -m model.gguf -ngl 99 --sessions 1,2,3,4,5 --groups 1,2,3,4
    llamamg bench groups -m demo --rpc-servers 2 --sessions 2 --groups 1,2

Every number of groups, and with rpc-servers every number of their threads, is a process of its own that loads the model; they
take turns, --repeats times. With all sessions from 1 on, the times of one context give the rate that is possible at best.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from tqdm import tqdm

from . import program, record
from .arguments import NO_CACHE, add_results
from .errors import BenchError
from .flags import config_of, model_path, take_models
from .json_child import JsonChild
from .multi_gpu_rows import ideal_rate
from .pipeline import numbers
from .quiet import busy_fraction
from .rpc_servers import rpc_servers

NAME = "groups"
HELP = "sessions that decode in 1, 2, … contexts at once, on several devices or over rpc-servers started here"
SERVE_FLAGS = True
PLUGIN = "decode-groups"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the bench."""
    add = parser.add_argument
    add("--sessions", default="2", metavar="LIST", help="sessions side by side (default %(default)s)")
    add("--groups", default="1,2", metavar="LIST", help="decode groups; 1 is one context (default %(default)s)")
    add(
        "--rpc-servers",
        type=int,
        default=0,
        metavar="N",
        help="start N rpc-servers on this machine and spread over them",
    )
    add("--rpc-threads", default="1,2", metavar="LIST", help="threads of each rpc-server (default %(default)s)")
    add("--rpc-program", type=Path, metavar="FILE", help="the ggml-rpc-server (default: the built one)")
    add("--depth", type=int, default=32, help="tokens of each session's prompt (default %(default)s)")
    add("--tokens", type=int, default=96, help="tokens that each session generates (default %(default)s)")
    add("--repeats", type=int, default=3, help="measurements of each row; the median counts (default %(default)s)")
    add("--stages", type=int, default=0, help="equal stages that the best possible rate is computed for (default: not)")
    add_results(parser)


def run(args: argparse.Namespace) -> int:
    """Measure, keep, print."""
    sessions, groups = numbers(args.sessions, "--sessions"), numbers(args.groups, "--groups")
    threads = numbers(args.rpc_threads, "--rpc-threads") if args.rpc_servers else [0]
    for name, least in (("depth", 1), ("tokens", 16), ("repeats", 1), ("rpc_servers", 0)):
        if getattr(args, name) < least:
            raise BenchError(f"--{name.replace('_', '-')} must be at least {least}")
    models, given = take_models(args.flags)
    if len(models) > 1:
        raise BenchError("give one model")
    model = model_path(models[0] if models else "demo")
    n_slots = max(sessions)
    # While the others' prompts are computed, at eight tokens a step or more, the first one decodes.
    n_early = n_slots * (args.depth // 8 + 8)
    n_ctx = n_slots * (-(-(args.depth + args.tokens + n_early + 8) // 256) * 256)
    flags = ["-m", str(model), "-np", str(n_slots), "--no-kv-unified", "-c", str(n_ctx), "-lv", "2", *NO_CACHE, *given]
    config_of(flags)  # what is wrong with them is said before anything is started
    # Groups at the servers' most threads are no use: they compute at the same time.
    sides = [(t, g) for g in groups for t in threads if g == 1 or t == min(threads)]
    runs: dict[tuple[int, int, int], list[dict[str, Any]]] = {}
    busy = busy_fraction(0.5)
    with record.ResultFolder(NAME, args.results) as folder:
        with tqdm(total=len(sides) * args.repeats, desc=NAME, unit="run", disable=None) as bar:
            for _ in range(args.repeats):
                for side in sides:
                    for n, answer in _measure(side, sessions, flags, args):
                        runs.setdefault((*side, n), []).append(answer)
                    bar.update(1)
        rows = [_row(key, found) for key, found in sorted(runs.items())]
        result = {
            "bench": NAME,
            "rpc_servers": args.rpc_servers,
            "sizes": {"depth": args.depth, "n_tokens": args.tokens, "repeats": args.repeats},
            "busy_before": busy,
            "rows": rows,
            "best": _best(rows, args.stages),
            "record": record.everything(model=record.model(model), flags=record.without_paths(flags)),
        }
        folder.write("result.json", result)
        folder.text("table.txt", table(result) + "\n")
    print(table(result))
    print(f"kept in {folder.final}", file=sys.stderr)
    return 0


def _measure(
    side: tuple[int, int], sessions: Sequence[int], flags: list[str], args: argparse.Namespace
) -> Iterator[tuple[int, dict[str, Any]]]:
    n_threads, n_groups = side
    with contextlib.ExitStack() as stack:
        rpc = (
            stack.enter_context(rpc_servers(args.rpc_servers, n_threads, args.rpc_program)) if args.rpc_servers else []
        )
        words = [*flags, *(["--rpc", ",".join(rpc)] if rpc else []), *group_flags(n_groups)]
        order = {"flags": words, "depth": args.depth}
        child = stack.enter_context(JsonChild(f"run with {n_groups} groups", "groups_side", order))
        if len(child.facts["groups"]) != min(n_groups, max(sessions)):
            raise BenchError(f"{n_groups} groups were asked for and there are {len(child.facts['groups'])}")
        child.ask("warm", n_sessions=min(sessions), n_tokens=16)
        for n in sessions:
            answer = child.ask("run", n_sessions=n, n_tokens=args.tokens)
            if n_groups > 1 and n > 1 and not answer["effect"]:
                raise BenchError(f"{n_groups} groups never had two batches in flight")
            yield n, answer


def group_flags(n_groups: int) -> list[str]:
    """Flags of llamamg serve for so many groups; their own defaults otherwise."""
    if n_groups == 1:
        return ["--disable", PLUGIN]
    return ["--enable", PLUGIN, "--plugin-option", f"{PLUGIN}.groups={n_groups}"]


def _row(key: tuple[int, int, int], runs: list[dict[str, Any]]) -> dict[str, Any]:
    n_threads, n_groups, n_sessions = key
    return {
        "rpc_threads": n_threads or None,
        "n_groups": n_groups,
        "n_sessions": n_sessions,
        "tps": median(run["tps"] for run in runs),
        "runs": [run["tps"] for run in runs],
        "overlaps": sum(run["effect"] for run in runs),
    }


def _best(rows: Sequence[Mapping[str, Any]], n_stages: int) -> list[dict[str, Any]]:
    """For each number of sessions: the best row with one group, the best with several, and their ratio."""
    out = []
    for n in sorted({row["n_sessions"] for row in rows}):
        of_n = [row for row in rows if row["n_sessions"] == n]
        one = max((row for row in of_n if row["n_groups"] == 1), key=lambda row: float(row["tps"]), default=None)
        several = max((row for row in of_n if row["n_groups"] > 1), key=lambda row: float(row["tps"]), default=None)
        found: dict[str, Any] = {"n_sessions": n, "one": one and one["tps"], "several": several and several["tps"]}
        if one and several:
            found["n_groups"], found["ratio"] = several["n_groups"], several["tps"] / one["tps"]
        singles = sorted((row for row in rows if row["n_groups"] == 1), key=lambda row: float(row["tps"]))
        steps = {row["n_sessions"]: row["n_sessions"] / row["tps"] for row in singles}  # the best one counts
        if n_stages and one and set(range(1, n + 1)) <= set(steps):
            found["ideal"] = ideal_rate(steps, n, n_stages)
        out.append(found)
    return out


def table(result: Mapping[str, Any]) -> str:
    """The result for people."""
    lines = []
    for row in result["rows"]:
        where = f"-t {row['rpc_threads']}  " if row["rpc_threads"] else ""
        runs = " ".join(f"{tps:.1f}" for tps in row["runs"])
        lines.append(f"{where}{row['n_sessions']} sessions  {row['n_groups']} groups  {row['tps']:8.1f} t/s   ({runs})")
    for best in result["best"]:
        line = f"{best['n_sessions']} sessions:"
        if "ratio" in best:
            line += f" {best['n_groups']} groups are {best['ratio']:.2f}x of the best single context"
        if "ideal" in best:
            ideal = best["ideal"]
            line += f"; possible from the times of one context: {ideal['tps']} t/s with {ideal['n_groups']} groups"
        lines.append(line)
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(program.alone(sys.modules[__name__]))
