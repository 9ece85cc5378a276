"""README's tables of results, made from benches/results alone: grids and native QSA of each machine's newest day.

Grids of one day that differ in their depths only are one table.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from . import qsa_depth_table
from .grid_table import cell_table, comparison_lines, machine_title
from .report_load import Found, machines, newest_day

FOLDER = "benches/results"


def results_table(root: Path | None = None) -> str:
    """Markdown for all machines; a sentence when nothing was measured yet."""
    parts = []
    for results in machines(root).values():
        against = [found for found in results if _is_against_upstream(found)]
        parts += [_grid(same) for same in _alike(newest_day(against, "grid"))]
        parts += [_depth(found) for found in newest_day(results, qsa_depth_table.BENCH)]
    return "\n\n".join(parts) or "Nothing is measured yet: `llamamg bench grid` measures on your machine."


def _is_against_upstream(found: Found) -> bool:
    """Whether a grid has a side of the unpatched server: our sides among themselves are for a page that explains them."""
    return any(side["name"] == "upstream" for side in found.value.get("sides", []) if isinstance(side, dict))


def _alike(grids: Sequence[Found]) -> list[list[Found]]:
    """Grids whose tables can be one: the same sides of the same model, with the same flags but for the context."""
    groups: dict[tuple[Any, ...], list[Found]] = {}
    for found in grids:
        record, sides = found.value["record"], found.value["sides"]
        names = tuple(side["label"] for side in sides)
        groups.setdefault((names, model_name(record.get("model") or {}), _flags(record), _peers(record)), []).append(
            found
        )
    return list(groups.values())


def _flags(record: Mapping[str, Any]) -> str:
    return re.sub(r" -c \d+", "", " ".join(record["flags"]))  # made for the depths


def _peers(record: Mapping[str, Any]) -> str:
    value = record.get("software", {}).get("environment", {}).get("GGML_CUDA_P2P")
    return f"GGML_CUDA_P2P={value} " if value else ""


def _grid(same: Sequence[Found]) -> str:
    """One table; a cell that was measured in several runs is the last one's."""
    result = dict(same[-1].value)
    names = {side["label"]: side["name"] for side in result["sides"]}
    result["rows"] = []
    for found in same:
        labels = {side["name"]: side["label"] for side in found.value["sides"]}
        rows = [{**row, "side": names[labels[row["side"]]]} for row in found.value["rows"]]
        cells = {(row["n_sessions"], row["depth"]) for row in rows}
        result["rows"] = [row for row in result["rows"] if (row["n_sessions"], row["depth"]) not in cells] + rows
    record = result["record"]
    where = [f"[{found.run}]({FOLDER}/{found.machine}/{found.run})" for found in same]
    lines = [
        f"**{machine_title(record['machine'])}**, {record['date'][:10]}, {model_name(record.get('model') or {})}, "
        f"`{_peers(record)}{_flags(record)}` (everything about it: {', '.join(where)}):",
        "",
        *cell_table(result),
        *_verdicts(result),
    ]
    return "\n".join(lines)


def _depth(found: Found) -> str:
    record = found.value["record"]
    where = f"{FOLDER}/{found.machine}/{found.run}"
    return (
        f"**{machine_title(record['machine'])}**, {record['date'][:10]}, {model_name(record['model'])}, native QSA over depth: "
        f"{found.value['cache_type']} cache, ubatches of {found.value['ubatch']} ([everything about it]({where})):\n\n"
        f"{qsa_depth_table.table(found.value)}"
    )


def model_name(model: Mapping[str, Any]) -> str:
    """The model in words."""
    file = str(model.get("file", "a model of another server"))
    return f"{file} (synthetic: {model['synthetic']})" if model.get("synthetic") else file


def _verdicts(result: Mapping[str, Any]) -> list[str]:
    lines = comparison_lines(result)
    return ["", *(f"* {line}" for line in lines)] if lines else []
