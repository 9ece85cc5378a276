"""Prefill and generation over depth and number of sessions, side by side.

Each cell computes one prompt per session without any cache (prefill), then generates from all sessions together on what
their slots hold now. All sides get the same prompts and the same command line. Everything that is not an option below goes
to the servers: -m, -ngl, -ctk, -ctv, -fa, -t …
"""

from __future__ import annotations

import argparse
import contextlib
import re
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tqdm import tqdm

from . import grid_sides, record
from .client import ServerError
from .errors import BenchError
from .flags import model_path, take_models
from .grid_cells import Budget, Cell, cells, parse_counts, parse_depths
from .grid_measure import measure
from .grid_prompts import Prompts, n_vocab, single_words
from .grid_sides import Checks, Side
from .grid_table import comparisons, markdown
from .grid_watch import Nvml, Watch
from .program import alone
from .sides import Server, SideError

NAME = "grid"
HELP = "prefill and generation over depth and number of sessions: ours, plugins off, upstream, any URL"
SERVE_FLAGS = True
DEPTHS = "5k,50k,150k,200k,250k"
WARM_UP = 2**31  # a repeat that no cell has
SAFE_NAME = re.compile(r"[^A-Za-z0-9]+")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `llamamg bench grid`."""
    add = parser.add_argument
    add("--slots", default="1,5", metavar="LIST", help="sessions at a time (default 1,5)")
    add("--depths", default=DEPTHS, metavar="LIST", help=f"tokens per session (default {DEPTHS})")
    add("--side", action="append", default=[], metavar="SIDE",
        help="ours, off (ours, all plugins off), upstream (the unpatched llama-server), NAME=http://HOST:PORT, or "
        "NAME:[upstream] [VARIABLE=VALUE…] [FLAG…] for ours (or upstream) with these too; "
        "repeat it for several (default: the first three)")  # fmt: skip
    add("--repeats", type=int, default=2, metavar="N", help="measurements of each cell (default 2)")
    add("--minutes", type=float, metavar="N", help="leave out the dearest cells that do not fit into this time")
    add("--n-predict", type=int, default=128, metavar="N", help="tokens that each session generates (default 128)")
    add("--best-ub", metavar="LIST", help="also try these -ub on each side, and measure its best one")
    add("--together", action="store_true",
        help="keep all sides loaded and alternate between them: the fairest order, if memory has room for all")  # fmt: skip
    add("--copy-from", metavar="DEPTH",
        help="from this depth on, sessions side by side get copies of one session's slot file instead of prompts of their own: "
        "no prefill is measured there, and a deep cell takes seconds")  # fmt: skip
    add("--words", action="store_true", help="prompts as text instead of token ids, for servers that take no ids")
    add("--seed", type=int, default=1, metavar="S", help="of the prompts (default 1)")
    add("--llama-server", type=Path, metavar="FILE", help="unpatched llama-server (default: the built one)")
    add(
        "--synthetic", metavar="TEXT", help="how the model was generated, recorded in place of a hash of the whole file"
    )
    add("--what", default="grid", metavar="NAME", help="last part of the result's folder name (default grid)")
    add("--results", type=Path, metavar="FOLDER", help="where to keep the result (default: benches/results)")


@dataclass(slots=True)
class Run:
    """What is measured, and what came of it so far."""

    model: Path
    flags: list[str]
    n_predict: int
    seed: int
    words: bool
    checks: Checks
    budget: Budget
    nvml: Nvml
    bar: Any
    slot_files: Path | None = None  # where the servers save slots, each in a folder of its own
    copy_from: int | None = None
    rows: list[dict[str, Any]] = field(default_factory=list)
    left_out: list[dict[str, Any]] = field(default_factory=list)
    logs: dict[str, str] = field(default_factory=dict)
    loads: list[dict[str, Any]] = field(default_factory=list)
    n_failed: int = 0

    @contextlib.contextmanager
    def started(self, sides: Sequence[Side], flags: Sequence[str]) -> Iterator[list[tuple[Side, Server]]]:
        """All these sides, ready and checked; their logs are kept."""
        with contextlib.ExitStack() as stack:
            servers = []
            for side in sides:
                self.bar.set_postfix_str(f"starting {side.name}")
                before, begin = self._device_memory(), time.monotonic()
                server = stack.enter_context(side.server(self.model, [*flags, *self._slot_flags(side)]))
                after = self._device_memory()
                self.loads.append({
                    "side": side.name, "ubatch": grid_sides.ubatch_of(flags), "ready_s": round(time.monotonic() - begin, 2),
                    "device_memory_mib": [round(b - a, 1) for a, b in zip(before, after, strict=True)],
                })  # fmt: skip
                servers.append((side, server))
            for _, server in servers:
                self.checks.check(server)
            yield servers
            for side, server in servers:
                if server.process is not None:
                    self.logs[f"{side.name}-ub{grid_sides.ubatch_of(flags)}"] = server.process.log_tail(4 << 20)

    def _slot_flags(self, side: Side) -> list[str]:
        if self.slot_files is None:
            return []
        folder = self.slot_files / side.name
        folder.mkdir(exist_ok=True)
        return ["--slot-save-path", str(folder)]

    def _device_memory(self) -> list[float]:
        return [self.nvml.sample(i, set()).get("memory_mib", 0.0) for i in range(len(self.nvml))]

    def prompts(self, server: Server) -> Prompts:
        """Prompts that this server takes."""
        if self.words:
            return Prompts(self.seed, None, single_words(server))
        return Prompts(self.seed, n_vocab(server))

    def measure(
        self, side: Side, server: Server, prompts: Prompts, cell: Cell, flags: Sequence[str], kind: str
    ) -> dict[str, Any] | None:
        """One cell on one side: a row more; None when it failed."""
        self.bar.set_postfix_str(f"{cell.label}, {side.name}")
        watch = Watch(server.process.pid if server.process else -1, self.nvml)
        row = {
            "side": side.name, "n_sessions": cell.n_sessions, "depth": cell.depth, "repeat": cell.repeat,
            "ubatch": grid_sides.ubatch_of(flags), "kind": kind,
        }  # fmt: skip
        if cell.is_copied:
            row["is_copied"] = True
            mine = [row for row in self.rows if row["side"] == side.name and row["n_sessions"] == 1]
            if not any((row["depth"], row["repeat"]) == (cell.depth, cell.repeat) for row in mine):
                self.leave_out(cell, "the session that it copies was not measured", side.name)
                return
        keep = self.copy_from is not None and cell.depth >= self.copy_from
        try:
            self.rows.append({**row, **measure(server, cell, prompts, self.n_predict, watch, keep)})
        except (SideError, ServerError, OSError) as error:
            if not self.rows:
                raise
            # What was measured before is worth keeping: the cell is left out, and the exit status says that something failed.
            self.n_failed += 1
            ended = "" if server.process is None or server.process.alive() else "; its process has ended"
            self.leave_out(cell, f"failed: {error}{ended}", side.name)
            return None
        self.bar.update(1)
        return self.rows[-1]

    def leave_out(self, cell: Cell, why: str, side: str = "", n: int = 1) -> None:
        """A cell that was not measured, and why."""
        self.left_out.append(
            {"n_sessions": cell.n_sessions, "depth": cell.depth, "repeat": cell.repeat, "side": side, "reason": why}
        )
        self.bar.update(n)


def together(run: Run, sides: Sequence[Side], every: Sequence[Cell]) -> None:
    """All sides loaded; the order of the sides is turned round with every cell of a kind and every repeat."""
    with run.started(sides, run.flags) as servers:
        prompts = run.prompts(servers[0][1])
        warm_up(servers, prompts)
        kinds = list(dict.fromkeys((cell.n_sessions, cell.depth) for cell in every))
        for cell in every:
            turn = kinds.index((cell.n_sessions, cell.depth)) + cell.repeat
            why = run.budget.refuses(cell)
            if why:
                run.leave_out(cell, why, n=len(servers))
                continue
            begin = time.monotonic()
            for side, server in servers if turn % 2 == 0 else servers[::-1]:
                run.measure(side, server, prompts, cell, run.flags, "same flags")
            run.budget.took(cell, time.monotonic() - begin)


def one_by_one(run: Run, sides: Sequence[Side], every: Sequence[Cell], minutes: float | None, n_repeats: int) -> None:
    """One side at a time, in turned order with every repeat: A B C, C B A, …"""
    blocks = [(r, s) for r in range(n_repeats) for s in (sides if r % 2 == 0 else sides[::-1])]
    dropped: set[Cell] = set()
    budgets = {side.name: Budget(None) for side in sides}  # a side's own speed; the time left is the run's
    for i, (repeat, side) in enumerate(blocks):
        mine = [cell for cell in every if cell.repeat == repeat]
        share = Budget(None if minutes is None else run.budget.left_s() / (len(blocks) - i) / 60)
        share.learn(budgets[side.name])
        if all(cell in dropped for cell in mine):
            continue
        with run.started([side], run.flags) as [(_, server)]:
            prompts = run.prompts(server)
            warm_up([(side, server)], prompts)
            for cell in mine:
                why = None if cell not in dropped else "another side had no time for it"
                why = why or share.refuses(cell)
                if why:
                    dropped.add(cell)
                    run.leave_out(cell, why, side.name)
                    continue
                begin = time.monotonic()
                run.measure(side, server, prompts, cell, run.flags, "same flags")
                share.took(cell, time.monotonic() - begin)
        budgets[side.name].learn(share)


def warm_up(servers: Sequence[tuple[Side, Server]], prompts: Prompts) -> None:
    """One short unmeasured request to each: pages, graphs, first allocations."""
    for _, server in servers:
        server.post("/completion", {"prompt": prompts.make(0, 16, WARM_UP), "n_predict": 8, "cache_prompt": False})


def best_ubatch(run: Run, sides: Sequence[Side], sizes: Sequence[int], every: Sequence[Cell]) -> dict[str, Any]:
    """Each side's fastest -ub on the shallowest single prompt, then its cells once more with it."""
    probe, chosen = Cell(every[0].n_sessions, every[0].depth), {}
    for side in sides:
        if side.url is not None:
            continue
        rates: dict[int, float] = {}
        for size in sizes:
            flags = grid_sides.with_ubatch(run.flags, size)
            with run.started([side], flags) as [(_, server)]:
                prompts = run.prompts(server)
                warm_up([(side, server)], prompts)
                if (row := run.measure(side, server, prompts, probe, flags, "ub probe")) is not None:
                    rates[size] = row["prefill"]["tps"]
        if not rates:
            continue
        best = max(rates, key=lambda size: rates[size])
        chosen[side.name] = {"best": best, "prefill_tps": {str(size): rate for size, rate in rates.items()}}
        flags = grid_sides.with_ubatch(run.flags, best)
        with run.started([side], flags) as [(_, server)]:
            prompts = run.prompts(server)
            warm_up([(side, server)], prompts)
            for cell in (cell for cell in every if cell.repeat == 0):
                why = run.budget.refuses(cell)
                if why:
                    run.leave_out(cell, f"with the best -ub {best}: {why}", side.name)
                else:
                    run.measure(side, server, prompts, cell, flags, "best ub")
    return chosen


def run(args: argparse.Namespace) -> int:
    """Measure, keep, print."""
    if args.repeats < 1 or args.n_predict < 2:
        raise BenchError("--repeats must be at least 1 and --n-predict at least 2")
    if args.minutes is not None and args.minutes <= 0:
        raise BenchError("--minutes must be positive")
    sizes = parse_counts(args.best_ub, "--best-ub") if args.best_ub else []
    slots, depths = parse_counts(args.slots, "--slots"), parse_depths(args.depths)
    sides = grid_sides.parse(args.side, args.llama_server)
    models, given = take_models(args.flags)
    if len(models) > 1:
        raise BenchError("give one model: all sides serve the same")
    foreign = all(side.url is not None for side in sides)
    model = Path() if foreign else model_path(models[0] if models else "demo")
    if not foreign and not model.is_file():
        raise BenchError(f"{model} is no file: give a model with -m")
    n_tokens = depths[-1] + args.n_predict + 2
    copy_from = parse_depths(args.copy_from)[0] if args.copy_from else None
    if copy_from is not None and (slots[0] != 1 or any(side.url is not None for side in sides)):
        raise BenchError("--copy-from copies what one session computed: give --slots from 1 on, and sides started here")
    every = cells(slots, depths, args.repeats, copy_from)
    flags = grid_sides.serve_flags(given, slots[-1], n_tokens)
    begin, nvml = time.monotonic(), Nvml()
    checks = Checks(slots[-1], n_tokens)
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(record.ResultFolder(args.what, args.results))
        scratch = stack.enter_context(tempfile.TemporaryDirectory(prefix="grid-slots-")) if copy_from else None
        checks.check_running(sides)
        total = len(every) * len(sides)
        with tqdm(total=total, desc="grid", unit="cell", disable=None) as bar, contextlib.closing(nvml):
            state = Run(
                model,
                flags,
                args.n_predict,
                args.seed,
                args.words,
                checks,
                Budget(args.minutes),
                nvml,
                bar,
                Path(scratch) if scratch else None,
                copy_from,
            )
            if args.together:
                together(state, sides, every)
            else:
                one_by_one(state, sides, every, args.minutes, args.repeats)
            chosen = best_ubatch(state, sides, sizes, every) if sizes else {}
        result = {
            "bench": NAME,
            "slots": slots,
            "depths": depths,
            "n_predict": args.n_predict,
            "copy_from": copy_from,
            "prompts": {"kind": "words" if args.words else "token ids", "seed": args.seed},
            "order": "alternating, all sides loaded" if args.together else "one side at a time",
            "minutes": args.minutes,
            "wall_s": round(time.monotonic() - begin, 1),
            "sides": [side.json(flags) for side in sides],
            "loads": state.loads,
            "rows": state.rows,
            "best_ub": chosen,
            "left_out": state.left_out,
            "record": record.everything(
                model={} if foreign else record.model(model, args.synthetic), flags=record.without_paths(flags)
            ),
        }
        result["comparisons"] = comparisons(result)
        write(folder, result, state.logs)
    print(markdown(result))
    print(f"kept in {folder.final}", file=sys.stderr)
    return 1 if state.n_failed else 0


def write(folder: record.ResultFolder, result: dict[str, Any], logs: dict[str, str]) -> None:
    """All files of a result; table and pictures are made from the JSON."""
    result = record.scrubbed(result)
    folder.write("grid.json", result)
    folder.text("table.md", markdown(result) + "\n")
    for name, text in logs.items():
        folder.text(f"{SAFE_NAME.sub('-', name)}.log", record.scrubbed(text))
    try:
        from .report_plots import grid_figures, svg
    except ImportError:
        print("no pictures: install matplotlib (pip install 'llamamg[bench]')", file=sys.stderr)
        return
    for name, figure in grid_figures(result).items():
        folder.text(f"{name}.svg", svg(figure))


if __name__ == "__main__":
    sys.exit(alone(sys.modules[__name__]))
