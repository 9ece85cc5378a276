"""What of a soak's result is a failure, and the result for people."""

from __future__ import annotations

from typing import Any

from .soak_equal import N_PROBS
from .soak_memory import leaks

CONTROL_SPARE = 0.1  # part of the answers that may change beyond the control's: it is small, and luck counts


def failures(found: dict[str, Any]) -> list[str]:
    """What is wrong, a sentence each."""
    out = []
    control = found["equal"].get("control", {})
    by_itself = len(control.get("changed", ())) / max(1, control.get("n", 0))
    for name in ("burst", "soak"):
        if found[name]["n_errors"]:
            out.append(f"{name}: {found[name]['n_errors']} errors, the first: {found[name]['errors'][0]}")
        equal = found["equal"].get(name, {})
        changed = equal.get("changed", ())
        far = [one for one in changed if one["behind_nats"] is None]
        if far:  # rounding does not do that, however often a control's answers change
            out.append(
                f"{name}: {len(far)} answers have a token that is not among the {N_PROBS} best, the first: {far[0]}"
            )
        elif len(changed) > (by_itself + CONTROL_SPARE * bool(control)) * equal.get("n", 0):
            out.append(f"{name}: {len(changed)} answers differ from the same request alone, the first: {changed[0]}")
    if found["n_busy_slots"]:
        out.append(f"{found['n_busy_slots']} slots are still busy after everybody left")
    if not found["alive"]:
        out.append("the server's process has ended")
    if found["bad_words_in_log"]:
        out.append(f"the server's log has {', '.join(found['bad_words_in_log'])}")
    return [*out, *leaks(found["memory_mib"], found["checkpoints_most"])]


def table(result: dict[str, Any]) -> str:
    """The result for people."""
    soaked, lines = result["soak"], []
    lines.append(
        f"{result['soak_s']:.0f} s: {soaked['n_finished']} answered, {soaked['n_cancelled']} left early, "
        f"{soaked['n_tokens']} tokens, {soaked['n_errors']} errors"
    )
    for name, equal in result["equal"].items():
        lines.append(
            f"{name}: {equal['n']} asked again alone, {equal['n_equal']} equal, {equal['n_ties']} near ties, "
            f"{len(equal['changed'])} changed"
        )
    for look in result["memory_mib"]:
        lines.append(
            f"memory MiB: host {look['host']}, of it {look.get('n_checkpoints') or 0:.0f} checkpoints "
            f"{look.get('checkpoints') or 0.0:.1f}, devices {look['devices']}"
        )
    return "\n".join([*lines, *(f"FAILED: {sentence}" for sentence in result["failures"])])
