"""What graphs for small ubatches are worth: `python -m benches.small_graphs -m MODEL`.

Steps of a few decoding rows and a chunk of a prompt, in one context, with the native switch small-graphs at one value and
another in turn. Beside the time of a step: how many ubatches reused their graph, and what the host thread did in it.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from llamamg import library

from . import launch
from .pipeline_trace import host

TYPES = {"f32": 0, "f16": 1, "q8_0": 8}
COUNTS = ("ubatch", "reused", "spared", "built", "realloc")


class Stage:
    """Sequences 0 to n - 1 that decode, and n + 1 that is a prompt: not their neighbour, so a ubatch of its own."""

    def __init__(self, lib: library.Library, args: argparse.Namespace) -> None:
        self.lib, self.llama, self.mg = lib, lib.llama, lib.mg
        params = self.llama.llama_model_default_params()
        params.n_gpu_layers = args.ngl
        self.model = self.llama.llama_model_load_from_file(str(args.model).encode(), params)
        if not self.model:
            raise SystemExit(f"small_graphs: {args.model} does not load")
        self.n_vocab = self.llama.llama_vocab_n_tokens(self.llama.llama_model_get_vocab(self.model))
        self.n_decode, self.prompt = args.decoders, args.decoders + 1
        params = self.llama.llama_context_default_params()
        n_ctx = -(-(args.depth + args.rounds * args.steps * (max(args.chunks) + 2) * 2 + 256) // 256) * 256
        params.n_seq_max, params.n_ctx = args.decoders + 2, n_ctx * (args.decoders + 2)
        params.n_batch, params.n_ubatch = max(2048, max(args.chunks) + args.decoders), args.ubatch
        params.n_outputs_max = max(8, 2 * params.n_seq_max)
        params.n_threads = params.n_threads_batch = args.threads
        params.type_k = params.type_v = TYPES[args.kind]
        params.flash_attn_type = 1
        self.context = self.llama.llama_init_from_model(self.model, params)
        if not self.context:
            raise SystemExit("small_graphs: no memory for the context; take a smaller --depth or fewer --steps")
        self.memory = self.llama.llama_get_memory(self.context)
        self.batch = self.llama.llama_batch_init(params.n_batch, 0, 1)
        self.random = np.random.default_rng(1)
        self.at = dict.fromkeys([*range(self.n_decode), self.prompt], 0)

    def fill(self, seq: int, n: int) -> None:
        """So many tokens more of one sequence."""
        for i in range(0, n, 2048):
            self._decode([(seq, min(2048, n - i))], ())
            self.llama.llama_synchronize(self.context)

    def forget_prompt(self) -> None:
        self.llama.llama_memory_seq_rm(self.memory, self.prompt, -1, -1)
        self.at[self.prompt] = 0

    def step(self, chunk: int) -> float:
        """One batch of a row of each decoder and `chunk` tokens of the prompt; milliseconds until its logits are there."""
        begin = time.perf_counter()
        rows = [(seq, 1) for seq in range(self.n_decode)]
        self._decode(rows + [(self.prompt, chunk)] * (chunk > 0), range(self.n_decode))
        self.llama.llama_synchronize(self.context)
        return (time.perf_counter() - begin) * 1e3

    def logits(self, i: int) -> np.ndarray:
        """Of the i-th token of the last batch, [n_vocab]; a view."""
        return np.ctypeslib.as_array(self.llama.llama_get_logits_ith(self.context, i), shape=(self.n_vocab,))

    def _decode(self, parts: list[tuple[int, int]], outputs: Any) -> None:
        batch, n = self.batch, 0
        for seq, count in parts:
            for token in self.random.integers(100, self.n_vocab // 2, count).tolist():
                batch.token[n], batch.pos[n], batch.n_seq_id[n] = token, self.at[seq], 1
                batch.seq_id[n][0], batch.logits[n] = seq, n in outputs
                self.at[seq] += 1
                n += 1
        batch.n_tokens = n
        if (status := self.llama.llama_decode(self.context, batch)) != 0:
            raise SystemExit(f"small_graphs: llama_decode returned {status}")

    def close(self) -> None:
        self.llama.llama_batch_free(self.batch)
        self.llama.llama_free(self.context)
        self.llama.llama_model_free(self.model)


def block(stage: Stage, chunk: int, n_step: int, trace: Path) -> tuple[list[float], dict[str, int], dict[str, float]]:
    """Times of the steps, what was counted in them, and the host thread's milliseconds by what it did."""
    for _ in range(4):  # the graph of this shape, and on CUDA its capture
        stage.step(chunk)
    stage.mg.write_trace(trace)
    before = {name: stage.mg.trace_count(name) for name in COUNTS}
    with stage.mg.held({"trace": 1}):
        times = [stage.step(chunk) for _ in range(n_step)]
    counted = {name: stage.mg.trace_count(name) - before[name] for name in COUNTS}
    stage.mg.write_trace(trace)
    return times, counted, host(json.loads(trace.read_text()))


def measure(stage: Stage, args: argparse.Namespace) -> list[dict[str, Any]]:
    """A row for each chunk and value of the switch. The values take turns, so that what drifts is in all of them."""
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for chunk in tqdm(args.chunks, desc="chunks"):
            times: dict[int, list[float]] = {value: [] for value in args.graphs}
            counted = {value: dict.fromkeys(COUNTS, 0) for value in args.graphs}
            spent: dict[int, dict[str, float]] = {value: {} for value in args.graphs}
            for _ in range(args.rounds):
                for value in args.graphs:
                    stage.forget_prompt()
                    with stage.mg.held({"small-graphs": value}):
                        got, counts, phases = block(stage, chunk, args.steps, Path(folder) / "trace.json")
                    times[value] += got
                    for name, n in counts.items():
                        counted[value][name] += n
                    for name, ms in phases.items():
                        spent[value][name] = spent[value].get(name, 0.0) + ms
            for value in args.graphs:
                n = len(times[value])
                rows.append(
                    {
                        "chunk": chunk,
                        "small_graphs": value,
                        "ms_p50": statistics.median(times[value]),
                        "ms_min": min(times[value]),
                        "counts": counted[value],
                        "host_ms": {name: ms / n for name, ms in spent[value].items()},
                    }
                )
    return rows


def table(rows: list[dict[str, Any]]) -> str:
    """For people."""
    lines = ["| chunk | small-graphs | step p50 ms | min | ubatches | reused | host ms per step |", "|" + " --- |" * 7]
    for row in rows:
        counts = row["counts"]
        spent = ", ".join(f"{name} {ms:.2f}" for name, ms in row["host_ms"].items())
        lines.append(
            f"| {row['chunk']} | {row['small_graphs']} | {row['ms_p50']:.2f} | {row['ms_min']:.2f} "
            f"| {counts['ubatch']} | {counts['reused']} | {spent} |"
        )
    return "\n".join(lines)


def numbers(text: str) -> list[int]:
    """A list with commas."""
    return [int(part) for part in text.split(",")]


def main(argv: list[str] | None = None) -> int:
    """Measure, print, and write JSON if a file is given."""
    parser = argparse.ArgumentParser(prog="python -m benches.small_graphs", description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("-m", "--model", type=Path, required=True, help="GGUF file")
    add("-ngl", type=int, default=0, metavar="N", help="layers on devices (default %(default)s)")
    add("-t", "--threads", type=int, default=1, metavar="N", help="threads (default %(default)s)")
    add("-ub", "--ubatch", type=int, default=512, metavar="N", help="tokens of a ubatch (default %(default)s)")
    add("--kind", choices=sorted(TYPES), default="f16", help="type of the cache (default %(default)s)")
    add("--qsa", type=int, choices=(0, 1), default=0, help="native QSA (default %(default)s)")
    add("--decoders", type=int, default=1, metavar="N", help="rows of a step that decode (default %(default)s)")
    add("--depth", type=int, default=256, metavar="N", help="tokens a decoder begins with (default %(default)s)")
    add("--chunks", type=numbers, default=[0, 1, 16, 64, 256], metavar="LIST",
        help="tokens of the prompt in a step (default 0,1,16,64,256)")  # fmt: skip
    add("--graphs", type=numbers, default=[0, 1], metavar="LIST", help="values of the switch (default 0,1)")
    add("--steps", type=int, default=20, metavar="N", help="steps of a block (default %(default)s)")
    add("--rounds", type=int, default=3, metavar="N", help="blocks of each value (default %(default)s)")
    add("--json", type=Path, metavar="FILE", help="also write the rows here")
    args = parser.parse_args(argv)
    lib = library.load()
    if "small-graphs" not in {switch.name for switch in lib.mg.switches()}:
        print("small_graphs: this native build has no such switch: run `llamamg build`", file=sys.stderr)
        return 1
    with lib.mg.held({"qsa": args.qsa}):
        stage = Stage(lib, args)
        for seq in range(args.decoders):
            stage.fill(seq, args.depth)
        rows = measure(stage, args)
        stage.close()
    print(table(rows))
    if args.json:
        args.json.write_text(
            json.dumps({"sizes": vars(args) | {"model": args.model.name, "json": ""}, "rows": rows}, indent=1)
        )
    return 0


if __name__ == "__main__":
    launch.run(main)
