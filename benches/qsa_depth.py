"""Native QSA over depth: the switch on, off, and the unpatched library: `llamamg bench qsa-depth -m MODEL` (a `qwen4exp` model).

Two processes, one with each library. The native one computes the prompt and hands its state to the unpatched one, so at each
depth all sides measure prefill and decoding of the same tokens on the same cells, in turned order.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from llamamg import library, paths
from llamamg.model import CACHE_TYPES

from . import program, record
from .arguments import add_results
from .errors import BenchError
from .grid_cells import parse_depths
from .json_child import JsonChild
from .qsa_depth_side import N_BATCH, N_WARM
from .qsa_depth_table import table

NAME = "qsa-depth"
HELP = "decode, prefill and compute memory with native QSA on and off and without our patches, over depth"
SIDES = ("on", "off", "upstream")
N_FIVE = 5
SPARE = 64


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the bench."""
    add = parser.add_argument
    add("-m", "--model", type=Path, required=True, help="a qwen4exp model, e.g. from `llamamg synth --preset full`")
    add("--sides", default=",".join(SIDES), metavar="LIST", help="on, off, upstream (default all)")
    add("--depths", default="5k,50k,250k", metavar="LIST", help="depths in tokens (default %(default)s)")
    add("--five-at", default="100k", metavar="N", help="depth of five sessions decoding together; 0: leave out")
    add("--memory", default="5x262144", metavar="NxDEPTH", help="context whose compute buffers are read; 0: leave out")
    add("--virtual-devices", type=int, default=0, metavar="N", help="read them on a GPU split into N devices too")
    add("--repeats", type=int, default=2, metavar="N", help="measurements of each cell (default 2)")
    add("--gpu-layers", type=int, default=99, help="layers on the GPU (default all)")
    add("--cache-type", choices=sorted(CACHE_TYPES), default="q8_0", help="type of the K and V cache (default q8_0)")
    add("--ubatch", type=int, default=512, help="tokens of a ubatch (default 512)")
    add("--piece", type=int, default=2048, help="tokens of a timed prefill (default 2048)")
    add(
        "--tokens",
        type=int,
        default=32,
        help="tokens of a timed decoding; half of it where sides are slow (default 32)",
    )
    add("--threads", type=int, default=8, help="CPU threads (default 8)")
    add("--upstream", type=Path, metavar="DIR", help="unpatched build (default: that of `llamamg build --upstream`)")
    add("--scratch", type=Path, metavar="DIR", help="where the states lie meanwhile (default: the system's)")
    add("--synthetic", metavar="TEXT", help="how the model was generated, in place of a hash of a large file")
    add("--lines", type=Path, metavar="FILE", help="append each finished cell to FILE at once, as a line of JSON")
    add_results(parser)


@dataclass(slots=True)
class Plan:
    """What is measured, checked."""

    sides: list[str]
    depths: list[int]
    five_at: int
    memory: tuple[int, int]  # sequences, tokens of each
    n_repeats: int
    piece: int
    n_tokens: int

    @property
    def marks(self) -> list[tuple[int, bool]]:
        """(depth, whether five sessions are measured there), ascending."""
        found = [(depth, False) for depth in self.depths]
        return sorted([*found, (self.five_at, True)] if self.five_at else found)

    def order(self, repeat: int) -> list[str]:
        """The sides, turned round with every repeat."""
        return self.sides if repeat % 2 == 0 else self.sides[::-1]


def plan_of(args: argparse.Namespace) -> Plan:
    """Raises BenchError for what cannot be measured."""
    for name in ("repeats", "ubatch", "piece", "tokens", "threads"):
        if getattr(args, name) < 1:
            raise BenchError(f"--{name} must be at least 1")
    sides = [word.strip() for word in args.sides.split(",")]
    if any(side not in SIDES for side in sides) or len(set(sides)) < len(sides) or "on" not in sides:
        raise BenchError(f"--sides {args.sides}: a list of {', '.join(SIDES)}, with `on` among them")
    depths, five = parse_depths(args.depths), [0] if args.five_at == "0" else parse_depths(args.five_at)
    if len(five) > 1:
        raise BenchError("--five-at takes one depth")
    n, _, depth = args.memory.partition("x")
    if args.memory != "0" and not (n.isdigit() and depth.isdigit() and int(n) and int(depth)):
        raise BenchError(f"--memory {args.memory}: sequences and tokens of each, such as 5x262144, or 0")
    memory = (0, 0) if args.memory == "0" else (int(n), int(depth))
    return Plan(sides, depths, five[0], memory, args.repeats, args.piece, args.tokens)


def child(name: str, args: argparse.Namespace, build: Path | None, n_devices: int = 1) -> JsonChild:
    """A library in a process of its own (qsa_depth_side.py)."""
    order = {
        "model": str(args.model.resolve()), "gpu_layers": args.gpu_layers, "threads": args.threads,
        "cache_type": args.cache_type, "ubatch": args.ubatch,
    }  # fmt: skip
    env = {"LLAMAMG_BUILD": str(build.resolve())} if build else {}
    env |= {"GGML_CUDA_DEVICES": str(n_devices)} if n_devices > 1 else {}
    return JsonChild(f"{name} library", "qsa_depth_side", order, env)


@dataclass(slots=True)
class Run:
    """The children, and what came of them so far."""

    plan: Plan
    children: dict[str, JsonChild]  # by side; `on` and `off` share one
    folder: Path  # for states and logits
    lines: Path | None
    bar: Any
    rows: list[dict[str, Any]] = field(default_factory=list)

    def keep(self, **row: Any) -> None:
        """One finished cell."""
        self.rows.append(row)
        if self.lines:
            with self.lines.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")
        self.bar.update(1)

    @property
    def libraries(self) -> list[JsonChild]:
        """Each process once, ours first."""
        return list(dict.fromkeys(self.children.values()))

    def over_depth(self) -> None:
        """Every mark from one prompt that grows in sequence 0 of one context."""
        plan, ours = self.plan, self.children["on"]
        deepest = max([*plan.depths, plan.five_at])
        n_cells = -(-(deepest + plan.piece + plan.n_tokens + N_WARM + SPARE) // 256) * 256
        n_seq = N_FIVE if plan.five_at else 1  # the state of a sequence fits only contexts with as many streams
        for each in self.libraries:
            each.ask("open", n_ctx=n_seq * n_cells, n_seq=n_seq, native=each is ours)
        for depth, is_five in plan.marks:
            position = at_mark(depth)
            self.bar.set_postfix_str(f"computing up to {position}")
            more = ours.ask("advance", to=position, native=True)
            self._hand_over(position)
            if is_five:
                for each in self.libraries:
                    each.ask("spread")
            self._measure(depth, N_FIVE if is_five else 1, {"advance_tps": more["tps"]})
            if is_five:
                for each in self.libraries:
                    each.ask("gather")
            else:
                self._compare(depth, position)
        for each in self.libraries:
            each.ask("close")

    def _hand_over(self, position: int) -> None:
        ours, *others = self.libraries
        if not others:
            return
        state = self.folder / f"{position}.state"
        ours.ask("save", path=str(state))
        for other in others:
            other.ask("restore", path=str(state), position=position)
        state.unlink()

    def _measure(self, depth: int, n_sessions: int, more: dict[str, Any]) -> None:
        for each in self.libraries:
            each.ask("mark")
        for repeat in range(self.plan.n_repeats):
            for side in self.plan.order(repeat):
                self.bar.set_postfix_str(f"{n_sessions} x {depth}, {side}")
                one, native, row = self.children[side], side == "on", dict(more) if side == "on" else {}
                if n_sessions == 1:
                    found = one.ask("prefill", n=self.plan.piece, native=native)
                    row["prefill_tps"] = found["tps"]
                    said(found["n_native"], native, -(-self.plan.piece // N_BATCH))
                n = self.plan.n_tokens if native else max(1, self.plan.n_tokens // 2)
                found = one.ask("decode", n=n, native=native)
                row["decode_tps"] = found["tps"]
                said(found["n_native"], native, n)
                self.keep(n_sessions=n_sessions, depth=depth, side=side, repeat=repeat, **row)

    def _compare(self, depth: int, position: int) -> None:
        """One token from the same state by every side, and natively once more."""
        rows: dict[str, Any] = {}
        for name in [*self.plan.sides, "again"]:
            side, file = ("on" if name == "again" else name), self.folder / "logits.npy"
            self.children[side].ask("logits", path=str(file), native=side == "on")
            rows[name] = np.load(file).astype(np.float64)
        pairs = [(a, b) for a, b in (("on", "off"), ("on", "upstream"), ("off", "upstream")) if {a, b} <= rows.keys()]
        found = {f"{a}/{b}": difference(rows[a], rows[b]) for a, b in pairs}
        self.keep(depth=depth, position=position, compare={"on/again": difference(rows["on"], rows["again"]), **found})

    def memory(self, n_devices: int) -> None:
        """Compute buffers of every side."""
        n_seq, depth = self.plan.memory
        for side in self.plan.sides:
            self.bar.set_postfix_str(f"buffers of {n_seq} x {depth} on {n_devices} devices, {side}")
            found = self.children[side].ask("open", n_ctx=n_seq * depth, n_seq=n_seq, native=side == "on")
            self.children[side].ask("close")
            self.keep(n_devices=n_devices, n_seq=n_seq, context=depth, side=side, **found)


def at_mark(depth: int) -> int:
    """The position at or before `depth` with remainder 2: there the stock graph and the native one select the same cells."""
    return depth - (depth - 2) % 4


def said(n_native: int, native: bool, least: int) -> None:
    """Raises BenchError when the graph that ran is not the one that was to be measured."""
    if native and n_native < least:
        raise BenchError("the native graph was not used: see `llamamg plugins` and docs/plugins/qsa.md for why")
    if not native and n_native:
        raise BenchError("the native graph was used although it was switched off")


def difference(a: Any, b: Any) -> dict[str, Any]:
    """Two rows of logits: largest difference over the largest logit, best token, bits."""
    return {
        "largest": float(np.abs(a - b).max() / np.abs(b).max()),
        "same_best": bool(a.argmax() == b.argmax()),
        "same_bits": bool((a == b).all()),
    }


@contextlib.contextmanager
def started(args: argparse.Namespace, sides: Sequence[str], n_devices: int = 1) -> Iterator[dict[str, JsonChild]]:
    """A process for our library, and one for the unpatched one where it is asked for."""
    with contextlib.ExitStack() as stack:
        ours = stack.enter_context(child("patched", args, None, n_devices))
        if "qsa" not in ours.facts["switches"]:
            raise BenchError("this build has no switch qsa: run `llamamg build`")
        children = {side: ours for side in sides if side != "upstream"}
        if "upstream" in sides:
            other = stack.enter_context(child("unpatched", args, upstream_build(args.upstream), n_devices))
            if other.facts["build"].get("patched"):
                raise BenchError("--upstream names a patched build: give one of `llamamg build --upstream`")
            children["upstream"] = other
        yield children


def upstream_build(given: Path | None) -> Path:
    """The unpatched build. Raises BenchError."""
    folder = given or paths.build("upstream")
    try:
        return library.find(folder)
    except library.LibraryNotFound as error:
        raise BenchError(
            f"there is no unpatched build in {folder}: run `llamamg build --upstream`, or give --sides on,off"
        ) from error


def run(args: argparse.Namespace) -> int:
    """Measure and keep the result; 0."""
    plan = plan_of(args)
    if not args.model.is_file():
        raise BenchError(f"{args.model} is no file: give a model with -m")
    n_memory = len(plan.sides) * (1 + (args.virtual_devices > 1)) if plan.memory[0] else 0
    n_cells = (len(plan.depths) + bool(plan.five_at)) * plan.n_repeats * len(plan.sides) + len(plan.depths) + n_memory
    with (
        record.ResultFolder(NAME, args.results) as results,
        tempfile.TemporaryDirectory(dir=args.scratch) as scratch,
        tqdm(total=n_cells, desc=NAME, unit="cell", disable=None) as bar,
    ):
        rows: list[dict[str, Any]] = []
        with started(args, plan.sides) as children:
            here = Run(plan, children, Path(scratch), args.lines, bar, rows)
            builds = {side: each.facts["build"] for side, each in children.items() if side != "off"}
            here.over_depth()
            if plan.memory[0]:
                here.memory(1)
        if plan.memory[0] and args.virtual_devices > 1:
            with started(args, plan.sides, args.virtual_devices) as children:
                Run(plan, children, Path(scratch), args.lines, bar, rows).memory(args.virtual_devices)
        result = {
            "bench": NAME,
            "sides": plan.sides,
            "cache_type": args.cache_type,
            "ubatch": args.ubatch,
            "batch": N_BATCH,
            "piece": plan.piece,
            "n_tokens": plan.n_tokens,
            "rows": rows,
            "record": record.everything(
                build=builds["on"], builds=builds, model=record.model(args.model, args.synthetic)
            ),
        }
        results.write("qsa-depth.json", result)
        results.text("table.md", table(result) + "\n")
    print(table(result))
    print(f"kept in {results.final}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(program.alone(sys.modules[__name__]))
