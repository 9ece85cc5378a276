"""The bars of the server, from one command: `python -m benches.serve_gate`.

Runs the overhead, big-prompt and rate benches, prints one table, and writes JSON, tables and the machine record to
benches/results/<machine>/<date>-serve/. The exit status is 0 when every bar is met.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from llamamg import demo, library, paths

from . import big_prompt, launch, overhead, record, serve_rate
from .record import ResultFolder
from .sides import llama_server_binary

PARTS = ("overhead", "big-prompt", "serve-rate")


def bars(results: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """One line per bar: what, value, bar, met."""
    lines: list[dict[str, Any]] = []
    if over := results.get("overhead"):
        for row in over["rows"]:
            value = row["overhead_us"]["median"]
            what = f"Python overhead per step, 8 slots, {row['consumer']} consumer, plugins {row['plugins']}"
            lines.append(_bar(what, value, over["limit_us"], "µs", value <= over["limit_us"]))
    if big := results.get("big-prompt"):
        for row in big["rows"]:
            if row["server"] == "ours" and row["kind"] != "nothing":
                what = f"gap added to a neighbour by a {row['n_tokens']}-token prompt as {row['kind']}"
                lines.append(_bar(what, row["added_ms"]["median"], big["limit_ms"], "ms", row["passed"]))
    if rates := results.get("serve-rate"):
        for row in rates["rows"]:
            streams = f"{row['n_streams']} stream{'s' * (row['n_streams'] > 1)}"
            what = f"rate / {row['against']}, -t {row['n_threads']}, {streams}, plugins {row['plugins']}"
            lines.append(_bar(what, row["median"], row["bar"], "", row["passed"], at_least=True))
    return lines


def _bar(what: str, value: float, bar: float, unit: str, met: bool, at_least: bool = False) -> dict[str, Any]:
    return {"what": what, "value": value, "bar": bar, "unit": unit, "at_least": at_least, "met": met}


def table(lines: list[dict[str, Any]]) -> str:
    """The bars for people."""
    out = [f"{'what':<78} {'value':>9} {'bar':>9}"]
    for line in lines:
        sign, digits = (">=", 3) if line["at_least"] else ("<=", 1)
        verdict = "met" if line["met"] else "MISSED"
        value = f"{line['value']:.{digits}f}"
        out.append(f"{line['what']:<78} {value:>9} {sign} {line['bar']:<5g} {line['unit']:<2} {verdict}")
    return "\n".join(out)


def main() -> int:
    """Run the parts and write the results."""
    parser = argparse.ArgumentParser(prog="python -m benches.serve_gate", description=__doc__.split("\n")[0])
    serve_rate.add_arguments(parser)
    parser.add_argument("--only", choices=PARTS, action="append", help="only this part")
    parser.add_argument("--repeats", type=int, default=7, help="long prompts of each kind (default 7)")
    parser.add_argument("--steps", type=int, default=1500, help="decode steps per overhead row (default 1500)")
    parser.add_argument("--results", type=Path, help="folder for results (default: benches/results)")
    args = parser.parse_args()
    if args.pairs < 2:
        parser.error("--pairs must be at least 2")
    chosen = args.only or PARTS
    with ResultFolder("serve", args.results) as folder:
        results, model = _run(args, chosen)
        lines = bars(results)
        text = table(lines)
        for name, result in results.items():
            folder.write(f"{name}.json", result)
        folder.write("bars.json", lines)
        folder.write(
            "record.json",
            record.everything(
                builds={
                    "ours": record.build(library.find()),
                    "upstream": record.build(paths.build("upstream") / "bin"),
                },
                models=[record.model(path) for path in model],
            ),
        )
        details = {"overhead": overhead.table, "big-prompt": big_prompt.table, "serve-rate": serve_rate.table}
        folder.text(
            "table.txt", "\n\n".join([text, *(details[name](result) for name, result in results.items())]) + "\n"
        )
    print(text)
    print(f"results: {folder.final}")
    return 0 if all(line["met"] for line in lines) else 1


def _run(args: argparse.Namespace, chosen: list[str] | tuple[str, ...]) -> tuple[dict[str, dict[str, Any]], list[Path]]:
    results: dict[str, dict[str, Any]] = {}
    models: list[Path] = []
    if "serve-rate" in chosen and args.llama_server is None:
        llama_server_binary()  # say that it is missing before the first minutes are spent
    if "overhead" in chosen:
        results["overhead"] = overhead.run(n_steps=args.steps)
        print(overhead.table(results["overhead"]), end="\n\n")
    if "big-prompt" in chosen:
        models.append(big_prompt.micro_model())
        results["big-prompt"] = big_prompt.run(models[-1], n_repeats=args.repeats)
        print(big_prompt.table(results["big-prompt"]), end="\n\n")
    if "serve-rate" in chosen:
        models.append(args.model or demo.demo_model())
        results["serve-rate"] = serve_rate.run(models[-1], binary=args.llama_server, n_pairs=args.pairs)
        print(serve_rate.table(results["serve-rate"]), end="\n\n")
    return results, models


if __name__ == "__main__":
    launch.run(main)
