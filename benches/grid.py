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
from pathlib import Path
from typing import Any

from tqdm import tqdm

from . import grid_sides, record
from .errors import BenchError
from .flags import model_path, take_models
from .grid_cells import Budget, cells, parse_counts, parse_depths
from .grid_run import Run, best_ubatch, one_by_one, together
from .grid_sides import Checks
from .grid_table import comparisons, markdown
from .grid_watch import Nvml
from .program import alone

NAME = "grid"
HELP = "prefill and generation over depth and number of sessions: ours, plugins off, upstream, any URL"
SERVE_FLAGS = True
DEPTHS = "5k,50k,150k,200k,250k"
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


def run(args: argparse.Namespace) -> int:
    """Measure, keep, print. After Ctrl-C what was measured until then is kept, and the rest is left out."""
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
            chosen, interrupted = {}, False
            try:
                if args.together:
                    together(state, sides, every)
                else:
                    one_by_one(state, sides, every, args.minutes, args.repeats)
                if sizes:
                    chosen = best_ubatch(state, sides, sizes, every)
            except KeyboardInterrupt:
                if not state.rows:
                    raise
                interrupted = True
                state.leave_out_rest(sides, every, "interrupted")
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
    print(f"{'interrupted: what was measured is ' if interrupted else ''}kept in {folder.final}", file=sys.stderr)
    if interrupted:
        return 130
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
