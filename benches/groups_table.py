"""From the runs of groups.py to its figures. Nothing here measures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from .grid_cells import depth_name
from .multi_gpu_rows import ideal_rate

Row = Mapping[str, Any]
KEY = ("side", "devices", "rpc_threads", "n_groups", "n_sessions", "depth", "shallow")


def key(row: Row) -> tuple[Any, ...]:
    """What runs of one row have in common; sortable."""
    return tuple(row[name] or 0 if name == "rpc_threads" else row[name] for name in KEY)


def joined(runs: Sequence[Row]) -> dict[str, Any]:
    """One row from its runs: the median counts."""
    return {
        **{name: runs[0][name] for name in KEY},
        "tps": median(run["tps"] for run in runs),
        "runs": [run["tps"] for run in runs],
        "overlaps": sum(run["effect"] for run in runs),
    }


def best(rows: Sequence[Row], n_stages: int) -> list[dict[str, Any]]:
    """For each depth and number of sessions that was measured over all devices: groups against everything else.

    `ideal` is what the steps of one device allow over `n_stages`; without them the steps of the best single context count.
    """
    ours = [row for row in rows if row["side"] == "ours" and not row["shallow"]]
    over_all = [row for row in ours if row["devices"] == "all"]
    return [
        _best(rows, [row for row in ours if row["depth"] == depth], depth, n, n_stages)
        for depth in sorted({row["depth"] for row in over_all})
        for n in sorted({row["n_sessions"] for row in over_all if row["depth"] == depth})
    ]


def _best(rows: Sequence[Row], ours: Sequence[Row], depth: int, n: int, n_stages: int) -> dict[str, Any]:
    here = [row for row in ours if row["devices"] == "all" and row["n_sessions"] == n]
    one = max((row for row in here if row["n_groups"] == 1), key=_tps, default=None)
    several = max((row for row in here if row["n_groups"] > 1), key=_tps, default=None)
    found: dict[str, Any] = {"depth": depth, "n_sessions": n, "one": one and one["tps"]}
    found["several"] = several and several["tps"]
    if one and several:
        found["n_groups"], found["ratio"] = several["n_groups"], several["tps"] / one["tps"]
    reached = max((row["tps"] for row in (one, several) if row), default=0.0)
    found["reached"] = reached
    steps, where = _steps(ours)
    if where == "one" and n in steps:
        found["of_one_device"] = reached * steps[n] / n
    if n_stages and set(range(1, n + 1)) <= set(steps):
        found["steps_ms"] = {str(b): 1000 * seconds for b, seconds in sorted(steps.items())}
        found["ideal"] = ideal_rate(steps, n, n_stages)
        found["of_ideal"] = reached / found["ideal"]["tps"]
    for devices in ("one", "all"):
        plain = {
            row["n_groups"]: row["tps"]
            for row in rows
            if (row["side"], row["devices"], row["n_sessions"], row["depth"]) == ("unpatched", devices, n, depth)
        }
        if {1, n} <= set(plain):
            found[f"stock_{devices}"] = {"one": plain[1], "contexts": plain[n], "ratio": plain[n] / plain[1]}
    if "stock_all" in found:
        found["of_stock"] = reached / found["stock_all"]["contexts"]
    return found


def uneven(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """One deep session beside shallow ones in a context: what of the deep sessions' extra time a single one costs.

    1/n when each costs its own work, 1 when all cost as much as the deepest.
    """
    ms = {key(row): 1000 * row["n_sessions"] / row["tps"] for row in rows}
    out = []
    for row in rows:
        if row["shallow"]:
            all_deep = ms.get(key({**row, "shallow": 0}))
            all_shallow = ms.get(key({**row, "depth": row["shallow"], "shallow": 0}))
            if all_deep and all_shallow:
                found = {"ms": ms[key(row)], "all_deep_ms": all_deep, "all_shallow_ms": all_shallow}
                part = (found["ms"] - all_shallow) / (all_deep - all_shallow) if all_deep > all_shallow else 0.0
                out.append({name: row[name] for name in ("n_sessions", "depth", "shallow")} | found | {"part": part})
    return out


def _tps(row: Row) -> float:
    return float(row["tps"])


def _steps(ours: Sequence[Row]) -> tuple[dict[int, float], str]:
    """Seconds of a step of b sessions: on one device where that was measured, else in the best single context."""
    where = "one" if any(row["devices"] == "one" for row in ours) else "all"
    single = sorted((row for row in ours if row["n_groups"] == 1 and row["devices"] == where), key=_tps)
    return {row["n_sessions"]: row["n_sessions"] / row["tps"] for row in single}, where  # the fastest comes last


def table(result: Mapping[str, Any]) -> str:
    """The result for people."""
    lines = []
    for row in result["rows"]:
        where = f"-t {row['rpc_threads']}" if row["rpc_threads"] else f"{row['devices']:<3}"
        kind = "groups" if row["side"] == "ours" else "contexts"
        runs = " ".join(f"{tps:.1f}" for tps in row["runs"])
        lines.append(
            f"{row['side']:<9}  {where}  {_depth(row):>9}  {row['n_sessions']} sessions  "
            f"{row['n_groups']} {kind:<8}  {row['tps']:8.1f} t/s   ({runs})"
        )
    for found in result["best"]:
        lines += _sentences(found)
    for found in result["uneven"]:
        lines.append(
            f"one session at {depth_name(found['depth'])} beside {found['n_sessions'] - 1} at {depth_name(found['shallow'])}: "
            f"{found['ms']:.2f} ms a step, all deep {found['all_deep_ms']:.2f}, all shallow {found['all_shallow_ms']:.2f}: "
            f"it costs {found['part']:.2f} of what all deep ones cost more"
        )
    return "\n".join(lines)


def _depth(row: Row) -> str:
    return depth_name(row["depth"]) + (f"+{depth_name(row['shallow'])}" if row["shallow"] else "")


def _sentences(found: Mapping[str, Any]) -> list[str]:
    lines = [f"{found['n_sessions']} sessions at {depth_name(found['depth'])}: {found['reached']:.1f} t/s at best"]
    if "ratio" in found:
        lines.append(f"  {found['n_groups']} groups are {found['ratio']:.2f}x of the best single context")
    if "of_one_device" in found:
        lines.append(f"  {found['of_one_device']:.2f}x of one device")
    if "ideal" in found:
        steps = ", ".join(f"{b}: {ms:.2f}" for b, ms in found["steps_ms"].items())
        ideal = found["ideal"]
        lines.append(
            f"  ms of a step of so many sessions: {steps}; possible with them: {ideal['tps']} t/s in {ideal['n_groups']} "
            f"groups; reached {found['of_ideal']:.2f} of that"
        )
    for devices in ("one", "all"):
        if plain := found.get(f"stock_{devices}"):
            where = "one device" if devices == "one" else "all devices"
            lines.append(
                f"  plain library on {where}: {plain['one']:.1f} t/s in one context, {plain['contexts']:.1f} in "
                f"{found['n_sessions']} ({plain['ratio']:.2f}x)"
            )
    if "of_stock" in found:
        lines.append(f"  ours is {found['of_stock']:.2f}x of the plain library's {found['n_sessions']} contexts")
    return lines
