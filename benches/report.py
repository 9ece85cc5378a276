"""One HTML file of all results: curves over depth, bars of what each plugin changes, machine by machine, from the JSON alone."""

from __future__ import annotations

import argparse
import html
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from . import kernels, mixed, qsa_depth_table
from .errors import BenchError
from .grid_table import BEST, SAME, cell_table, comparison_lines, latency_table, left_out_lines, machine_title, select
from .program import alone
from .report_load import Found, machines
from .results_table import model_name

NAME = "report"
HELP = "one HTML file with curves and bars of all results"
CSS = """
:root { color-scheme: light; --ink: #1d2327; --soft: #5c666d; --line: #d9dee2; --accent: #0b7a75; }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: #fff; margin: 0 auto; padding: 2rem 1.5rem 4rem;
  max-width: 1180px; }
h1 { font-size: 1.7rem; margin: 0 0 .2rem; } h2 { margin: 2.6rem 0 .4rem; padding-top: 1rem; border-top: 2px solid var(--accent); }
h3 { margin: 1.8rem 0 .3rem; } p, li { max-width: 75ch; } .soft { color: var(--soft); }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; margin: .6rem 0; font-variant-numeric: tabular-nums; font-size: .9rem; }
th, td { padding: .25rem .7rem; border-bottom: 1px solid var(--line); text-align: right; white-space: nowrap; }
th { text-align: right; color: var(--soft); font-weight: 600; white-space: normal; vertical-align: bottom; }
td.text, th.text { text-align: left; } svg { max-width: 100%; height: auto; display: block; margin: .6rem 0; }
details { margin: .6rem 0; } summary { cursor: pointer; color: var(--accent); } code { font-size: .88em; overflow-wrap: anywhere; }
pre { overflow-x: auto; font-size: .8rem; }
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `llamamg bench report`."""
    parser.add_argument("--results", type=Path, metavar="FOLDER", help="where results are (default: benches/results)")
    parser.add_argument(
        "-o", "--out", type=Path, default=Path("report.html"), metavar="FILE", help="default: report.html"
    )


def run(args: argparse.Namespace) -> int:
    """Write the file."""
    try:
        text = page(args.results)
    except ImportError as error:
        raise BenchError("the report needs matplotlib: install it with pip install 'llamamg[bench]'") from error
    unfinished = args.out.with_name(f".{args.out.name}.unfinished")
    try:
        unfinished.write_text(text, encoding="utf-8")
        os.replace(unfinished, args.out)
    except OSError as error:
        raise BenchError(f"{args.out} cannot be written ({error.strerror}): choose another file with -o") from error
    print(args.out)
    return 0


def page(root: Path | None = None) -> str:
    """The whole HTML. Raises BenchError when there are no results."""
    found = machines(root)
    if not found:
        raise BenchError(
            "there are no results yet: run `llamamg bench grid` or `llamamg bench ablation` first, or name their folder"
        )
    parts = [_machine(results) for results in found.values()]
    contents = "".join(
        f"<li>{html.escape(_title(results[0]))}: {len(results)} results</li>" for results in found.values()
    )
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">'
        f"<title>llamamg: measured</title><style>{CSS}</style></head><body><h1>llamamg: measured</h1>"
        '<p class="soft">Made from the JSON files of the results by <code>llamamg bench report</code>. Every machine stands for '
        f"itself: compare within a machine only.</p><ul>{contents}</ul>{''.join(parts)}</body></html>\n"
    )


def _title(found: Found) -> str:
    machine = found.value.get("record", {}).get("machine")
    return machine_title(machine) if machine else found.machine


def _machine(results: list[Found]) -> str:
    shown = "".join(SECTIONS[found.bench](found) for found in results if found.bench in SECTIONS)
    other = sorted({found.bench for found in results} - SECTIONS.keys())
    note = f'<p class="soft">Not drawn here: {html.escape(", ".join(other))}.</p>' if other else ""
    return f"<section><h2>{html.escape(_title(results[0]))}</h2>{_hardware(results[0])}{shown}{note}</section>"


def _hardware(found: Found) -> str:
    machine = found.value.get("record", {}).get("machine", {})
    facts = [f"{machine.get('cpu')}, {machine.get('n_cpus_usable')} cores, {machine.get('memory_gib')} GiB"]
    for gpu in machine.get("gpus") or []:
        link = f"PCIe {gpu['pcie_generation_max']} x{gpu['pcie_width_max']}"
        facts.append(f"{gpu['name']}, {gpu['memory_gib']} GiB, driver {gpu['driver']}, {link}")
    return f'<p class="soft">{html.escape("; ".join(facts))}</p>'


def _grid(found: Found) -> str:
    from .report_plots import grid_figures, svg

    result = found.value
    pictures = "".join(svg(figure) for figure in grid_figures(result).values())
    said = [*comparison_lines(result), *left_out_lines(result)]
    best = ""
    if select(result["rows"], kind=BEST):
        best = f"<h4>Each side with its best -ub</h4>{table_html(cell_table(result, BEST))}"
    return (
        f"<h3>Grid, {html.escape(found.run)}</h3>{_configuration(result)}{pictures}{table_html(cell_table(result, SAME))}{best}"
        f"<details><summary>Latencies and memory</summary>{table_html(latency_table(result))}</details>{_list(said)}"
    )


def _configuration(result: Mapping[str, Any]) -> str:
    record = result["record"]
    flags = record.get("flags", result.get("flags", []))
    words = (
        " | ".join(" ".join(f) if isinstance(f, list) else str(f) for f in flags) if _nested(flags) else " ".join(flags)
    )
    models = record.get("models") or [record.get("model") or {}]
    software = record["software"]
    commit = software["commit"][:12] + (" with changes" if software["dirty"] else "")
    names = ", ".join(model_name(m) for m in models)
    shown = f" <code>{html.escape(words)}</code>;" if words else ""
    return f"<p>{html.escape(names)};{shown} commit <code>{html.escape(commit)}</code></p>"


def _nested(flags: Any) -> bool:
    return bool(flags) and isinstance(flags[0], list)


def _ablation(found: Found) -> str:
    from .report_plots import bars_figure, svg

    result = found.value
    bars: dict[str, list[tuple[str, float, float, float, bool]]] = {}
    for row in result["rows"]:
        for metric, m in (row.get("metrics") or {}).items():
            low, high = m["change_interval"]
            where = f"{row['plugin']}, {row['load']}, {row['model'].removesuffix('.gguf')}"
            bars.setdefault(metric, []).append((where, m["change_percent"], low, high, m["better"] is not None))
    pictures = "".join(
        svg(bars_figure(metric.replace("_", " "), rows, metric.endswith("_ms")))
        for metric, rows in sorted(bars.items())
    )
    outcomes = [
        f"{row['plugin']}, {row['load']}, {row['model']}: {row['status']}"
        + (f": {row['reason']}" if row.get("reason") else "")
        for row in result["rows"]
    ]
    title = "Ablation" if found.bench == "ablation" else "One plugin on and off"
    details = f"<details><summary>Every row's outcome</summary>{_list(outcomes)}</details>"
    return f"<h3>{title}, {html.escape(found.run)}</h3>{_configuration(result)}{pictures}{details}"


def _mixed(found: Found) -> str:
    from .report_plots import mixed_figure, svg

    title = f"Prompts that arrive beside sessions that decode, {html.escape(found.run)}"
    return f"<h3>{title}</h3>{_configuration(found.value)}{svg(mixed_figure(found.value))}{_text(mixed.table(found.value))}"


def _depth(found: Found) -> str:
    from .report_plots import depth_figure, svg

    result = found.value
    lines = qsa_depth_table.table(result).splitlines()
    rows = [line for line in lines if line.startswith("|")]
    said = [line.removeprefix("* ") for line in lines if line.startswith("* ")]
    picture = svg(depth_figure(result, qsa_depth_table.LABELS))
    return (
        f"<h3>Native QSA, {html.escape(found.run)}</h3>{_configuration(result)}{picture}{table_html(rows)}{_list(said)}"
    )


def _kernels(found: Found) -> str:
    return f"<h3>Kernels, {html.escape(found.run)}</h3>{_text(kernels.table(found.value))}"


def _text(table: str) -> str:
    return f"<details><summary>Table</summary><pre>{html.escape(table)}</pre></details>"


def _list(lines: list[str]) -> str:
    return f"<ul>{''.join(f'<li>{html.escape(line)}</li>' for line in lines)}</ul>" if lines else ""


def table_html(lines: list[str]) -> str:
    """A markdown table as HTML; columns whose rule does not end with a colon hold text."""
    rows = [[cell.strip() for cell in line.strip().strip("|").split("|")] for line in lines]
    text = [not rule.endswith(":") for rule in rows[1]]

    def line(cells: list[str], tag: str) -> str:
        return "".join(
            f'<{tag} class="text">{html.escape(c)}</{tag}>' if is_text else f"<{tag}>{html.escape(c)}</{tag}>"
            for c, is_text in zip(cells, text, strict=True)
        )

    body = "".join(f"<tr>{line(row, 'td')}</tr>" for row in rows[2:])
    return (
        f'<div class="scroll"><table><thead><tr>{line(rows[0], "th")}</tr></thead><tbody>{body}</tbody></table></div>'
    )


SECTIONS = {
    "grid": _grid, "ablation": _ablation, "ab": _ablation, "mixed": _mixed, "qsa-depth": _depth, "kernels": _kernels,
}  # fmt: skip

if __name__ == "__main__":
    sys.exit(alone(sys.modules[__name__]))
