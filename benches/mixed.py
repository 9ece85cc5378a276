"""Sessions that decode beside prompts that arrive, over HTTP: latency between tokens against the prompts' rate.

Every number of decoders with every number of prompts, on our server with and without plugins, on the unpatched one, or on
any llama-server compatible URL. Everything that is not an option below goes to the servers.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from pathlib import Path
from statistics import median
from typing import Any

from tqdm import tqdm

from . import grid_sides, record
from .arguments import add_results
from .errors import BenchError
from .flags import model_path, take_models
from .grid_cells import parse_counts
from .grid_prompts import Prompts, n_vocab
from .mixed_cell import Cell, measure
from .program import alone
from .quiet import busy_fraction
from .sides import Server

NAME = "mixed"
HELP = "latency of decoding sessions against the rate of prompts that arrive beside them"
SERVE_FLAGS = True
WARM_UP = 2**30  # a repeat that no measurement has


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the command line."""
    add = parser.add_argument
    add("--decoders", default="1,2,4", metavar="LIST", help="sessions that decode (default 1,2,4)")
    add("--prompts", default="0,1,2", metavar="LIST", help="prompts that arrive together (default 0,1,2)")
    add("--side", action="append", default=[], metavar="SIDE",
        help="ours, off (ours, all plugins off), upstream (the unpatched llama-server), NAME=http://HOST:PORT, or "
        "NAME:[upstream] [VARIABLE=VALUE…] [FLAG…] for ours (or upstream) with these too; "
        "repeat it for several (default: ours and off)")  # fmt: skip
    add("--prompt", type=int, default=1024, metavar="N", help="tokens of an arriving prompt (default 1024)")
    add("--depth", type=int, default=128, metavar="N", help="tokens that a decoding session begins with (default 128)")
    add(
        "--n-predict",
        type=int,
        default=1024,
        metavar="N",
        help="tokens a session may generate meanwhile (default 1024)",
    )
    add("--alone", type=float, default=2.0, metavar="S", help="seconds to watch where no prompt arrives (default 2)")
    add("--repeats", type=int, default=3, metavar="N", help="measurements of each cell (default 3)")
    add("--synthetic", metavar="TEXT", help="how the model was generated, in place of a hash of a large file")
    add("--llama-server", type=Path, metavar="FILE", help="unpatched llama-server (default: the built one)")
    add_results(parser)


def run(args: argparse.Namespace) -> int:
    """Measure, keep, print."""
    for name, least in (("prompt", 8), ("depth", 1), ("n_predict", 16), ("repeats", 1), ("alone", 0.1)):
        if getattr(args, name) < least:
            raise BenchError(f"--{name.replace('_', '-')} must be at least {least}")
    decoders = parse_counts(args.decoders, "--decoders")
    prompts = _counts_from_zero(args.prompts)
    cells = [Cell(d, p) for d in decoders for p in prompts]
    n_slots, n_tokens = max(cell.n_slots for cell in cells), max(args.depth + args.n_predict, args.prompt + 8)
    sides = grid_sides.parse(args.side or ("ours", "off"), args.llama_server)
    models, given = take_models(args.flags)
    if len(models) > 1:
        raise BenchError("give one model; every side serves the same one")
    is_started = any(side.url is None for side in sides)
    model = model_path(models[0] if models else "demo") if is_started else None
    flags = grid_sides.serve_flags(given, n_slots, n_tokens)
    checks = grid_sides.Checks(n_slots, n_tokens)
    rows: list[dict[str, Any]] = []
    with record.ResultFolder(NAME, args.results) as folder:
        checks.check_running(sides)
        with tqdm(total=len(sides) * len(cells) * args.repeats, desc=NAME, unit="run", disable=None) as bar:
            for side in sides:
                server = side.server(model or Path(), flags)
                with server:
                    checks.check(server)
                    ids = Prompts(1, n_vocab(server))
                    bar.set_description(side.label)
                    rows += _side(server, side.name, cells, ids, args, bar)
        result = {
            "bench": NAME,
            "sides": [side.json(flags) for side in sides],
            "sizes": {"depth": args.depth, "n_prompt": args.prompt, "n_predict": args.n_predict, "alone_s": args.alone},
            "rows": rows,
            "record": record.everything(
                model=record.model(model, args.synthetic) if model else None, flags=record.without_paths(flags)
            ),
        }
        folder.write("result.json", result)
        folder.write("plot.json", plot(result))
        folder.text("table.txt", table(result) + "\n")
    print(table(result))
    print(f"kept in {folder.final}", file=sys.stderr)
    return 0


def _side(
    server: Server, name: str, cells: list[Cell], ids: Prompts, args: argparse.Namespace, bar: Any
) -> list[dict[str, Any]]:
    rows = []
    warm = Cell(1, 1)
    measure(server, warm, [ids.make(0, 16, WARM_UP)], [ids.make(1, 64, WARM_UP)], args.n_predict, args.alone)
    for cell in cells:
        busy = busy_fraction(0.5)
        runs = []
        for repeat in range(args.repeats):
            residents = [ids.make(i, args.depth, repeat) for i in range(cell.n_decoders)]
            arriving = [ids.make(100 + i, args.prompt, repeat) for i in range(cell.n_prompts)]
            runs.append(measure(server, cell, residents, arriving, args.n_predict, args.alone))
            bar.update(1)
        rows.append(
            {
                "side": name, "n_decoders": cell.n_decoders, "n_prompts": cell.n_prompts, "busy_before": busy,
                "median": _median(runs), "runs": runs,
            }
        )  # fmt: skip
    return rows


def _median(runs: list[dict[str, Any]]) -> dict[str, float]:
    values = {f"itl_{key}_ms": median(run["itl_ms"][key] for run in runs) for key in ("p50", "p99", "max")}
    return {**values, **{key: median(run[key] for run in runs) for key in ("prefill_tps", "decode_tps")}}


def _counts_from_zero(text: str) -> list[int]:
    try:
        counts = sorted({int(part) for part in text.split(",")})
    except ValueError:
        counts = [-1]
    if counts[0] < 0:
        raise BenchError(f"--prompts {text}: give numbers from 0 on, like 0,1,2")
    return counts


def plot(result: dict[str, Any]) -> dict[str, Any]:
    """One curve per side and number of decoders: prompts' rate against latency, a point for each number of prompts."""
    curves: dict[tuple[str, int], list[dict[str, Any]]] = {}
    for row in result["rows"]:
        point = {"n_prompts": row["n_prompts"], **row["median"]}
        curves.setdefault((row["side"], row["n_decoders"]), []).append(point)
    return {
        "kind": "curves",
        "title": "Latency of decoding sessions against the rate of arriving prompts",
        "x": "prefill_tps",
        "y": ["itl_p50_ms", "itl_p99_ms", "itl_max_ms"],
        "curves": [{"side": side, "n_decoders": n, "points": points} for (side, n), points in curves.items()],
    }


def table(result: Mapping[str, Any]) -> str:
    """The result for people."""
    lines = [
        f"{'side':<10} {'decoders':>8} {'prompts':>7} {'ITL p50':>9} {'p99':>9} {'largest':>9} {'prefill':>9} {'decode':>9}",
        f"{'':<10} {'':>8} {'':>7} {'ms':>9} {'ms':>9} {'ms':>9} {'t/s':>9} {'t/s':>9}",
    ]
    for row in result["rows"]:
        m = row["median"]
        lines.append(
            f"{row['side']:<10} {row['n_decoders']:>8} {row['n_prompts']:>7} {m['itl_p50_ms']:9.1f} {m['itl_p99_ms']:9.1f} "
            f"{m['itl_max_ms']:9.1f} {m['prefill_tps']:9.1f} {m['decode_tps']:9.1f}"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(alone(sys.modules[__name__]))
