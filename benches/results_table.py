"""README's tables of results, made from benches/results alone: grids and native QSA of each machine's newest day."""

from __future__ import annotations

from collections.abc import Mapping
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
        parts += [_grid(found) for found in newest_day(against, "grid")]
        parts += [_depth(found) for found in newest_day(results, qsa_depth_table.BENCH)]
    return "\n\n".join(parts) or "Nothing is measured yet: `llamamg bench grid` measures on your machine."


def _is_against_upstream(found: Found) -> bool:
    """Whether a grid has a side of the unpatched server: our sides among themselves are for a page that explains them."""
    return any(side["name"] == "upstream" for side in found.value.get("sides", []) if isinstance(side, dict))


def _grid(found: Found) -> str:
    record = found.value["record"]
    where = f"{FOLDER}/{found.machine}/{found.run}"
    lines = [
        f"**{machine_title(record['machine'])}**, {record['date'][:10]}, {model_name(record.get('model') or {})}, "
        f"`{' '.join(record['flags'])}` ([everything about it]({where})):",
        "",
        *cell_table(found.value),
        *_verdicts(found.value),
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
