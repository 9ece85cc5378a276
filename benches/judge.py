"""From blocks with a plugin on and off to one row of a result: what it gained, whether it acted, whether answers changed."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from llamamg.guard import GuardKind

from . import pairs
from .errors import BenchError
from .pairs import N_PAIRS_MIN
from .session import Block
from .switching import Sides
from .tokens import Difference, Reference, TokenCount

N_PROBES = 2  # blocks in which a plugin must have acted once, or timing it is pointless
N_AGAIN = 2  # blocks of each side that must agree before a plugin that stood still is blamed
HIGHER_IS_BETTER = {
    "decode_tps": True,
    "prefill_tps": True,
    "itl_p50_ms": False,
    "itl_p99_ms": False,
    "itl_max_ms": False,
}
UNITS = {"decode_tps": "t/s", "prefill_tps": "t/s", "itl_p50_ms": "ms", "itl_p99_ms": "ms", "itl_max_ms": "ms"}

ACTED, NO_EFFECT, NOT_APPLICABLE = "acted", "no effect", "not applicable"
TOKENS_CHANGED, NOT_MEASURED = "tokens changed", "not measured"
STOOD_STILL = {"status": NO_EFFECT, "reason": "its effect counter did not move under this load"}


def judge(
    sides: Sides,
    plugin: str,
    metrics: tuple[str, ...],
    guard: GuardKind,
    n_pairs: int,
    told: Callable[[int, int], None] = lambda done, total: None,
    budget_s: float | None = None,
    by_times: bool = False,
) -> dict[str, Any]:
    """Measure A-B-B-A pairs (A is on) and judge them. A `budget_s` may shorten the run to fewer pairs. `by_times`: how long
    steps take decides what is computed together, so that near ties fall either way whatever a plugin promises."""
    first = sides.reference()
    reference = Reference(first.tokens, first.others)
    counts = {True: TokenCount(), False: TokenCount()}
    effect, probe_s = 0, 0.0
    for _ in range(N_PROBES):
        began = time.perf_counter()
        probe = sides.block(True)
        probe_s = time.perf_counter() - began
        effect += probe.effects.get(plugin, 0)
        if effect:
            break
    row: dict[str, Any] = {"plugin": plugin, "how": sides.how, "guard": guard.value, "effect": effect, "n_pairs": 0}
    counts[True].add(*reference.compare(probe.tokens))
    if effect == 0:
        changed = guard is not GuardKind.CLOSE and _changes_silently(sides, reference, counts)
        return {**row, **tokens_json(counts), **(_status(guard, counts, by_times) if changed else STOOD_STILL)}
    if budget_s is not None:
        n_pairs = max(N_PAIRS_MIN, min(n_pairs, int(budget_s / (2 * probe_s + 1e-9))))
    blocks: dict[bool, list[Block]] = {True: [], False: []}
    order = pairs.order(n_pairs)
    for i, side in enumerate(order):
        on = side == "A"
        block = sides.block(on)
        blocks[on].append(block)
        counts[on].add(*reference.compare(block.tokens))
        told(i + 1, len(order))
    row["effect"] += sum(block.effects.get(plugin, 0) for block in blocks[True])
    row["n_pairs"] = n_pairs
    row["n_recomputed"] = max(block.n_recomputed for side in blocks.values() for block in side)
    row["metrics"] = {name: compared(name, blocks[True], blocks[False]) for name in metrics}
    row.update(tokens_json(counts))
    return {**row, **_status(guard, counts, by_times)}


def _changes_silently(sides: Sides, reference: Reference, counts: dict[bool, TokenCount]) -> bool:
    """Whether answers are others with a plugin that says it did nothing: each time with it, and never without. Other
    plugins decide by times, so an answer may differ now and then by itself."""
    if not counts[True].n_changed:
        return False
    for _ in range(N_AGAIN):
        for on in (False, True):
            n_before = counts[on].n_changed
            counts[on].add(*reference.compare(sides.block(on).tokens))
            if (counts[on].n_changed > n_before) != on:
                return False
    return True


def compared(name: str, on: list[Block], off: list[Block]) -> dict[str, Any]:
    """One metric of both sides. `change_percent` and its interval are of on against off."""
    a, b = [round(block.metrics[name], 5) for block in on], [round(block.metrics[name], 5) for block in off]
    c = pairs.compare(a, b)
    said = c.json()
    del said["ratios"]  # of the two lists that are kept
    better = None if c.verdict == "no difference" else (c.verdict == "A higher") == HIGHER_IS_BETTER[name]
    return {
        "unit": UNITS[name],
        "on": a,
        "off": b,
        **said,
        "change_percent": 100 * (c.mean - 1),
        "change_interval": [100 * (c.low - 1), 100 * (c.high - 1)],
        "better": better,  # null: no difference is claimed
    }


def tokens_json(counts: dict[bool, TokenCount]) -> dict[str, Any]:
    """What was compared with the plugin on, and off, as a row has it."""
    return {"tokens": {"on": counts[True].json(), "off": counts[False].json()}}


def _status(guard: GuardKind, counts: dict[bool, TokenCount], by_times: bool) -> dict[str, Any]:
    """Whether the answers stayed the same, as far as the plugin promises that."""
    on, off = counts[True], counts[False]
    if off.first is not None:
        return {
            "status": NOT_MEASURED,
            "reason": f"the model does not repeat itself with the plugin off ({off.n_changed} sessions differed): "
            f"{_told(off.first)}",
        }
    changed = on.first
    if guard is GuardKind.EXACT and on.n_ties and changed is None and not by_times:
        return {
            "status": TOKENS_CHANGED,
            "reason": f"it promises the same bits and {on.n_ties} near ties fell the other way",
        }
    if changed is None or guard is GuardKind.CLOSE:
        return {"status": ACTED, "reason": None}
    return {"status": TOKENS_CHANGED, "reason": f"it promises {guard.value} and {_told(changed)}"}


def _told(changed: Difference) -> str:
    behind = "far" if changed.behind is None else f"{changed.behind:.2f} nats"
    return (
        f"session {changed.session} got token {changed.got} in place of {changed.expected} "
        f"at position {changed.position}, {behind} behind"
    )


def unmeasured(plugin: str, status: str, reason: str) -> dict[str, Any]:
    """A row without numbers."""
    return {"plugin": plugin, "status": status, "reason": reason, "n_pairs": 0}


def sentence(row: dict[str, Any], unit: str) -> str:
    """The row's outcome in words."""
    if row["status"] == ACTED:
        return f"acted: {row['effect']} {unit}"
    if row["status"] == NO_EFFECT:
        return f"applicable but no effect: {row['reason']}; choose a load in which it acts"
    return f"{row['status']}: {row['reason']}"


def failed(rows: list[dict[str, Any]]) -> bool:
    """Whether a row is an error."""
    return any(row["status"] in (NO_EFFECT, TOKENS_CHANGED, NOT_MEASURED) for row in rows)


def check_pairs(n_pairs: int) -> None:
    """Raises BenchError for a number of pairs that says nothing."""
    if n_pairs < N_PAIRS_MIN:
        raise BenchError(f"--pairs {n_pairs} is too few for an interval: use {N_PAIRS_MIN} or more, or leave it out")
