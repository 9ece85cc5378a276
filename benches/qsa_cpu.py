"""Native QSA against upstream's graph on the CPU: `python -m benches.qsa_cpu`.

One process, one context, one cache: the prompt is computed natively, then rounds of decoding alternate between the switch
off and on, so that both see the same depth and the same machine. CPU time of one thread, the best round of each side.
"""

from __future__ import annotations

import argparse
import ctypes
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from llamamg import library, synth

from . import launch

TYPES = {"F32": 0, "F16": 1, "Q8_0": 8, "Q4_0": 2}
N_UBATCH = 512
AT_DEPTH = (65_536, 3.0)  # off / on at least this much at this depth
ANYWHERE = 0.97


class Decoder:
    """Feeds one sequence and keeps count of its length."""

    def __init__(self, lib: library.Library, path: Path, n_ctx: int, kind: str) -> None:
        self.llama = llama = lib.llama
        self.model = llama.llama_model_load_from_file(str(path).encode(), llama.llama_model_default_params())
        params = llama.llama_context_default_params()
        params.n_ctx, params.n_batch, params.n_ubatch = n_ctx, N_UBATCH, N_UBATCH
        params.n_threads = params.n_threads_batch = 1
        params.type_k = params.type_v = TYPES[kind]
        params.flash_attn_type = 1
        self.context = llama.llama_init_from_model(self.model, params)
        n_vocab = llama.llama_vocab_n_tokens(llama.llama_model_get_vocab(self.model))
        self.ids = np.random.default_rng(1).integers(0, n_vocab, n_ctx, dtype=np.int32)
        self.n_past = 0

    def close(self) -> None:
        """Give context and model back."""
        self.llama.llama_free(self.context)
        self.llama.llama_model_free(self.model)

    def feed(self, n: int) -> None:
        """Decode the next n tokens in one batch."""
        pointer = self.ids[self.n_past :].ctypes.data_as(ctypes.POINTER(ctypes.c_int32))
        status = self.llama.llama_decode(self.context, self.llama.llama_batch_get_one(pointer, n))
        if status != 0:
            raise SystemExit(f"qsa_cpu: llama_decode returned {status} at {self.n_past} tokens")
        self.n_past += n

    def prefill(self, depth: int) -> float:
        """Go on to a depth; CPU ms per token."""
        n, begin = depth - self.n_past, time.process_time()
        for _ in tqdm(range(self.n_past, depth, N_UBATCH), desc=f"to {depth}", leave=False):
            self.feed(min(N_UBATCH, depth - self.n_past))
        return (time.process_time() - begin) / max(n, 1) * 1e3

    def decode(self, n: int) -> float:
        """CPU ms per token over n tokens, after one that is not counted: it may build a graph or pool keys."""
        self.feed(1)
        begin = time.process_time()
        for _ in range(n):
            self.feed(1)
        return (time.process_time() - begin) / n * 1e3


def measure(lib: library.Library, path: Path, kind: str, depths: Sequence[int], rounds: int, n: int) -> list[Any]:
    """Rows (depth, off, on, prefill), in ms per token."""
    decoder = Decoder(lib, path, max(depths) + 2 * rounds * (n + 1) * len(depths) + N_UBATCH, kind)
    rows = []
    for depth in sorted(depths):
        lib.mg.set_switch("qsa", 1)
        prefill = decoder.prefill(depth)
        best = [float("inf"), float("inf")]
        for i in range(rounds):
            for value in (0, 1) if i % 2 == 0 else (1, 0):
                lib.mg.set_switch("qsa", value)
                best[value] = min(best[value], decoder.decode(n))
        rows.append((depth, best[0], best[1], prefill))
    decoder.close()
    lib.mg.set_switch("qsa", 0)
    return rows


def main(argv: Sequence[str] | None = None) -> int:
    """Print a table per cache type; 1 when a target is missed."""
    parser = argparse.ArgumentParser(prog="python -m benches.qsa_cpu", description=__doc__)
    parser.add_argument("-m", "--model", type=Path, help="a qwen4exp GGUF (default: the micro preset, seed 1)")
    parser.add_argument("--depths", type=int, nargs="+", default=[0, 1024, 16384, 65536], help="tokens before decoding")
    parser.add_argument("--types", nargs="+", default=["F16", "Q8_0"], choices=sorted(TYPES), help="cache types")
    parser.add_argument("--rounds", type=int, default=4, help="rounds of either side (default: %(default)s)")
    parser.add_argument("--tokens", type=int, default=16, help="tokens of a round (default: %(default)s)")
    args = parser.parse_args(argv)
    lib = library.load()
    if not lib.patched:
        raise SystemExit("qsa_cpu: this build is unpatched and has no native QSA; run `llamamg build`")
    missed = 0
    with tempfile.TemporaryDirectory(prefix="llamamg-") as scratch:
        path = args.model or synth.write_model(Path(scratch) / "micro.gguf")
        print(
            "| depth | cache | off, ms/token | on, ms/token | off / on | prefill on, ms/token |\n|---|---|---|---|---|---|"
        )
        for kind in args.types:
            for depth, off, on, prefill in measure(lib, path, kind, args.depths, args.rounds, args.tokens):
                wanted = AT_DEPTH[1] if depth == AT_DEPTH[0] else ANYWHERE
                missed += off / on < wanted
                chunks = f"{prefill:.2f}" if depth else "-"
                print(f"| {depth} | {kind} | {off:.2f} | {on:.2f} | {off / on:.2f} | {chunks} |", flush=True)
    return 1 if missed else 0


if __name__ == "__main__":
    launch.run(main)
