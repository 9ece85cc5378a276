"""Time of one llama_decode for each shape of a batch, under each value of a native switch: `llamamg bench steps`.

    llamamg bench steps -m model.gguf -ngl 99 --switch expert-tiles --values 0,100,150 --shapes p64,p512,1+1+p64

A shape is parts with + between them: a number is so many rows of one sequence that decodes (all with logits), pN a prompt's
chunk of N tokens without any. Each part is a sequence of its own, from left to right. Values take turns, shape by shape. At
the end every value computes the same prompt from nothing, and its logits are compared with those of the first value.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from llamamg.engine import Engine

from . import interrupt, program, record
from .arguments import NO_CACHE, add_results, record_of
from .errors import BenchError
from .flags import config_of, model_path, opened, take_models

NAME = "steps"
HELP = "time of a step of each shape, under each value of a native switch, and how close its logits stay"
SERVE_FLAGS = True
SHAPES = "1,1+1,2,8,p16,p32,p64,p128,p256,p512,1+1+p64"
PART = re.compile(r"(p?)(\d+)$")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the command line."""
    add = parser.add_argument
    add("--switch", required=True, metavar="NAME", help="switch of the native library (`llamamg doctor` lists them)")
    add("--values", default="0,1", metavar="LIST", help="its values; the first is what is compared with (default 0,1)")
    add("--shapes", default=SHAPES, metavar="LIST", help="shapes of a batch (default %(default)s)")
    add("--depth", type=int, default=4096, metavar="N", help="tokens a sequence begins with (default %(default)s)")
    add("--steps", type=int, default=12, metavar="N", help="timed steps of a shape (default %(default)s)")
    add("--rounds", type=int, default=2, metavar="N", help="turns that each value gets per shape (default %(default)s)")
    add("--compare", type=int, default=256, metavar="N", help="tokens whose logits are compared (default %(default)s)")
    add_results(parser)


def parse_shape(text: str) -> list[tuple[int, bool]]:
    """`1+1+p64` -> [(1, True), (1, True), (64, False)]: rows, and whether each has logits. Raises BenchError."""
    parts = [PART.match(part) for part in text.split("+")]
    if not all(part and int(part[2]) for part in parts):
        raise BenchError(f"--shapes {text!r}: parts are numbers, or p and a number, with + between them")
    return [(int(part[2]), not part[1]) for part in parts if part]


def run(args: argparse.Namespace) -> int:
    """Measure, keep, print."""
    try:
        values = [int(value) for value in args.values.split(",")]
    except ValueError:
        raise BenchError(f"--values {args.values!r}: whole numbers with commas") from None
    shapes = {text: parse_shape(text) for text in args.shapes.split(",")}
    for name in ("depth", "steps", "rounds", "compare"):
        if getattr(args, name) < 1:
            raise BenchError(f"--{name} must be at least 1")
    models, given = take_models(args.flags)
    model = model_path(models[0] if models else "demo")
    n_seq = max(len(parts) for parts in shapes.values())
    # A sequence starts anew with each shape, so the longest one sets the room.
    longest = max(n for parts in shapes.values() for n, _ in parts) * (args.steps + 2) * args.rounds * len(values)
    n_ctx = n_seq * -(-max(args.depth + longest, args.compare) // 256) * 256
    flags = ["-m", str(model), "-np", str(n_seq), "--no-kv-unified", "-c", str(n_ctx), "-lv", "2", *NO_CACHE, *given]
    config = config_of(flags)
    with record.ResultFolder(NAME, args.results) as folder, opened(config) as engine:
        engine.plugins.start(engine)
        stage = Stage(engine, args.switch)
        rows = []
        with tqdm(total=len(shapes), desc=NAME, unit="shape", disable=None) as bar:
            for text, parts in shapes.items():
                rows.append({"shape": text, "values": stage.time(parts, values, args)})
                bar.update(1)
        result = {
            "bench": NAME,
            "switch": args.switch,
            "values": values,
            "depth": args.depth,
            "cuda_graphs": stage.cuda_graphs,
            "rows": rows,
            "closeness": stage.compare(values, args.compare),
            "record": record_of(config.build, Path(model)),
        }
        folder.write("result.json", result)
        folder.text("table.txt", table(result) + "\n")
    print(table(result))
    print(f"kept in {folder.final}", file=sys.stderr)
    return 0


class Stage:
    """Batches given to llama_decode without the engine's loop, so that only the library is timed."""

    def __init__(self, engine: Engine, switch: str) -> None:
        runner: Any = engine.runner
        if runner.n_contexts != 1:
            raise BenchError("steps are those of one context: add --disable decode-groups")
        self._llama, self._mg, self._context = runner._llama, runner._mg, runner.context
        self._switch = switch
        known = {one.name for one in self._mg.switches()}
        if switch not in known:
            raise BenchError(f"--switch {switch}: this library has {', '.join(sorted(known))}")
        self._n_batch, self._n_ubatch = runner.n_batch, runner.n_ubatch
        self._memory = self._llama.llama_get_memory(self._context)
        self._batch = self._llama.llama_batch_init(self._n_batch, 0, 1)
        self._rng = np.random.default_rng(3)
        self._n_vocab = engine.vocab.n_vocab
        self._n_past: dict[int, int] = {}

    @property
    def cuda_graphs(self) -> bool:
        """Whether steps may be recorded and replayed: what a switch changes in kernels alone is not seen then."""
        on_cuda = any(device.backend == "CUDA" for device in self._mg.devices())
        return on_cuda and "GGML_CUDA_DISABLE_GRAPHS" not in os.environ

    def time(self, parts: Sequence[tuple[int, bool]], values: Sequence[int], args: Any) -> list[dict[str, Any]]:
        """For each value the times of its steps in ms, and how many steps used the graph of the one before."""
        self._restart(len(parts), args.depth)
        found = [{"value": value, "ms": [], "n_reused": 0} for value in values]
        for turn in range(args.rounds):
            for one in found if turn % 2 == 0 else reversed(found):
                with self._mg.held({self._switch: one["value"]}):
                    for _ in range(2):
                        self._decode(parts)
                    before = self._llama.llama_perf_context(self._context).n_reused
                    for _ in range(args.steps):
                        interrupt.check()
                        begin = time.perf_counter()
                        self._decode(parts)
                        one["ms"].append(1e3 * (time.perf_counter() - begin))
                    one["n_reused"] += self._llama.llama_perf_context(self._context).n_reused - before
        for one in found:
            one["median_ms"] = float(np.median(one["ms"]))
        return found

    def compare(self, values: Sequence[int], n_tokens: int) -> list[dict[str, Any]]:
        """KL divergence in nats of each value's distributions from the first value's, and how often their tops agree."""
        tokens = self._tokens(n_tokens)
        logits = []
        for value in values:
            with self._mg.held({self._switch: value}):
                self._restart(1, 0)
                for begin in range(0, n_tokens, self._n_ubatch):
                    self._put(0, tokens[begin : begin + self._n_ubatch], 1, 0)
                    self._compute(min(self._n_ubatch, n_tokens - begin))
                rows = []
                for token in self._tokens(16, seed=9):
                    self._put(0, np.array([token]), 1, 0)
                    self._compute(1)
                    got = self._llama.llama_get_logits_ith(self._context, 0)
                    rows.append(np.ctypeslib.as_array(got, (self._n_vocab,)).astype(np.float64))
                logits.append(np.stack(rows))
        return [_closeness(value, logits[0], mine) for value, mine in zip(values, logits, strict=True)]

    # -- inside

    def _restart(self, n_seq: int, depth: int) -> None:
        self._llama.llama_memory_clear(self._memory, True)
        self._n_past = dict.fromkeys(range(n_seq), 0)
        for seq in range(n_seq):
            for begin in range(0, depth, self._n_ubatch):
                n = min(self._n_ubatch, depth - begin)
                self._put(seq, self._tokens(n), 0, 0)
                self._compute(n)

    def _decode(self, parts: Sequence[tuple[int, bool]]) -> None:
        n = 0
        for seq, (n_rows, is_decode) in enumerate(parts):
            self._put(seq, self._tokens(n_rows), n_rows if is_decode else 0, n)
            n += n_rows
        self._compute(n)

    def _put(self, seq: int, tokens: np.ndarray, n_outputs: int, at: int) -> None:
        batch, past = self._batch, self._n_past[seq]
        for i, token in enumerate(tokens.tolist()):
            batch.token[at + i], batch.pos[at + i], batch.n_seq_id[at + i] = token, past + i, 1
            batch.seq_id[at + i][0], batch.logits[at + i] = seq, i >= len(tokens) - n_outputs
        self._n_past[seq] = past + len(tokens)

    def _compute(self, n: int) -> None:
        self._batch.n_tokens = n
        if self._llama.llama_decode(self._context, self._batch) != 0:
            raise BenchError(f"llama_decode refused a batch of {n} tokens: see the log, and use a larger -c or -b")
        self._llama.llama_synchronize(self._context)

    def _tokens(self, n: int, seed: int | None = None) -> np.ndarray:
        rng = self._rng if seed is None else np.random.default_rng(seed)
        return rng.integers(self._n_vocab // 8, self._n_vocab // 2, n, dtype=np.int32)


def _closeness(value: int, ours: np.ndarray, theirs: np.ndarray) -> dict[str, Any]:
    p, q = _log_softmax(ours), _log_softmax(theirs)
    return {
        "value": value,
        "kl": float((np.exp(p) * (p - q)).sum(axis=1).max()),
        "top1": float((ours.argmax(axis=1) == theirs.argmax(axis=1)).mean()),
        "same_bits": bool((ours == theirs).all()),
    }


def _log_softmax(logits: np.ndarray) -> np.ndarray:
    shifted = logits - logits.max(axis=1, keepdims=True)
    return np.asarray(shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True)))


def table(result: Mapping[str, Any]) -> str:
    """The result for people, made from the result alone."""
    values = result["values"]
    head = f"{'shape':<12}" + "".join(f"{f'{value} ms':>10}" for value in values)
    head += "".join(f"{f'{value}/{values[0]}':>10}" for value in values[1:]) + "   graphs reused"
    lines = [f"{result['switch']} = {', '.join(map(str, values))}, at {result['depth']} tokens", "", head]
    for row in result["rows"]:
        times = [one["median_ms"] for one in row["values"]]
        reused = " ".join(f"{one['n_reused']}/{len(one['ms'])}" for one in row["values"])
        line = f"{row['shape']:<12}" + "".join(f"{ms:>10.2f}" for ms in times)
        lines.append(line + "".join(f"{ms / times[0]:>10.3f}" for ms in times[1:]) + f"   {reused}")
    lines.append("")
    if result.get("cuda_graphs"):
        lines.append(
            "CUDA graphs were on: one that was recorded under another value is replayed as it is, unless the switch makes"
        )
        lines.append(
            "another graph. Equal times prove nothing then: set GGML_CUDA_DISABLE_GRAPHS=1 where it changes kernels."
        )
    for one in result["closeness"][1:]:
        same = "the same bits" if one["same_bits"] else f"KL at most {one['kl']:.2g}, top 1 agrees {one['top1']:.0%}"
        lines.append(f"logits of {one['value']} against {values[0]}: {same}")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(program.alone(sys.modules[__name__]))
