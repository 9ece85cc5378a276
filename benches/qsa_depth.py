"""Native QSA on and off over depth in one process: `llamamg bench qsa-depth -m MODEL` (a `qwen4exp` model, usually on a GPU).

One context and one cache: the prompt is computed natively, and at each depth decoding and a piece of prefill are timed with
the switch on and off on the same cells. Off is upstream's graph; `bench grid` compares that with the unpatched build.
"""

from __future__ import annotations

import argparse
import ctypes
import re
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from llamamg import library

from . import program, record
from .arguments import add_results
from .errors import BenchError

NAME = "qsa-depth"
HELP = "decode, prefill and compute memory with native QSA on and off, over depth"
CACHE_TYPES = {"f16": 1, "q8_0": 8}
PARTIAL_ONLY = 1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the bench."""
    add = parser.add_argument
    add("-m", "--model", type=Path, required=True, help="a qwen4exp model, e.g. from `llamamg synth --preset full`")
    add("--depths", default="5000,50000,250000", help="depths in tokens, ascending (default %(default)s)")
    add("--five-at", type=int, default=102_400, help="depth of five sessions decoding together; 0: leave out")
    add("--gpu-layers", type=int, default=99, help="layers on the GPU (default all)")
    add("--cache-type", choices=sorted(CACHE_TYPES), default="q8_0", help="type of the K and V cache (default q8_0)")
    add("--ubatch", type=int, default=512, help="tokens of a ubatch (default 512)")
    add("--piece", type=int, default=2048, help="tokens of a timed prefill (default 2048)")
    add("--threads", type=int, default=8, help="CPU threads (default 8)")
    add_results(parser)


class Cell:
    """One context of a model, with the switch in reach."""

    def __init__(self, lib: library.Library, model: Any, args: argparse.Namespace, n_ctx: int, n_seq: int) -> None:
        self.llama, self.mg = lib.llama, lib.mg
        self.n_vocab: int = self.llama.llama_vocab_n_tokens(self.llama.llama_model_get_vocab(model))
        params = self.llama.llama_context_default_params()
        params.n_ctx, params.n_seq_max, params.n_outputs_max = n_ctx, n_seq, n_seq
        params.n_batch, params.n_ubatch = 2048, args.ubatch
        params.n_threads = params.n_threads_batch = args.threads
        params.type_k = params.type_v = CACHE_TYPES[args.cache_type]
        params.flash_attn_type, params.no_perf = 1, True
        with tempfile.NamedTemporaryFile(suffix=".log") as log:
            self.mg.set_log("info", Path(log.name))
            self.context = self.llama.llama_init_from_model(model, params)
            self.mg.set_log("warn")
            text = Path(log.name).read_text(encoding="utf-8", errors="replace")
        if not self.context:
            raise BenchError(f"no context of {n_ctx} tokens could be made: lower --depths or --five-at")
        self.compute_mib = {
            n: float(mib) for n, mib in re.findall(r"(\S+)\s+compute buffer size\s*=\s*([\d.]+) MiB", text)
        }
        self.batch = self.llama.llama_batch_init(2048, 0, 1)
        self.n_past = [0] * n_seq
        self._rng = np.random.default_rng(0)

    def native(self, on: bool) -> None:
        """Set the switch; it acts from the next ubatch on."""
        self.mg.set_switch("qsa", int(on))

    def _run(self, rows: Iterable[tuple[int, int, int, bool]]) -> None:
        batch, n = self.batch, 0
        for n, (token, position, seq, output) in enumerate(rows, 1):
            batch.token[n - 1], batch.pos[n - 1], batch.n_seq_id[n - 1] = token, position, 1
            batch.seq_id[n - 1][0], batch.logits[n - 1] = seq, output
        batch.n_tokens = n
        status = self.llama.llama_decode(self.context, batch)
        if status != 0:
            raise BenchError(f"llama_decode returned {status} at {max(self.n_past)} tokens: see the log above")

    def prefill(self, n: int) -> float:
        """Compute n random tokens of sequence 0; tokens per second."""
        tokens = self._rng.integers(0, self.n_vocab, n).tolist()
        self.llama.llama_synchronize(self.context)
        begin = time.perf_counter()
        for at in range(0, n, 2048):
            piece = tokens[at : at + 2048]
            self._run((token, self.n_past[0] + at + i, 0, False) for i, token in enumerate(piece))
        self.llama.llama_synchronize(self.context)
        self.n_past[0] += n
        return n / (time.perf_counter() - begin)

    def decode(self, n: int, n_warm: int = 4) -> float:
        """Decode n tokens of every sequence together; tokens per second over all of them."""
        begin = 0.0
        for i in range(n + n_warm):
            if i == n_warm:
                begin = time.perf_counter()
            self._run((int(self._rng.integers(self.n_vocab)), p, seq, True) for seq, p in enumerate(self.n_past))
            self.llama.llama_synchronize(self.context)
            self.n_past = [p + 1 for p in self.n_past]
        return n * len(self.n_past) / (time.perf_counter() - begin)

    def compare(self) -> dict[str, Any]:
        """One token from the same state by both graphs, and natively once more. Positions of 4 k + 2 select the same cells."""
        while self.n_past[0] % 4 != 2:
            self.prefill(1)
        llama, position = self.llama, self.n_past[0]
        size = llama.llama_state_seq_get_size_ext(self.context, 0, PARTIAL_ONLY)
        state = (ctypes.c_uint8 * size)()
        llama.llama_state_seq_get_data_ext(self.context, state, size, 0, PARTIAL_ONLY)
        rows = []
        for on in (True, False, True):
            self.native(on)
            self._run([(1234 % self.n_vocab, position, 0, True)])
            rows.append(np.ctypeslib.as_array(llama.llama_get_logits_ith(self.context, 0), (self.n_vocab,)).copy())
            llama.llama_state_seq_set_data_ext(self.context, state, size, 0, PARTIAL_ONLY)
            llama.llama_memory_seq_rm(llama.llama_get_memory(self.context), 0, position, -1)
        mine, upstream, again = rows
        return {
            "position": position,
            "largest_difference": float(np.abs(mine - upstream).max() / np.abs(upstream).max()),
            "same_best_token": bool(mine.argmax() == upstream.argmax()),
            "same_bits_twice": bool((mine == again).all()),
        }

    def close(self) -> None:
        """Give the context back."""
        self.llama.llama_free(self.context)


def over_depth(cell: Cell, depths: list[int], piece: int) -> list[dict[str, Any]]:
    """Rates of both positions of the switch at each depth."""
    rows = []
    for depth in tqdm(depths, desc="depths"):
        cell.native(True)
        if (ahead := depth - 2 * piece - cell.n_past[0]) > 0:
            cell.prefill(ahead)
        row: dict[str, Any] = {"depth": depth, "prefill_on": cell.prefill(piece)}
        cell.native(False)
        row["prefill_off"] = cell.prefill(piece)
        cell.native(True)
        before = cell.decode(32)
        cell.native(False)
        row["decode_off"] = cell.decode(16)
        cell.native(True)
        row["decode_on"] = (before + cell.decode(32)) / 2
        row["compare"] = cell.compare()
        rows.append(row)
    return rows


def five(cell: Cell, depth: int) -> dict[str, float]:
    """Five sessions at one depth, made from one prompt by copying its sequence."""
    cell.native(True)
    cell.n_past = [0]
    cell.prefill(depth)
    for seq in range(1, 5):
        cell.llama.llama_memory_seq_cp(cell.llama.llama_get_memory(cell.context), 0, seq, -1, -1)
    cell.n_past = [depth] * 5
    on = cell.decode(24)
    cell.native(False)
    off = cell.decode(8)
    cell.native(True)
    return {"depth": depth, "decode_off": off, "decode_on": (on + cell.decode(24)) / 2}


def run(args: argparse.Namespace) -> int:
    """Measure and keep the result; 0."""
    depths = sorted(int(text) for text in args.depths.split(","))
    lib = library.load()
    if "qsa" not in {switch.name for switch in lib.mg.switches()}:
        raise BenchError("this build has no switch qsa: run `llamamg build`")
    params = lib.llama.llama_model_default_params()
    params.n_gpu_layers = args.gpu_layers
    model = lib.llama.llama_model_load_from_file(str(args.model).encode(), params)
    if not model:
        raise BenchError(f"{args.model} could not be loaded; see the log above")
    result: dict[str, Any] = {"bench": NAME, "cache_type": args.cache_type, "ubatch": args.ubatch}
    lib.mg.set_switch("qsa", 1)
    with record.ResultFolder(NAME, args.results) as folder:
        cell = Cell(lib, model, args, -(-(depths[-1] + 3 * args.piece) // 256) * 256, 1)
        result |= {"compute_mib_on": cell.compute_mib, "rows": over_depth(cell, depths, args.piece)}
        cell.close()
        if args.five_at:
            cell = Cell(lib, model, args, (args.five_at + 256) * 5, 5)
            result["five"] = five(cell, args.five_at)
            cell.close()
        result["record"] = record.everything(build=record.build(lib.dir), model=record.model(args.model, "synthetic"))
        folder.write("qsa-depth.json", result)
        folder.text("table.md", table(result) + "\n")
    lib.mg.set_switch("qsa", 0)
    lib.llama.llama_model_free(model)
    print(table(result), f"kept in {folder.final}", sep="\n")
    return 0


def table(result: dict[str, Any]) -> str:
    """The result in words, from the JSON alone."""
    lines = [
        "| depth | decode off | on | ratio | prefill off | on | ratio |",
        "| ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for r in result["rows"]:
        d, p = r["decode_on"] / r["decode_off"], r["prefill_on"] / r["prefill_off"]
        lines.append(
            f"| {r['depth']} | {r['decode_off']:.1f} | {r['decode_on']:.1f} | {d:.2f} "
            f"| {r['prefill_off']:.0f} | {r['prefill_on']:.0f} | {p:.2f} |"
        )
    if "five" in result:
        f = result["five"]
        lines.append(
            f"\nFive sessions at {f['depth']}: {f['decode_off']:.1f} off, {f['decode_on']:.1f} on, t/s over all."
        )
    return "\n".join(lines)


if __name__ == "__main__":
    import sys

    sys.exit(program.alone(sys.modules[__name__]))
