"""Several contexts on one rpc-server, for test_rpc.py: a process of its own, because a device once added stays.

usage: rpc_contexts.py MODEL ENDPOINT[,ENDPOINT] decode|move|copies      prints JSON
"""

from __future__ import annotations

import json
import random
import sys
import threading
import time
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from qsa_context import Context, Logits, Model, tokens

from llamamg import library
from llamamg.config import ModelConfig
from llamamg.model import load_model

N_CONTEXT = 4
N_STEP = 200
N_PROMPT = 40


def decode(context: Context, seed: int, pauses: bool) -> Logits:
    """A prompt and single tokens; logits [N_STEP, n_vocab]."""
    chance = random.Random(seed)
    context.clear()
    context.feed(tokens(N_PROMPT, seed))
    rows = []
    for i, token in enumerate(tokens(N_STEP, seed + 1)):
        if pauses:
            time.sleep(chance.random() * 2e-3)  # so that now one, now the other sends twice in a row
        rows.append(context.feed([token], start=N_PROMPT + i))
    return np.concatenate(rows)


def together(model: Model) -> list[int]:
    """Steps of each context that differ when a thread for each decodes at once."""
    with ExitStack() as stack:
        contexts = [stack.enter_context(Context(model, n_ctx=512)) for _ in range(N_CONTEXT)]
        alone = [decode(context, seed, False) for seed, context in enumerate(contexts)]
        result = list(alone)

        def run(i: int) -> None:
            result[i] = decode(contexts[i], i, True)

        threads = [threading.Thread(target=run, args=(i,)) for i in range(N_CONTEXT)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    return [int((a != b).any(axis=1).sum()) for a, b in zip(alone, result, strict=True)]


def move(model: Model) -> dict[str, bool]:
    """Whether a sequence moved and copied between contexts on the server continues with the same bits."""
    mg = model.library.mg
    with Context(model, n_seq=2) as a, Context(model, n_seq=2, n_ctx=256) as b:
        a.feed(tokens(100), seq=0)
        a.feed(tokens(100), seq=1)
        mg.copy_sequence(a.pointer, 1, b.pointer, 1)
        mg.move_sequence(a.pointer, 1, b.pointer, 0)
        rows = [context.feed([5], seq=seq, start=100) for context, seq in ((a, 0), (b, 0), (b, 1))]
    return {"move": bool((rows[0] == rows[1]).all()), "copy": bool((rows[0] == rows[2]).all())}


def copies(model: Model) -> dict[str, Any]:
    """Contexts made with the switch one-copy off, on and off again: log of each, and whether their logits agree."""
    mg, logs, rows = model.library.mg, [], []
    for value in (0, 1, 0):
        with TemporaryDirectory() as folder:
            log = Path(folder) / "log"
            mg.set_log("info", log)
            with mg.held({"one-copy": value}):
                context = Context(model, n_ctx=512)
            mg.set_log("warn")
            logs.append(log.read_text())
        with context:
            rows.append(decode(context, 1, False))
    return {"logs": logs, "same": all(bool((row == rows[0]).all()) for row in rows)}


def main() -> None:
    path, endpoint, what = sys.argv[1:]
    lib = library.load()
    model = Model.__new__(Model)
    model.library, model.llama = lib, lib.llama
    model.pointer = load_model(lib, ModelConfig(Path(path), rpc=tuple(endpoint.split(",")), n_gpu_layers="all"))
    model.n_vocab = lib.llama.llama_vocab_n_tokens(lib.llama.llama_model_get_vocab(model.pointer))
    print(json.dumps({"decode": together, "move": move, "copies": copies}[what](model)))


if __name__ == "__main__":
    main()
