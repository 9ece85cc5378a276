"""Prefill of one long prompt over all devices against one of them: `llamamg bench pipeline -m MODEL [flags of llamamg serve]`.

Each build and each set of devices runs in a process of its own, one after the other. Rows: unpatched; ours on one device
with every switch of the pipeline; ours on all devices with every switch, with none, and with all but one.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
from pathlib import Path
from typing import Any

from tqdm import tqdm

from llamamg import library, paths

from . import pipeline_trace, program, record
from .arguments import add_results
from .errors import BenchError
from .flags import config_of, model_path, take_models
from .sides import Process

NAME = "pipeline"
HELP = "prefill of one long prompt on one device and on all of them, switch by switch"
SERVE_FLAGS = True
SWITCHES = ("stable-graph", "prefill-rebuild", "hop-once")
QUEUES = "CUDA_SCALE_LAUNCH_QUEUES"
DRIVERS_QUEUES = {QUEUES: ""}  # empty: as the driver has them


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the bench."""
    add = parser.add_argument
    add("--tokens", type=int, default=32768, help="length of the prompt (default %(default)s)")
    add("-b", "--batch", default="8192", help="tokens given to the library at once, a list (default %(default)s)")
    add("-ub", "--ubatch", default="512,1024,2048", help="tokens of a ubatch, a list (default %(default)s)")
    add("--repeats", type=int, default=3, help="timed prefills of each row; the median counts (default %(default)s)")
    add("--always", default="qsa", help="switches that are on in all our rows, where the build has them (default qsa)")
    add("--each", action="store_true", help="rows with all switches but one at every shape, not only at the first")
    add(
        "--env",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="one more row with this variable, e.g. GGML_CUDA_P2P=1; may be repeated",
    )
    add("--no-upstream", dest="upstream", action="store_false", help="leave the unpatched build out")
    add("--trace", action="store_true", help="one more prefill per row with time stamps, kept with the results")
    add_results(parser)


def numbers(text: str, option: str) -> list[int]:
    """A list of positive numbers. Raises BenchError."""
    try:
        found = [int(part) for part in text.split(",")]
    except ValueError:
        found = []
    if not found or min(found) < 1:
        raise BenchError(f"{option} {text}: give positive numbers joined by commas, such as 512,1024")
    return found


def plan(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Processes to run, in order: name, build, devices, environment and the shapes with their switches."""
    shapes = [(b, ub) for b in numbers(args.batch, "-b") for ub in numbers(args.ubatch, "-ub") if ub <= b]
    if not shapes:
        raise BenchError("every -ub is larger than every -b: a ubatch is a part of a batch")
    always = [name for name in args.always.split(",") if name]
    every = [*always, *SWITCHES]

    def cell(shape: tuple[int, int], switches: list[str], label: str) -> dict[str, Any]:
        return {"n_batch": shape[0], "n_ubatch": shape[1], "switches": switches, "label": label}

    full = [cell(shape, every, "all") for shape in shapes]
    parts = []
    for shape in shapes if args.each else shapes[:1]:
        parts.append(cell(shape, always, "none"))
        parts += [cell(shape, [s for s in every if s != left], f"no {left}") for left in SWITCHES]
    sides: list[dict[str, Any]] = []
    if args.upstream:
        for devices in ("one", "all"):
            cells = [cell(shape, [], "") for shape in shapes]
            sides.append({"side": "unpatched", "devices": devices, "env": DRIVERS_QUEUES, "cells": cells})
    sides.append({"side": "ours", "devices": "one", "env": {}, "cells": full})
    sides.append({"side": "ours", "devices": "all", "env": {}, "cells": [*full, *parts]})
    short = [{**c, "label": "all, short launch queue"} for c in full[:1]]
    sides.append({"side": "ours", "devices": "all", "env": DRIVERS_QUEUES, "cells": short})
    for text in args.env:
        name, equals, value = text.partition("=")
        if not equals:
            raise BenchError(f"--env {text}: give NAME=VALUE")
        cells = [{**c, "label": f"all, {text}"} for c in full]
        sides.append({"side": "ours", "devices": "all", "env": {name: value}, "cells": cells})
    return sides


def measure(side: dict[str, Any], args: argparse.Namespace, build: Path, kept: Path) -> list[dict[str, Any]]:
    """Run one process; one row per cell. Raises BenchError with what it said."""
    traced = args.trace and side["side"] == "ours" and side["devices"] == "all"
    cells = [{**c, "trace": str(kept / f"trace-{i}.json") if traced else None} for i, c in enumerate(side["cells"])]
    order = {
        "flags": args.flags,
        "devices": side["devices"],
        "n_tokens": args.tokens,
        "repeats": args.repeats,
        "cells": cells,
    }
    argv = [sys.executable, "-m", f"{__package__}.pipeline_side", json.dumps(order)]
    process = Process(
        f"{side['side']} on {side['devices']}", argv, {**side["env"], "LLAMAMG_BUILD": str(build)}, piped=True
    )
    process.start()
    try:
        rows = []
        start = _read(process)
        for cell in tqdm(cells, desc=process.name):
            answer = _read(process)
            if file := cell.pop("trace"):
                answer["trace"] = pipeline_trace.summary(json.loads(Path(file).read_text()))
            shared = {"side": side["side"], "devices": side["devices"], "env": side["env"], "found": start["devices"]}
            rows.append({**shared, **cell, **answer, "rate": statistics.median(answer["rates"])})
        return rows
    finally:
        process.stop()


def _read(process: Process) -> dict[str, Any]:
    assert process.child is not None
    assert process.child.stdout is not None
    line = process.child.stdout.readline()
    answer: dict[str, Any] = json.loads(line) if line else {"error": "it ended"}
    if "error" in answer:
        raise BenchError(f"{process.name}: {answer['error']}\n{process.log_tail()}")
    return answer


def builds(args: argparse.Namespace) -> dict[str, Path]:
    """Folder of each side's build. Raises BenchError."""
    found = {"ours": library.find()}
    if args.upstream:
        folder = paths.build("upstream") / "bin"
        if not (folder / "libllamamg.so").is_file():
            raise BenchError(f"no unpatched build in {folder}: run `llamamg build --upstream`, or give --no-upstream")
        found["unpatched"] = folder
    return found


def run(args: argparse.Namespace) -> int:
    """Measure and keep the result; 0."""
    models, flags = take_models(args.flags)
    if len(models) != 1:
        raise BenchError("give one model with -m; `llamamg synth --preset full --experts 64 FILE` writes a large one")
    path = model_path(models[0])
    args.flags = ["-m", str(path), *flags]
    config_of(args.flags)  # what is wrong with it is said before anything is started
    sides, folders = plan(args), builds(args)
    result: dict[str, Any] = {
        "bench": NAME,
        "n_tokens": args.tokens,
        "flags": record.without_paths(args.flags),
        "rows": [],
    }
    with record.ResultFolder(NAME, args.results) as folder:
        for number, side in enumerate(sides):
            kept = folder.path / f"process-{number}"
            kept.mkdir()
            result["rows"] += measure(side, args, folders[side["side"]], kept)
            if not any(kept.iterdir()):
                kept.rmdir()
        model = record.model(path, os.environ.get("LLAMAMG_SYNTHETIC"))
        result["record"] = record.everything(build=record.build(folders["ours"]), model=model)
        folder.write("pipeline.json", result)
        folder.text("table.md", table(result) + "\n")
    print(table(result), f"kept in {folder.final}", sep="\n")
    return 0


def table(result: dict[str, Any]) -> str:
    """The result in words, from the JSON alone."""
    rows = result["rows"]
    one = {(r["n_batch"], r["n_ubatch"]): r for r in rows if r["side"] == "ours" and r["devices"] == "one"}
    lines = [
        "| build | devices | switches | -b | -ub | t/s | of ours on one | drains per prompt | devices at work |",
        "| --- | --- | --- | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for r in rows:
        counts = r["counts"]
        drains = f"{sum(counts[what] for what in pipeline_trace.DRAINS):.0f}" if "drained" in counts else ""
        at_work = f"{r['trace']['parallelism']:.2f}" if "trace" in r else ""
        ratio = r["rate"] / one[r["n_batch"], r["n_ubatch"]]["rate"]
        cells = [r["side"], r["devices"], r["label"], r["n_batch"], r["n_ubatch"], f"{r['rate']:.0f}", f"{ratio:.2f}"]
        lines.append(f"| {' | '.join(map(str, [*cells, drains, at_work]))} |")
    digests: dict[int, set[str]] = {}
    for r in rows:
        if r["side"] == "ours":
            digests.setdefault(r["n_ubatch"], set()).add(r["digest"])
    different = [str(n) for n, found in digests.items() if len(found) > 1]
    lines.append(
        f"\nLast logits, all our rows of one -ub: {'different bits at ' + ', '.join(different) if different else 'same bits'}."
    )
    if missing := sorted({name for r in rows for name in r["missing"]}):
        lines.append(f"Not in this build: {', '.join(missing)}.")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(program.alone(sys.modules[__name__]))
