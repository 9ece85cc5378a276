"""What a prompt costs the streams beside it: `llamamg bench gate [flags of llamamg serve]`.

One process, one set of sessions that decode. First t(c), the time of a step with c prompt tokens beside them, and the
bound it implies; then the same prompt under each policy: gaps between tokens against those of the sessions alone, and the
prompt's rate against its rate when nobody decodes. `off` is upstream's way to fill a batch.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import numpy as np

from llamamg.plugins.testing import unconfigured

from . import program, record
from .arguments import NO_CACHE, add_results, record_of
from .errors import BenchError
from .flags import config_of, model_path, opened, take_models
from .gate_stage import Policy, Stage, Switched
from .grid_cells import parse_counts

NAME = "gate"
HELP = "time of a step with c prompt tokens, and what each policy of prefill-gate makes of it"
SERVE_FLAGS = True
POLICIES = (
    "itl-ratio=3,min-share=0.3",
    "itl-ratio=2,min-share=0.3",
    "itl-target-ms=60",
    "chunk=256,itl-ratio=0",
    "off",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the command line."""
    add = parser.add_argument
    add("--decoders", type=int, default=2, metavar="N", help="sessions that decode (default %(default)s)")
    add("--prompts", type=int, default=1, metavar="N", help="prompts that arrive together (default %(default)s)")
    add("--depth", type=int, default=512, metavar="N", help="tokens a session begins with (default %(default)s)")
    add("--prompt", type=int, default=2048, metavar="N", help="tokens of an arriving prompt (default %(default)s)")
    add("--short", type=int, default=0, metavar="N",
        help="a prompt of so many tokens arrives in the middle of the long ones; 0: none (default %(default)s)")  # fmt: skip
    add("--chunks", default="1,2,4,8,16,32,64,128,256,512", metavar="LIST", help="values of c (default %(default)s)")
    add("--steps", type=int, default=10, metavar="N", help="steps timed for each c (default %(default)s)")
    add("--alone", type=int, default=500, metavar="N", help="steps timed without a prompt (default %(default)s)")
    add("--policy", action="append", default=[], metavar="OPTIONS",
        help="options of prefill-gate, e.g. itl-target-ms=60,min-share=0.3, or off; repeat it for several "
        f"(default: {' '.join(POLICIES)})")  # fmt: skip
    add_results(parser)


def run(args: argparse.Namespace) -> int:
    """Measure, keep, print."""
    for name, least in (("decoders", 1), ("prompts", 1), ("depth", 8), ("prompt", 64), ("steps", 4), ("alone", 20)):
        if getattr(args, name) < least:
            raise BenchError(f"--{name} must be at least {least}")
    chunks = parse_counts(args.chunks, "--chunks")
    policies = [Policy.parse(text) for text in args.policy or POLICIES]
    models, given = take_models(args.flags)
    model = model_path(models[0] if models else "demo")
    n_slots = args.decoders + args.prompts + (args.short > 0)
    need = max(args.depth + args.alone + 64 * len(policies) + 4096, args.prompt + 64)
    n_ctx = n_slots * -(-need // 256) * 256
    flags = ["-m", str(model), "-np", str(n_slots), "--no-kv-unified", "-c", str(n_ctx), "-lv", "2", *NO_CACHE, *given]
    config = config_of(flags)
    plugins = unconfigured(Switched, enable=(Switched.declaration.name,))
    with record.ResultFolder(NAME, args.results) as folder, opened(config, plugins) as engine:
        stage = Stage(engine, args.decoders, args.depth, args.prompt, args.prompts, args.short)
        result = measure(stage, chunks, policies, args)
        result = {
            "bench": NAME,
            "sizes": {name: getattr(args, name) for name in ("decoders", "prompts", "depth", "prompt", "short")},
            **result,
            "record": record_of(config.build, Path(model)),
        }
        folder.write("result.json", result)
        folder.text("table.txt", table(result) + "\n")
    print(table(result))
    print(f"kept in {folder.final}", file=sys.stderr)
    return 0


def measure(stage: Stage, chunks: list[int], policies: list[Policy], args: argparse.Namespace) -> dict[str, Any]:
    """Solo rate, the decoders alone, t(c), and each policy."""
    solo_tps = stage.solo()
    stage.begin_decoding()
    alone = _spread(stage.alone(args.alone))
    steps = stage.steps_of(chunks, args.steps)
    rows = []
    for policy in policies:
        print(f"policy {policy.text} …", file=sys.stderr, flush=True)
        rows.append({"policy": policy.text, **stage.under(policy)})
    for row in rows:
        gaps = row.pop("gaps_ms")
        row["itl_ms"] = _spread(gaps)
        row["n_gaps"] = len(gaps)
        row["prefill_share"] = row["prefill_tps"] / solo_tps
        row["p99_ratio"], row["max_ratio"] = (row["itl_ms"][k] / alone["p50"] for k in ("p99", "max"))
    return {"solo_tps": solo_tps, "alone_ms": alone, "steps": steps, "rows": rows}


def _spread(values_ms: list[float]) -> dict[str, float]:
    p50, p99, most = (float(v) for v in np.percentile(values_ms, (50, 99, 100)))
    return {"p50": p50, "p99": p99, "max": most}


def bound(result: dict[str, Any], ratio: float) -> tuple[int, float]:
    """The largest c whose step takes at most `ratio` of one without prompt, and the prompt's share of its solo rate there."""
    limit = ratio * result["alone_ms"]["p50"]
    fitting = [s for s in result["steps"] if s["t_ms"] <= limit]
    if not fitting:
        return 0, 0.0
    best = max(fitting, key=lambda s: s["chunk"])
    return best["chunk"], 1e3 * best["chunk"] / best["t_ms"] / result["solo_tps"]


def table(result: dict[str, Any]) -> str:
    """What is printed, made from the result alone."""
    s, alone = result["sizes"], result["alone_ms"]
    lines = [
        f"{s['decoders']} sessions decode at {s['depth']} tokens; {s['prompts']} prompt(s) of {s['prompt']} tokens",
        f"prompt alone {result['solo_tps']:.0f} t/s; sessions alone {alone['p50']:.2f} ms a step "
        f"(p99 {alone['p99']:.2f}, largest {alone['max']:.2f})",
        "",
        f"{'c':>5} {'t(c) ms':>9} {'x alone':>8} {'prompt t/s':>11} {'of solo':>8}",
    ]
    for step in result["steps"]:
        rate = 1e3 * step["chunk"] / step["t_ms"]
        lines.append(
            f"{step['chunk']:>5} {step['t_ms']:>9.2f} {step['t_ms'] / alone['p50']:>8.2f} {rate:>11.0f} "
            f"{100 * rate / result['solo_tps']:>7.0f}%"
        )
    for ratio in (2, 3, 5, 7):
        chunk, share = bound(result, ratio)
        lines.append(
            f"bound: a step of at most {ratio}x alone takes c = {chunk}, the prompt {100 * share:.0f} % of solo"
        )
    lines += [
        "",
        f"{'policy':<36} {'p50 ms':>8} {'p99 ms':>8} {'largest':>8} {'p99 x':>6} {'max x':>6} {'share':>6} {'short ttft ms':>14}",
    ]
    for row in result["rows"]:
        itl, short = row["itl_ms"], row.get("short_ttft_ms")
        lines.append(
            f"{row['policy']:<36} {itl['p50']:>8.1f} {itl['p99']:>8.1f} {itl['max']:>8.1f} {row['p99_ratio']:>6.2f} "
            f"{row['max_ratio']:>6.2f} {100 * row['prefill_share']:>5.0f}% {f'{short:.0f}' if short else '-':>14}"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(program.alone(sys.modules[__name__]))
