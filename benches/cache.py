"""What saving and restoring a session costs those that decode, how fast it is, and what a prompt takes after a restart.

Sessions decode in this process; beside them one long session is saved by the plugin async-cache, forgotten by its slot, and
restored, round after round. The same through libllama's own calls, which everybody waits for, is timed beside it.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from llamamg import architecture

from . import interrupt, program, record
from .arguments import add_results, record_of
from .cache_stage import CacheStage, copy_floor, cuda_device
from .errors import BenchError
from .flags import config_of, model_path, opened, take_models

NAME = "cache"
HELP = "what saving and restoring a session costs others; time to first token from memory and after a restart"
SERVE_FLAGS = True


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Sizes; all other words are flags of `llamamg serve`."""
    parser.add_argument("--tokens", type=int, default=8000, help="length of the session that is saved (default 8000)")
    parser.add_argument("--decoders", type=int, default=2, help="sessions that decode beside it (default 2)")
    parser.add_argument("--depth", type=int, default=64, help="tokens these begin with (default 64)")
    parser.add_argument("--rounds", type=int, default=12, help="saves and restores (default 12)")
    parser.add_argument("--alone", type=int, default=12, help="steps alone in each round (default 12)")
    parser.add_argument("--no-restart", action="store_true", help="leave out the start from disk")
    add_results(parser)


def run(args: argparse.Namespace) -> int:
    """Measure, print, keep."""
    if min(args.tokens, args.decoders, args.rounds, args.alone) < 1:
        raise BenchError("--tokens, --decoders, --rounds and --alone must be at least 1")
    models, given = take_models(args.flags)
    model = model_path(models[0] if models else "demo")
    n_slots = args.decoders + 1
    n_cells = -(-max(args.tokens + 64, args.depth + 4096) // 256) * 256
    own = ["-m", str(model), "-np", str(n_slots), "--no-kv-unified", "-c", str(n_slots * n_cells), "-lv", "2"]
    own += [] if any("cache-ram" in word for word in given) else ["-cram", "-1"]
    own += [] if any(word.endswith("cache-disk-gb") for word in given) else ["--cache-disk-gb", "1000"]
    with record.ResultFolder(NAME, args.results) as folder, tempfile.TemporaryDirectory() as disk:
        own += ["--cache-disk", disk]
        is_sparse = architecture(config_of([*own, *given])) == "qwen4exp"  # served with qsa, as by itself
        own += ["--enable", "only:async-cache" + ",qsa" * is_sparse]
        config = config_of([*own, *given])
        with opened(config) as engine:
            stage = CacheStage(engine, args.decoders, args.depth, args.tokens)
            result = measure(stage, args)
        if not args.no_restart:
            print("starting again …", file=sys.stderr, flush=True)
            with opened(config) as engine:
                stage = CacheStage(engine, args.decoders, args.depth, args.tokens)
                result["restart"] = stage.first_token(stage.session())
        result = {
            "bench": NAME,
            "sizes": {name: getattr(args, name) for name in ("tokens", "decoders", "depth", "rounds")},
            **result,
            "record": record_of(config.build, Path(model)),
        }
        folder.write("result.json", result)
        folder.text("table.txt", table(result) + "\n")
    print(table(result))
    print(f"kept in {folder.final}", file=sys.stderr)
    return 0


def measure(stage: CacheStage, args: argparse.Namespace) -> dict[str, Any]:
    """Cold prompt, speeds with nobody there, then rounds beside decoders."""
    print(f"computing a prompt of {args.tokens} tokens …", file=sys.stderr, flush=True)
    cold = stage.first_token(stage.session())
    stage.wait_for_disk()
    n_bytes = stage.n_session_bytes()
    device = cuda_device(stage.engine)
    idle = {
        "save_s": [stage.save_alone() for _ in range(3)],
        "restore_s": [stage.restore_alone() for _ in range(3)],
        **copy_floor(device, n_bytes),
    }
    stage.empty_slot()
    warm = stage.first_token(stage.session())
    stage.begin_decoding()
    gaps: dict[str, list[float]] = {"alone": [], "save": [], "restore": [], "libllama save": [], "libllama restore": []}
    waits: dict[str, list[float]] = {"save": [], "restore": []}
    for i in tqdm(range(args.rounds), desc="rounds", leave=False, disable=None):
        interrupt.check()
        stage.quiet()
        gaps["alone"] += stage.steps(args.alone)
        for what, act in (("save", stage.save_beside), ("restore", stage.restore_beside)):
            found, took = act()
            gaps[what] += found
            waits[what].append(took)
            stage.quiet()
        if i < 3:
            for what, own in (("libllama save", stage.own_save), ("libllama restore", stage.own_restore)):
                gaps[what] += own()
                stage.quiet()
    return {
        "n_bytes": n_bytes,
        "way": stage.way,
        "cold": cold,
        "warm": warm,
        "idle": idle,
        "gaps_ms": {name: [round(1e3 * gap, 3) for gap in values] for name, values in gaps.items()},
        "took_s": waits,
    }


def spread(values_ms: list[float]) -> tuple[float, float, float]:
    """Median, 99th percentile, largest."""
    p50, p99, most = (float(v) for v in np.percentile(values_ms, (50, 99, 100)))
    return p50, p99, most


def table(result: dict[str, Any]) -> str:
    """What is printed, made from the result alone."""
    s, mb = result["sizes"], result["n_bytes"] / 1e6
    alone = spread(result["gaps_ms"]["alone"])
    lines = [
        f"{s['decoders']} sessions decode at {s['depth']} tokens; a session of {s['tokens']} tokens ({mb:.0f} MB) is saved and "
        f"restored {s['rounds']} times, by {result['way']}",
        "",
        f"{'':<18} {'n':>5} {'p50 ms':>8} {'p99 ms':>8} {'largest':>8} {'p99 x':>6} {'largest x':>10}",
    ]
    for name, values in result["gaps_ms"].items():
        if values:
            p50, p99, most = spread(values)
            lines.append(
                f"{name:<18} {len(values):>5} {p50:>8.2f} {p99:>8.2f} {most:>8.2f} {p99 / alone[1]:>6.2f} "
                f"{most / alone[2]:>10.2f}"
            )
    idle = result["idle"]
    lines.append("")
    for what in ("save", "restore"):
        best = min(idle[f"{what}_s"])
        part = (
            f", {100 * mb / 1e3 / best / idle['copy_gb_s']:.0f} % of a {idle['copy']}" if idle.get("copy_gb_s") else ""
        )
        beside = float(np.median(result["took_s"][what]))
        lines.append(
            f"{what}: {mb / 1e3 / best:.2f} GB/s with nobody there{part}; beside decoders {1e3 * beside:.0f} ms"
        )
    lines.append("(a save lasts until rows and state are in host memory, a restore until the first batch behind it)")
    cold = result["cold"]["ttft_s"]
    lines.append(f"first token: computed {1e3 * cold:.0f} ms")
    for name, text in (("warm", "from memory"), ("restart", "from disk after a restart")):
        if name in result:
            found = result[name]
            lines.append(
                f"first token: {text} {1e3 * found['ttft_s']:.0f} ms, 1/{cold / found['ttft_s']:.0f} of it "
                f"({found['n_cached']} tokens restored)"
            )
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(program.alone(sys.modules[__name__]))
