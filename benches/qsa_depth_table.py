"""From a qsa-depth's JSON to its table, and to the ratios that its targets are about. Nothing here measures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import mean
from typing import Any

from .grid_cells import depth_name
from .grid_table import number

BENCH = "qsa-depth"
LABELS = {"on": "native QSA", "off": "switched off", "upstream": "unpatched"}
METRICS = {"prefill_tps": "prefill", "decode_tps": "decode"}


def rate(result: Mapping[str, Any], n_sessions: int, depth: int, side: str, metric: str) -> float | None:
    """Mean over the repeats; None where it was not measured."""
    found = [
        row[metric]
        for row in result["rows"]
        if row.get("n_sessions") == n_sessions and row["depth"] == depth and row["side"] == side and metric in row
    ]
    return mean(found) if found else None


def table(result: Mapping[str, Any]) -> str:
    """The result as markdown."""
    sides = result["sides"]
    others = [side for side in sides if side != "on"]
    kinds = sorted({(row["n_sessions"], row["depth"]) for row in result["rows"] if "n_sessions" in row})
    head = ["", "sessions", "depth", *(f"{LABELS[side]}, t/s" for side in sides)]
    head += [*(f"native / {LABELS[side]}" for side in others), "native / native at the first depth"]
    lines = [_line(head), _line(["---", *["---:"] * (len(head) - 1)])]
    for metric, name in METRICS.items():
        first = next((rate(result, n, d, "on", metric) for n, d in kinds if n == 1), None)
        for n, depth in kinds:
            values = {side: rate(result, n, depth, side, metric) for side in sides}
            mine = values["on"]
            if mine is None:
                continue
            cells = [name, str(n), depth_name(depth), *(number(v) if v else "" for v in values.values())]
            cells += [f"{mine / other:.2f}" if (other := values[side]) else "" for side in others]
            lines.append(_line([*cells, f"{mine / first:.2f}" if first and n == 1 else ""]))
    return "\n".join([*lines, *_memory(result, sides), *_compare(result)])


def _memory(result: Mapping[str, Any], sides: Sequence[str]) -> list[str]:
    lines = []
    rows = [row for row in result["rows"] if "compute_mib" in row]
    for n_devices in sorted({row["n_devices"] for row in rows}):
        mine = {row["side"]: row for row in rows if row["n_devices"] == n_devices}
        one = next(iter(mine.values()))
        what = ", ".join(f"{LABELS[side]} {_largest(mine[side])}" for side in sides if side in mine)
        where = f"{n_devices} virtual devices" if n_devices > 1 else "one device"
        lines.append(f"* largest compute buffer of {one['n_seq']} x {one['context']} on {where}, MiB: {what}")
    return ["", *lines] if lines else []


def _largest(row: Mapping[str, Any]) -> str:
    devices = {name: mib for name, mib in row["compute_mib"].items() if not name.endswith("_Host")}
    largest = max((devices or row["compute_mib"]).values(), default=0.0)
    return f"{largest:.0f}" + (" (pipeline)" if row["pipeline"] else "")


def _compare(result: Mapping[str, Any]) -> list[str]:
    names = {**LABELS, "again": "native QSA once more"}
    pairs: dict[str, list[Mapping[str, Any]]] = {}
    for row in result["rows"]:
        for pair, found in row.get("compare", {}).items():
            pairs.setdefault(pair, []).append(found)
    lines = []
    for pair, every in pairs.items():
        a, b = pair.split("/")
        n_same = sum(found["same_best"] for found in every)
        largest = max(found["largest"] for found in every)
        bits = "same bits" if all(found["same_bits"] for found in every) else f"logits within {100 * largest:.2g} %"
        lines.append(
            f"* {names[a]} and {names[b]}, a token at each depth: {bits}, same best token {n_same} of {len(every)}"
        )
    return ["", *lines] if lines else []


def _line(values: Sequence[str]) -> str:
    return "| " + " | ".join(values) + " |"
