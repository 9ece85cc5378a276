"""What `llamamg bench gate` measures in one engine, piece by piece, so that what is there can be shown at any time."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from llamamg.engine import Engine

from .gate_policy import Policy
from .gate_stage import Stage

ORDER = (False, True, True, False) * 2  # gate off, on, on, off: what drifts slowly falls on both alike


@dataclass(frozen=True, slots=True)
class Plan:
    """Sizes from the command line."""

    args: argparse.Namespace
    chunks: list[int]
    then: tuple[int, int] | None


def measure(engine: Engine, plan: Plan, policies: list[Policy], out: dict[str, Any]) -> Iterator[None]:
    """Fill `out`; yields after each piece. Solo rate, sessions alone, t(c), policies, the gate where it has nothing to do."""
    args = plan.args
    stage = Stage(engine, args.prompt, args.short)
    on = next((policy for policy in policies if policy.options), Policy.parse(""))
    out["solo_tps"] = stage.solo(args.solo)
    out["cases"] = []
    if args.block:
        _say("prompts by themselves, gate on and off")
        out["prefill_only"] = _blocks(stage, on, lambda: stage.prefill(args.block))
    yield
    for case, (n_decoders, n_prompts) in enumerate(
        [(args.decoders, args.prompts), *([plan.then] if plan.then else [])]
    ):
        _say(f"{n_decoders} sessions begin")
        stage.decode(n_decoders, args.depth)
        part: dict[str, Any] = {"decoders": n_decoders, "prompts": n_prompts, "rows": []}
        part["alone_ms"] = spread(stage.alone(args.alone))
        out["cases"].append(part)
        if case == 0:
            if args.block_steps:
                _say("sessions by themselves, gate on and off")
                out["decode_only"] = _blocks(stage, on, lambda: _seconds(stage, args.block_steps))
            part["steps"] = stage.steps_of(plan.chunks, args.steps)
            yield
        for policy in policies if case == 0 else policies[:1]:
            _say(f"policy {policy.text}")
            part["rows"].append(row := _row(stage, policy, n_prompts, args))
            _say(
                f"p99 {row['p99_ratio']:.2f}x, largest {row['max_ratio']:.2f}x, share {100 * row['prefill_share']:.0f} %"
            )
            yield


def _row(stage: Stage, policy: Policy, n_prompts: int, args: argparse.Namespace) -> dict[str, Any]:
    solo_tps = stage.solo_rate(1 << 40)
    # Sessions grow deeper and slower all the time: what they take alone is looked at right before and right after.
    stage.use(None)
    n_around = max(20, args.alone // 8)
    around = stage.alone(n_around)
    seconds = policy.seconds or args.seconds
    row = stage.under(policy, n_prompts, n_gaps=args.gaps, seconds=seconds, solo_tps=solo_tps)
    stage.use(None)
    around += stage.alone(n_around)
    alone_ms = float(np.median(around))
    gaps = row.pop("gaps_ms")
    itl = spread(gaps)
    # Compared with a prompt alone as far as these got: attention to what is behind them costs the same in both.
    solo = stage.solo_rate(row["n_tokens"] // max(1, row["n_prompts_begun"]))
    return {
        "policy": policy.text,
        **row,
        "alone_ms": alone_ms,
        "itl_ms": itl,
        "n_gaps": len(gaps),
        "prefill_share": row["prefill_tps"] / solo,
        "p99_ratio": itl["p99"] / alone_ms,
        "max_ratio": itl["max"] / alone_ms,
    }


def _blocks(stage: Stage, policy: Policy, block: Callable[[], float]) -> dict[str, Any]:
    """Seconds of equal blocks with the gate off and on; the ratio of their medians."""
    seconds: dict[bool, list[float]] = {False: [], True: []}
    for is_on in ORDER:
        stage.use(policy if is_on else None)
        seconds[is_on].append(block())
    stage.use(None)
    off, on = (float(np.median(seconds[is_on])) for is_on in (False, True))
    return {"off_s": seconds[False], "on_s": seconds[True], "ratio": on / off}


def _seconds(stage: Stage, n_steps: int) -> float:
    begin = time.perf_counter()
    stage.alone(n_steps)
    return time.perf_counter() - begin


def spread(values_ms: list[float]) -> dict[str, float]:
    """Median, 99th percentile and largest."""
    p50, p99, most = (float(v) for v in np.percentile(values_ms, (50, 99, 100)))
    return {"p50": p50, "p99": p99, "max": most}


def _say(what: str) -> None:
    print(f"{what} …", file=sys.stderr, flush=True)
