"""From the rows of an ablation to its table, its bars and what it says of each plugin. Nothing here measures."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .judge import ACTED, NO_EFFECT, NOT_APPLICABLE, NOT_MEASURED, TOKENS_CHANGED, sentence
from .tables import word


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Per plugin: where it acted, and whether that is as it should be."""
    out: dict[str, Any] = {}
    for name in dict.fromkeys(row["plugin"] for row in rows):
        mine = [row for row in rows if row["plugin"] == name]
        acted = [f"{row['load']} on {row['model']}" for row in mine if row["status"] == ACTED]
        bad = [row for row in mine if row["status"] in (TOKENS_CHANGED, NOT_MEASURED)]
        idle = all(row["status"] in (NO_EFFECT, NOT_APPLICABLE) for row in mine)
        applies = any(row["status"] != NOT_APPLICABLE for row in mine)
        if bad:
            says = f"{bad[0]['status']}: {bad[0]['reason']}"
        elif acted:
            says = f"acted: {', '.join(acted)}"
        elif applies:
            says = "applicable but no effect under any load"
        else:
            says = f"not applicable: {mine[0]['reason']}"
        counted = [row["tokens"]["on"] for row in mine if "tokens" in row]
        if counted and not bad:
            n, n_ties = (sum(one[key] for one in counted) for key in ("n_compared", "n_ties"))
            says += f"; {n} tokens compared in {len(counted)} rows, {n_ties} near ties"
        out[name] = {"ok": not bad and not (idle and applies), "acted": acted, "says": says}
    return out


def plot(result: dict[str, Any]) -> dict[str, Any]:
    """The bars: one per row that acted and metric, change in percent with its interval."""
    bars = [
        {
            "plugin": row["plugin"], "mode": row["mode"], "model": row["model"], "load": row["load"], "metric": name,
            "change_percent": m["change_percent"], "interval": m["change_interval"], "better": m["better"],
        }
        for row in result["rows"]
        for name, m in row.get("metrics", {}).items()
    ]  # fmt: skip
    return {"kind": "bars", "title": "What each plugin changes", "unit": "%", "confidence": 0.99, "bars": bars}


def table(result: Mapping[str, Any]) -> str:
    """The result for people. Loads under which the same sentence holds share a line."""
    lines: dict[tuple[str, str, str], list[str]] = {}  # what is said of a plugin with a model -> under which loads
    for row in result["rows"]:
        for text in _said(row):
            lines.setdefault((row["plugin"], row["model"].replace(".gguf", ""), text), []).append(row["load"])
    rows = [("plugin", "model", "load", f"{'metric':<12} {'change':>9} {'99 % interval':>20} pairs")]
    rows += [(plugin, model, ",".join(loads), text) for (plugin, model, text), loads in lines.items()]
    wide = [max(len(row[i]) for row in rows) for i in range(3)]
    out = ["  ".join([*(f"{row[i]:<{wide[i]}}" for i in range(3)), row[3]]) for row in rows]
    return "\n".join([*out, "", *(f"{name}: {entry['says']}" for name, entry in result["plugins"].items())])


def _said(row: Mapping[str, Any]) -> list[str]:
    if row["status"] == NO_EFFECT:
        return ["does nothing here"]
    if row["status"] != ACTED:
        return [sentence(row, row["effect_unit"])]
    return [
        f"{name:<12} {m['change_percent']:+7.1f} % {m['change_interval'][0]:+8.1f} … {m['change_interval'][1]:+6.1f} % "
        f"{row['n_pairs']:>5}  {word(m['better'])}"
        for name, m in row["metrics"].items()
    ]
