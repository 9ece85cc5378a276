"""How long a sequence takes from one context to another: `python -m benches.handover -m MODEL`.

A prefill context computes the prompt; then the sequence goes to a decode context and back, on the device. The
fallback, a state saved to host memory and loaded from there, is timed beside it.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from llamamg import library

from . import launch

TYPES = {"f32": 0, "f16": 1, "q8_0": 8, "q4_0": 2}


class Holder:
    """A context and what moving needs of it."""

    def __init__(self, lib: library.Library, model: Any, args: argparse.Namespace, n_seq: int, n_ubatch: int) -> None:
        self.lib, self.llama = lib, lib.llama
        params = self.llama.llama_context_default_params()
        params.n_ctx, params.n_seq_max = args.ctx * n_seq, n_seq
        params.n_batch = params.n_ubatch = n_ubatch
        params.n_threads = params.n_threads_batch = args.threads
        params.type_k = params.type_v = TYPES[args.kind]
        params.flash_attn_type = 1
        self.pointer = self.llama.llama_init_from_model(model, params)
        if not self.pointer:
            raise SystemExit("handover: no memory for a context; take a smaller --ctx or fewer --seqs")
        self.memory = self.llama.llama_get_memory(self.pointer)
        self.n_batch = n_ubatch

    def fill(self, seq: int, ids: np.ndarray) -> None:
        """Decode tokens from position 0 on."""
        batch = self.llama.llama_batch_init(self.n_batch, 0, 1)
        for begin in tqdm(range(0, len(ids), self.n_batch), desc="prompt", leave=False):
            part = ids[begin : begin + self.n_batch]
            batch.n_tokens = len(part)
            for i, token in enumerate(part.tolist()):
                batch.token[i], batch.pos[i], batch.n_seq_id[i] = token, begin + i, 1
                batch.seq_id[i][0], batch.logits[i] = seq, i + 1 == len(part)
            if self.llama.llama_decode(self.pointer, batch) != 0:
                raise SystemExit(f"handover: the prompt does not fit at {begin}; take a larger --ctx")
        self.llama.llama_batch_free(batch)
        self.llama.llama_synchronize(self.pointer)

    def remove(self, seq: int) -> None:
        self.llama.llama_memory_seq_rm(self.memory, seq, -1, -1)

    def step(self, seq: int, pos: int) -> list[float]:
        """One token; its logits."""
        batch = self.llama.llama_batch_init(1, 0, 1)
        batch.n_tokens, batch.token[0], batch.pos[0], batch.n_seq_id[0] = 1, 7, pos, 1
        batch.seq_id[0][0], batch.logits[0] = seq, True
        if self.llama.llama_decode(self.pointer, batch) != 0:
            raise SystemExit("handover: the step after the move failed")
        self.llama.llama_batch_free(batch)
        n_vocab = self.llama.llama_vocab_n_tokens(
            self.llama.llama_model_get_vocab(self.llama.llama_get_model(self.pointer))
        )
        return list(self.llama.llama_get_logits_ith(self.pointer, 0)[:n_vocab])

    def save(self, seq: int) -> Any:
        size = self.llama.llama_state_seq_get_size(self.pointer, seq)
        data = (ctypes.c_uint8 * size)()
        if self.llama.llama_state_seq_get_data(self.pointer, data, size, seq) != size:
            raise SystemExit("handover: the state cannot be saved")
        return data

    def load(self, seq: int, data: Any) -> None:
        if self.llama.llama_state_seq_set_data(self.pointer, data, len(data), seq) != len(data):
            raise SystemExit("handover: the state cannot be loaded")


def timed(call: Callable[[], Any]) -> float:
    """Milliseconds."""
    begin = time.perf_counter()
    call()
    return (time.perf_counter() - begin) * 1e3


def measure(lib: library.Library, args: argparse.Namespace) -> dict[str, Any]:
    """Medians over the rounds, and whether the step after all moves has the bits of the one before them."""
    params = lib.llama.llama_model_default_params()
    params.n_gpu_layers = args.ngl
    model = lib.llama.llama_model_load_from_file(str(args.model).encode(), params)
    if not model:
        raise SystemExit(f"handover: {args.model} does not load")
    prefill = Holder(lib, model, args, 1, args.ubatch)
    decode = Holder(lib, model, args, args.seqs, 16)
    last = args.seqs - 1
    prefill.fill(0, np.random.default_rng(1).integers(0, 40000, args.tokens))
    moves: list[float] = []
    copies: list[float] = []
    for _ in tqdm(range(args.rounds), desc="moves", leave=False):
        for a, seq_a, b, seq_b in ((prefill, 0, decode, last), (decode, last, prefill, 0)):
            moves.append(timed(partial(lib.mg.move_sequence, a.pointer, seq_a, b.pointer, seq_b)))
    for _ in range(min(args.rounds, 3)):
        decode.remove(last)
        copies.append(timed(partial(lib.mg.copy_sequence, prefill.pointer, 0, decode.pointer, last)))
    same = prefill.step(0, args.tokens) == decode.step(last, args.tokens)
    decode.remove(last)
    host, data = [], None
    for _ in range(min(args.rounds, 3)):
        begin = time.perf_counter()
        data = prefill.save(0)
        if lib.patched or args.seqs == 1:  # upstream loads only into as many streams as it saved from
            decode.load(last, data)
        host.append((time.perf_counter() - begin) * 1e3)
        decode.remove(last)
    result = {
        "n_tokens": args.tokens,
        "n_ctx_seq": args.ctx,
        "n_seqs": args.seqs,
        "kind": args.kind,
        "n_bytes": len(data) if data is not None else 0,
        "move_ms": statistics.median(moves),
        "move_max_ms": max(moves),
        "copy_ms": statistics.median(copies),
        "host_ms": statistics.median(host),
        "same_logits": same,
    }
    for holder in (prefill, decode):
        lib.llama.llama_free(holder.pointer)
    lib.llama.llama_model_free(model)
    return result


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benches.handover", description=__doc__)
    parser.add_argument("-m", "--model", type=Path, required=True, help="a GGUF model")
    parser.add_argument("-ngl", type=int, default=0, help="layers on the GPU")
    parser.add_argument("--tokens", type=int, default=32768, help="length of the sequence")
    parser.add_argument("--ctx", type=int, default=0, help="cells of each sequence (default: tokens + 1024)")
    parser.add_argument("--seqs", type=int, default=1, help="sequences of the decode context")
    parser.add_argument("--ubatch", type=int, default=512, help="of the prefill context")
    parser.add_argument("--kind", choices=TYPES, default="f16", help="type of the K and V cache")
    parser.add_argument("--rounds", type=int, default=10, help="there and back, this often")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads")
    parser.add_argument("--no-qsa", action="store_true", help="upstream's sparse attention instead of the native one")
    parser.add_argument("--json", type=Path, help="write the result here too")
    return parser


def main() -> int:
    args = arguments().parse_args()
    args.ctx = args.ctx or args.tokens + 1024
    lib = library.load()
    if lib.patched:
        lib.mg.set_switch("qsa", 0 if args.no_qsa else 1)
    result = measure(lib, args)
    print(json.dumps(result))
    if args.json:
        args.json.write_text(json.dumps(result) + "\n")
    return 0 if result["same_logits"] else 1


if __name__ == "__main__":
    launch.run(main)
