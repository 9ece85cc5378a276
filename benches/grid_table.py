"""From a grid's JSON to its table and to what the sides' pairs say. Nothing here measures."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from . import pairs
from .grid_cells import depth_name

Row = Mapping[str, Any]
METRICS: dict[str, Callable[[Row], float | None]] = {  # None: it was not measured, as the prefill of copied sessions
    "prefill t/s": lambda row: float(row["prefill"]["tps"]) if row["prefill"] else None,
    "generation t/s": lambda row: float(row["generate"]["tps"]),
}
BASELINE = ("off", "upstream")  # what everything else stands on: without plugins nothing may differ
SAME, BEST = "same flags", "best ub"


def select(rows: Iterable[Row], **wanted: Any) -> list[Row]:
    """Rows whose fields have these values."""
    return [row for row in rows if all(row[key] == value for key, value in wanted.items())]


def kinds(rows: Iterable[Row]) -> list[tuple[int, int]]:
    """The (sessions, depth) of these rows, in reading order."""
    return sorted({(row["n_sessions"], row["depth"]) for row in rows})


def comparisons(result: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The first side against each other one and `off` against `upstream`, in each cell that both have.

    Where `upstream` is the first one, the others are compared with it. A pair of values is of the same cell and repeat;
    fewer than three have a mean ratio and neither interval nor verdict. Cells are never pooled: what a side gains depends on
    the depth, and an interval over several depths would be of how they differ.
    """
    names = [side["name"] for side in result["sides"]]
    which = [(other, names[0]) if names[0] == BASELINE[1] else (names[0], other) for other in names[1:]]
    if names[0] not in BASELINE and set(BASELINE) <= set(names):
        which.append(BASELINE)
    rows = select(result["rows"], kind=SAME)
    return [
        {"a": first, "b": other, "metric": metric, "n_sessions": n, "depth": depth, **found}
        for first, other in which
        for metric, value in METRICS.items()
        for n, depth in kinds(rows)
        if (found := _cell([select(rows, side=side, n_sessions=n, depth=depth) for side in (first, other)], value))
    ]


def _cell(sides: Sequence[Sequence[Row]], value: Callable[[Row], float | None]) -> dict[str, Any]:
    """What the pairs of one cell say; {} where there is none."""
    mine, theirs = (_values(rows, value) for rows in sides)
    both = sorted(mine.keys() & theirs.keys())
    a, b = [mine[r] for r in both], [theirs[r] for r in both]
    if len(both) >= pairs.N_PAIRS_MIN:
        return pairs.compare(a, b).json()
    if not both:
        return {}
    mean = float(np.exp(np.mean(np.log(a) - np.log(b))))
    return {"n_pairs": len(both), "mean": mean, "interval": None, "verdict": None}


def comparison_lines(result: Mapping[str, Any]) -> list[str]:
    """The same in words, a line for each two sides and metric."""
    names = {side["name"]: side["label"] for side in result["sides"]}
    lines: dict[str, list[str]] = {}
    for c in comparisons(result):
        head = f"{names[c['a']]} / {names[c['b']]}, {c['metric']}"
        lines.setdefault(head, []).append(f"{c['n_sessions']} x {depth_name(c['depth'])} {_ratio(c)}")
    return [f"{head}: {'; '.join(cells)}" for head, cells in lines.items()]


def _ratio(c: Mapping[str, Any]) -> str:
    n = c["n_pairs"]
    if c["interval"] is None:
        return f"{c['mean']:.3f} ({n} pair{'s'[: n > 1]}, no interval)"
    low, high = c["interval"]
    return f"{c['mean']:.3f} ({low:.3f} … {high:.3f} at 99 %, {n} pairs): {_verdict(c['verdict'])}"


def _values(rows: Iterable[Row], value: Callable[[Row], float | None]) -> dict[int, float]:
    """The value of each repeat that has one."""
    found = {row["repeat"]: value(row) for row in rows}
    return {repeat: number for repeat, number in found.items() if number is not None}


def markdown(result: Mapping[str, Any]) -> str:
    """The whole result as markdown."""
    names = {side["name"]: side["label"] for side in result["sides"]}
    lines = [_heading(result), "", *cell_table(result, SAME), ""]
    for size_row in result.get("best_ub", {}).items():
        side, chosen = size_row
        rates = ", ".join(f"{size}: {rate:.1f}" for size, rate in chosen["prefill_tps"].items())
        lines += [f"Best -ub of {names[side]}: {chosen['best']} (prefill t/s: {rates})", ""]
    if select(result["rows"], kind=BEST):
        lines += ["With each side's best -ub:", "", *cell_table(result, BEST), ""]
    lines += [*latency_table(result), ""]
    lines += [f"* {line}" for line in comparison_lines(result)]
    for line in left_out_lines(result):
        lines.append(f"* {line}")
    return "\n".join(lines).rstrip()


def _verdict(verdict: str) -> str:
    return {"A higher": "faster", "A lower": "slower"}.get(verdict, verdict)


def _heading(result: Mapping[str, Any]) -> str:
    record = result["record"]
    model = record.get("model") or {}
    what = model.get("synthetic") or model.get("file") or "another server's model"
    return f"{machine_title(record['machine'])}; {what}; `{' '.join(record['flags'])}`; {result['order']}"


def machine_title(machine: Mapping[str, Any]) -> str:
    """A machine in words."""
    gpus = machine.get("gpus") or []
    if gpus:
        return f"{len(gpus)} x {gpus[0]['name']}"
    return f"{machine['cpu']}, {machine['n_cpus_usable']} cores"


def left_out_lines(result: Mapping[str, Any]) -> list[str]:
    """What was not measured, one line for each cell and reason."""
    return [
        f"left out: {c['n_sessions']} x {depth_name(c['depth'])}, measurement {c['repeat'] + 1}"
        + (f" of {c['side']}" if c["side"] else "")
        + f": {c['reason']}"
        for c in result["left_out"]
    ]


def cell_table(result: Mapping[str, Any], kind: str = SAME) -> list[str]:
    """Rates of all sides: medians over the repeats; several sessions with the mean per session in parentheses."""
    rows = select(result["rows"], kind=kind)
    sides = [side for side in result["sides"] if select(rows, side=side["name"])]
    head = ["sessions", "depth"] + [f"{what}, {side['label']}" for what in METRICS for side in sides]
    lines = [_line(head), _line(["---:"] * len(head))]
    for n, depth in kinds(rows):
        values = [str(n), depth_name(depth)]
        for phase in ("prefill", "generate"):
            for side in sides:
                values.append(_rate(select(rows, side=side["name"], n_sessions=n, depth=depth), phase))
        lines.append(_line(values))
    return lines


def _rate(rows: Sequence[Row], phase: str) -> str:
    rows = [row for row in rows if row[phase]]
    if not rows:
        return ""
    total = float(np.median([row[phase]["tps"] for row in rows]))
    each = float(np.median([row[phase]["slot_tps"] for row in rows]))
    return number(total) if rows[0]["n_sessions"] == 1 else f"{number(total)} ({number(each)})"


def latency_table(result: Mapping[str, Any], kind: str = SAME) -> list[str]:
    """Time to first token, time between tokens, memory."""
    rows = select(result["rows"], kind=kind)
    head = [
        "sessions",
        "depth",
        "side",
        "TTFT s",
        "ITL p50 ms",
        "p90",
        "p99",
        "max",
        "host MiB",
        "GPU MiB",
        "GPU %",
        "PCIe in MB/s",
    ]
    lines = [_line(head), _line(["---:", "---:", "---", *["---:"] * (len(head) - 3)])]
    for n, depth in kinds(rows):
        for side in result["sides"]:
            mine = select(rows, side=side["name"], n_sessions=n, depth=depth)
            if mine:
                lines.append(_line([str(n), depth_name(depth), side["label"], *_latencies(mine)]))
    return lines


def _latencies(rows: Sequence[Row]) -> list[str]:
    computed = [row for row in rows if row["prefill"]]
    ttft = float(np.median([max(row["prefill"]["ttft_ms"]) for row in computed])) / 1000 if computed else None
    itl = [float(np.median([row["generate"]["itl_ms"][key] for row in rows])) for key in ("p50", "p90", "p99", "max")]
    devices = [row["generate_watch"]["devices"] for row in rows][-1]
    loads = computed[-1]["prefill_watch"]["devices"] if computed else []
    rss = rows[-1]["generate_watch"]["host_rss_mib"]
    return [
        "" if ttft is None else f"{ttft:.2f}",
        *(f"{value:.1f}" for value in itl),
        "" if rss is None else f"{rss:.0f}",
        _devices(devices, ("process_memory_mib", "memory_mib"), "max"),
        _devices(loads, ("gpu_percent",), "mean"),
        _devices(loads, ("pcie_rx_mb_s",), "mean"),
    ]


def _devices(devices: Sequence[Mapping[str, Any]], names: Sequence[str], which: str) -> str:
    found = [next((d[name][which] for name in names if name in d), None) for d in devices]
    return " / ".join(f"{value:.0f}" for value in found if value is not None)


def number(value: float) -> str:
    """Three or four digits."""
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def _line(values: Iterable[str]) -> str:
    return "| " + " | ".join(values) + " |"
