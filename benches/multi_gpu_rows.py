"""The rows of the run on several GPUs: each is one command of a bench that exists, with its own limit of time."""

from __future__ import annotations

import json
import os
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from llamamg import bench_cli
from llamamg.plugins import discover

from .errors import BenchError

PLUGIN = "decode-groups"
N_GROUPS_MAX = 8


@dataclass(frozen=True, slots=True)
class Sizes:
    """How much a row does."""

    depths: str
    copy_from: str  # depth from which sessions side by side are copies of one
    group_depths: str
    group_tokens: int
    pipeline: str  # arguments of its bench
    deep: str
    n_predict: int
    mixed: tuple[int, int, int]  # depth of the decoders, arriving prompt, tokens
    soak: tuple[int, int]  # longest prompt, longest answer
    context: int  # tokens of all slots, for what doctor says about memory
    minutes: float = 1.0  # factor of every limit


FULL = Sizes(
    depths="5k,50k,150k",
    copy_from="50k",
    group_depths="4k,20k",
    group_tokens=192,
    pipeline="--tokens 16384 -b 8192 -ub 512 --repeats 1 -t 8",
    deep="250k",
    n_predict=256,  # the first of five that continue 150k tokens must not end before the last begins
    mixed=(4000, 20_000, 3000),
    soak=(2000, 96),
    context=1_310_720,
)
TINY = Sizes(
    depths="64,256",
    copy_from="256",
    group_depths="64,128",
    group_tokens=16,
    pipeline="--tokens 512 -b 512 -ub 128 --repeats 1 -t 1",
    deep="512",
    n_predict=16,
    mixed=(32, 256, 6000),
    soak=(128, 16),
    context=4096,
    minutes=0.4,
)


@dataclass(frozen=True, slots=True)
class Setting:
    """What all rows share."""

    model: Path
    flags: tuple[str, ...]
    devices: tuple[str, ...]  # names of the GPUs, as doctor found them; () before it ran
    sizes: Sizes
    results: Path
    synthetic: str | None
    soak_s: float
    ours: str = ""  # further flags of ours on both sides of the groups' comparison


@dataclass(frozen=True, slots=True)
class Row:
    """One command. `least_s`: not begun with less time than this."""

    name: str
    argv: tuple[str, ...]
    limit_s: float
    least_s: float = 20.0
    env: Mapping[str, str] = field(default_factory=dict)


class Left(Exception):
    """A row that cannot be measured here; the text says why."""


def bench(name: str, *words: str) -> tuple[str, ...]:
    """A benchmark of this checkout."""
    return (sys.executable, "-m", "llamamg", "bench", name, *words)


def has_plugin() -> bool:
    """Whether groups exist in this copy."""
    return PLUGIN in discover()


def _auto(s: Setting) -> str:
    return f"groups-auto:{s.ours} {_on(s)}".strip()


def _on(s: Setting) -> str:
    """Flags that switch groups on; one device has none by itself, so there two are asked for."""
    return f"--enable {PLUGIN}" + ("" if len(s.devices) > 1 else f" --plugin-option {PLUGIN}.groups=2")


def _off(s: Setting) -> str:
    return f"groups-off:{s.ours} --disable {PLUGIN}" if has_plugin() else f"groups-off:{s.ours}"


def _grid(
    s: Setting, row: str, sides: Sequence[str], slots: str, depths: str, minutes: float, copy_from: str = ""
) -> Row:
    minutes *= s.sizes.minutes
    words = [word for side in sides for word in ("--side", side)]
    made = ("--synthetic", s.synthetic) if s.synthetic else ()
    # An rpc-server serves one client at a time.
    together = () if "--rpc" in s.flags else ("--together",)
    argv = bench(
        "grid", *words, *together, "--slots", slots, "--depths", depths, "--repeats", "1", "--minutes", f"{minutes:.2f}",
        "--n-predict", str(s.sizes.n_predict), "--what", row, "--results", str(s.results), *made,
        *(("--copy-from", copy_from) if copy_from else ()), "-m", str(s.model), *s.flags,
    )  # fmt: skip
    return Row(row, argv, 60 * minutes + 75, 60 * minutes * 0.5)


def doctor(s: Setting) -> Row:
    context = () if {"-c", "--ctx-size"} & set(s.flags) else ("-np", "5", "-c", str(s.sizes.context))
    argv = ("-m", "llamamg", "doctor", "--json", "--devices", "-m", str(s.model), "--", *s.flags, *context)
    return Row("doctor", (sys.executable, *argv), 100)


def doctor_p2p(s: Setting) -> Row:
    argv = (sys.executable, "-m", "llamamg", "doctor", "--json", "--devices")
    return Row("doctor-p2p", argv, 40, env={"GGML_CUDA_P2P": "1"})


def grid(s: Setting) -> Row:
    """Upstream, groups off, groups auto."""
    depths = os.environ.get("GRID_DEPTHS", s.sizes.depths)
    return _grid(s, "grid", _compared(s), "1,5", depths, 4.7, s.sizes.copy_from)


def deep(s: Setting) -> Row:
    """One session where the grid ends: groups are for several."""
    return _grid(s, "deep", ["upstream", _off(s)], "1", s.sizes.deep, 5.0)


def _compared(s: Setting) -> list[str]:
    return ["upstream", _off(s), *([_auto(s)] if has_plugin() else [])]


def groups(s: Setting) -> Row:
    """Five sessions in 1 … 2 x GPUs groups, 1 … 5 of them on one card, and contexts of the plain library on one and on all."""
    one = s.devices[: 1 if "--rpc" in s.flags else 2]  # an rpc-server serves one client at a time
    return _groups(s, "groups", ["--stages", str(len(s.devices)), "--one", ",".join(one)] if one else [], 280, 60)


def p2p(s: Setting) -> Row:
    """The same on all cards with copies from card to card; all other rows copy as GGML_CUDA_P2P is: unset, through the host."""
    row = _groups(s, "p2p", ["--stages", str(len(s.devices))] if s.devices else [], 180, 40)
    return replace(row, env={"GGML_CUDA_P2P": "1"})


def _groups(s: Setting, row: str, more: Sequence[str], limit_s: float, least_s: float) -> Row:
    if not has_plugin():
        raise Left(f"the plugin {PLUGIN} is not in this copy")
    n_most = min(N_GROUPS_MAX, 5, max(2, 2 * len(s.devices)))
    argv = bench(
        "groups", "--sessions", "5", "--groups", ",".join(map(str, range(1, n_most + 1))), "--depth", s.sizes.group_depths,
        "--tokens", str(s.sizes.group_tokens), "--repeats", "1", "--stock", *more,
        *shlex.split(os.environ.get("GROUPS_ARGS", "")), "--results", str(s.results), "-m", str(s.model), *s.flags,
        *shlex.split(s.ours),
    )  # fmt: skip
    return Row(row, argv, limit_s, least_s)


def ideal(s: Setting) -> Row:
    """Once a row of its own."""
    raise Left("the row groups measures steps of one to five sessions on one card, and says what they allow")


def pipeline(s: Setting) -> Row:
    """One long prompt: upstream and ours, on one card and on all, switch by switch."""
    if "pipeline" not in bench_cli.available():
        raise Left("bench pipeline is not in this copy")
    words = shlex.split(os.environ.get("PIPELINE_ARGS", s.sizes.pipeline))
    peer = ["--env", "GGML_CUDA_P2P=1"] if s.devices and s.devices[0].startswith("CUDA") else []
    argv = bench("pipeline", *s.flags, *words, *peer, "--results", str(s.results), "-m", str(s.model))
    return Row("pipeline", argv, 220 * s.sizes.minutes, 60 * s.sizes.minutes)


def mixed(s: Setting) -> Row:
    """Prompts that arrive beside two sessions."""
    depth, n_prompt, n_predict = s.sizes.mixed
    sides = _compared(s)
    words = [word for side in sides for word in ("--side", side)]
    argv = bench(
        "mixed", *words, "--decoders", "2", "--prompts", "0,1", "--prompt", str(n_prompt), "--depth", str(depth),
        "--n-predict", str(n_predict), "--repeats", "1", "--results", str(s.results), "-m", str(s.model), *s.flags,
    )  # fmt: skip
    return Row("mixed", argv, 110 * s.sizes.minutes + 40, 40)


def _soak(s: Setting, name: str, seconds: float, *more: str) -> Row:
    n_prompt, n_predict = s.sizes.soak
    side = _auto(s) if has_plugin() else _off(s)
    argv = bench(
        "soak", "--side", side, "--seconds", f"{seconds:.0f}", "--sessions", "5", "--prompt", str(n_prompt), "--n-predict",
        str(n_predict), "--results", str(s.results), "-m", str(s.model), *s.flags, "--ctx-checkpoints", "2",
    )  # fmt: skip
    return Row(name, (*argv, *more), seconds + 90, min(seconds, 30) + 25)


def equality(s: Setting) -> Row:
    """Five sessions at once against each of them alone, three times; how many change without groups is the measure."""
    # An rpc-server serves one client at a time.
    together = () if "--rpc" in s.flags else ("--together",)
    return _soak(s, "equality", 0, "--bursts", "3", "--control", _off(s), *together)


def check(s: Setting) -> Row:
    """The plugin's promise, on recorded batches."""
    if not has_plugin():
        raise Left(f"the plugin {PLUGIN} is not in this copy")
    words = shlex.split(_on(s))[2:]
    argv = bench("check", "--plugin", PLUGIN, "--results", str(s.results), "-m", str(s.model), *s.flags, *words)
    return Row("check", argv, 120, 40)


def soak(s: Setting) -> Row:
    """Random arrivals and cancels."""
    return _soak(s, "soak", s.soak_s)


# In the order of importance.
ROWS: dict[str, Callable[[Setting], Row]] = {
    "doctor": doctor,
    "groups": groups,
    "ideal": ideal,
    "equality": equality,
    "p2p": p2p,
    "mixed": mixed,
    "grid": grid,
    "pipeline": pipeline,
    "soak": soak,
    "doctor-p2p": doctor_p2p,
    "deep": deep,
    "check": check,
}


def parse(text: str) -> list[str]:
    """`all` or names; in the order given. Raises BenchError."""
    names = list(ROWS) if text == "all" else [name.strip() for name in text.split(",") if name.strip()]
    for name in names:
        if name not in ROWS:
            raise BenchError(f"--rows {name}: it is one of {', '.join(ROWS)}, or all")
    return names


def summary(folder: Path) -> dict[str, Any]:
    """The figures of a result folder that matter at a glance."""
    if (folder / "grid.json").is_file():
        return _of_grid(json.loads((folder / "grid.json").read_text()))
    if (folder / "soak.json").is_file():
        found = json.loads((folder / "soak.json").read_text())
        return {key: found[key] for key in ("burst", "soak", "equal", "failures", "memory_mib")}
    if (folder / "pipeline.json").is_file():
        found = json.loads((folder / "pipeline.json").read_text())
        shown = ("side", "devices", "label", "n_batch", "n_ubatch", "rate")
        return {"rows": [{key: row[key] for key in shown} for row in found["rows"]]}
    if (folder / "result.json").is_file():
        found = json.loads((folder / "result.json").read_text())
        if "best" in found:
            return {"best": found["best"]}
        rows = found.get("rows", [])
        kept = ("plugin", "side", "n_decoders", "n_prompts", "median", "status", "reason", "same_batches", "alone")
        return {"rows": [{key: row[key] for key in kept if key in row} for row in rows]}
    return {}


def _of_grid(found: Mapping[str, Any]) -> dict[str, Any]:
    cells: dict[str, dict[str, list[float]]] = {}
    for row in found["rows"]:
        cell = cells.setdefault(f"{row['n_sessions']}x{row['depth']}", {})
        prefill = row["prefill"] and round(row["prefill"]["tps"], 1)
        cell[row["side"]] = [prefill, round(row["generate"]["tps"], 1)]
    return {"prefill and generation t/s": cells, "left_out": found["left_out"]}


def ideal_rate(step_s: Mapping[int, float], n_sessions: int, n_stages: int) -> dict[str, Any]:
    """The best rate that `n_sessions` could have over `n_stages` equal stages, from one device's time of a step.

    `step_s[b]` is the time of a step of b sessions on one device. G groups keep the stages busy one after the other: a round
    takes as long as a device works for all groups, or as one group's step, whichever is longer.
    """
    best: dict[str, Any] = {}
    for n_groups in range(1, n_sessions + 1):
        small, more = divmod(n_sessions, n_groups)
        sizes = [small + 1] * more + [small] * (n_groups - more)
        if any(size not in step_s for size in sizes):
            continue
        busy = sum(step_s[size] for size in sizes) / n_stages
        round_s = max(busy, max(step_s[size] for size in sizes))
        rate = n_sessions / round_s
        if not best or rate > best["tps"]:
            best = {"tps": round(rate, 1), "n_groups": n_groups}
    return best
