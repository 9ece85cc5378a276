"""The rows of the run on several GPUs: each is one command of a bench that exists, with its own limit of time."""

from __future__ import annotations

import json
import os
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
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
    group_depths: tuple[str, str]
    ideal_depth: str
    pipeline: str  # arguments of its bench
    p2p_depths: str
    deep: str
    n_predict: int
    mixed: tuple[int, int, int]  # depth of the decoders, arriving prompt, tokens
    soak: tuple[int, int]  # longest prompt, longest answer
    context: int  # tokens of all slots, for what doctor says about memory
    minutes: float = 1.0  # factor of every limit


FULL = Sizes(
    depths="5k,50k",
    group_depths=("4k", "20k"),
    ideal_depth="4k",
    pipeline="--tokens 16384 -b 8192 -ub 512 --repeats 2 -t 8",
    p2p_depths="5k,20k",
    deep="150k",
    n_predict=128,
    mixed=(4000, 20_000, 3000),
    soak=(4000, 96),
    context=1_310_720,
)
TINY = Sizes(
    depths="64,256",
    group_depths=("64", "128"),
    ideal_depth="64",
    pipeline="--tokens 512 -b 512 -ub 128 --repeats 1 -t 1",
    p2p_depths="64,128",
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
    return f"auto:{s.ours} {_on(s)}".strip()


def _on(s: Setting) -> str:
    """Flags that switch groups on; one device has none by itself, so there two are asked for."""
    return f"--enable {PLUGIN}" + ("" if len(s.devices) > 1 else f" --plugin-option {PLUGIN}.groups=2")


def _off(s: Setting) -> str:
    return f"off2:{s.ours} --disable {PLUGIN}" if has_plugin() else f"off2:{s.ours}"


def _grid(s: Setting, row: str, sides: Sequence[str], slots: str, depths: str, minutes: float) -> Row:
    minutes *= s.sizes.minutes
    words = [word for side in sides for word in ("--side", side)]
    made = ("--synthetic", s.synthetic) if s.synthetic else ()
    # An rpc-server serves one client at a time.
    together = () if "--rpc" in s.flags else ("--together",)
    argv = bench(
        "grid", *words, *together, "--slots", slots, "--depths", depths, "--repeats", "1", "--minutes", f"{minutes:.2f}",
        "--n-predict", str(s.sizes.n_predict), "--what", row, "--results", str(s.results), *made, "-m", str(s.model), *s.flags,
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
    """Upstream, ours on one device, groups off, groups auto."""
    sides = ["upstream"]
    if len(s.devices) > 1:
        sides.append(f"one:{s.ours} --device {s.devices[0]}" + (f" --disable {PLUGIN}" if has_plugin() else ""))
    sides.append(_off(s))
    if has_plugin():
        sides.append(_auto(s))
    return _grid(s, "grid", sides, "1,5", s.sizes.depths, 2.4)


def deep(s: Setting) -> Row:
    sides = ["upstream", _off(s), *([_auto(s)] if has_plugin() else [])]
    return _grid(s, "deep", sides, "1", s.sizes.deep, 4.0)


def groups(s: Setting) -> Row:
    """1 … 2 x GPUs groups with five sessions."""
    if "groups" in bench_cli.available() and "GROUPS_ARGS" in os.environ:
        words = shlex.split(os.environ["GROUPS_ARGS"])
        return Row(
            "groups", bench("groups", *words, "--results", str(s.results), "-m", str(s.model), *s.flags), 150, 40
        )
    # The same number of groups once more with stages balanced by what doctor measured.
    return _grid(
        s, "groups", [*_group_sides(s), f"{_group_side(s, 2, 'g2ts')} -ts auto"], "5", s.sizes.group_depths[0], 1.7
    )


def groups_deep(s: Setting) -> Row:
    """The same with longer sessions."""
    return _grid(s, "groups-deep", _group_sides(s), "5", s.sizes.group_depths[1], 2.3)


def _group_sides(s: Setting) -> list[str]:
    if not has_plugin():
        raise Left(f"the plugin {PLUGIN} is not in this copy")
    n_most = min(N_GROUPS_MAX, 5, max(2, 2 * len(s.devices)))
    return [f"g1:{s.ours} --disable {PLUGIN}", *(_group_side(s, n, f"g{n}") for n in range(2, n_most + 1))]


def _group_side(s: Setting, n: int, name: str) -> str:
    return f"{name}:{s.ours} --enable {PLUGIN} --plugin-option {PLUGIN}.groups={n}"


def ideal(s: Setting) -> Row:
    """t(b) for b = 1 … 5 sessions on one device."""
    device = f"--device {s.devices[0]}" if s.devices else ""
    off = f" --disable {PLUGIN}" if has_plugin() else ""
    return _grid(s, "ideal", [f"one:{s.ours} {device}{off}"], "1,2,3,4,5", s.sizes.ideal_depth, 0.8)


def pipeline(s: Setting) -> Row:
    """One long prompt: upstream and ours, on one card and on all, switch by switch."""
    if "pipeline" not in bench_cli.available():
        raise Left("bench pipeline is not in this copy")
    words = shlex.split(os.environ.get("PIPELINE_ARGS", s.sizes.pipeline))
    peer = ["--env", "GGML_CUDA_P2P=1"] if s.devices and s.devices[0].startswith("CUDA") else []
    argv = bench("pipeline", *s.flags, *words, *peer, "--results", str(s.results), "-m", str(s.model))
    return Row("pipeline", argv, 220 * s.sizes.minutes, 60 * s.sizes.minutes)


def p2p(s: Setting) -> Row:
    """Copies from card to card; everything else here copies as GGML_CUDA_P2P is: unset, through the host."""
    p = "GGML_CUDA_P2P=1"
    sides = [f"upstream-p2p:upstream {p}", f"off2-p2p:{p} {_off(s).partition(':')[2]}"]
    if has_plugin():
        sides.append(f"auto-p2p:{p} {_auto(s).partition(':')[2]}")
    return _grid(s, "p2p", sides, "1,5", s.sizes.p2p_depths, 1.3)


def mixed(s: Setting) -> Row:
    """Prompts that arrive beside two sessions."""
    depth, n_prompt, n_predict = s.sizes.mixed
    sides = ["upstream", _off(s), *([_auto(s)] if has_plugin() else [])]
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
    return _soak(s, "equality", 0, "--bursts", "3", "--control", _off(s))


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
    "grid": grid,
    "groups": groups,
    "pipeline": pipeline,
    "ideal": ideal,
    "equality": equality,
    "p2p": p2p,
    "mixed": mixed,
    "doctor-p2p": doctor_p2p,
    "groups-deep": groups_deep,
    "soak": soak,
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
        rows = json.loads((folder / "result.json").read_text()).get("rows", [])
        kept = ("plugin", "side", "n_decoders", "n_prompts", "median", "status", "reason", "same_batches", "alone")
        return {"rows": [{key: row[key] for key in kept if key in row} for row in rows]}
    return {}


def _of_grid(found: Mapping[str, Any]) -> dict[str, Any]:
    cells: dict[str, dict[str, list[float]]] = {}
    for row in found["rows"]:
        cell = cells.setdefault(f"{row['n_sessions']}x{row['depth']}", {})
        cell[row["side"]] = [round(row["prefill"]["tps"], 1), round(row["generate"]["tps"], 1)]
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
