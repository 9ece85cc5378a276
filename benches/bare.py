"""The library alone: prompts in, then llama_decode and an argmax per row until the count is reached. Started by sides.BareLibrary.

One JSON object per line on stdin and stdout. Everything after the library call is numpy over the logits in place.
"""

from __future__ import annotations

import ctypes
import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from llamamg import library
from llamamg.config import Config, ContextConfig, ModelConfig
from llamamg.model import load_model, new_context
from llamamg.vocab import Vocabulary

from . import started


class Bare:
    """A context and a loop."""

    def __init__(self, path: Path, context: ContextConfig) -> None:
        lib = library.load()
        self._llama = lib.llama
        config = Config(ModelConfig(path), context)
        handle = load_model(lib, config.model, None)
        self._vocab = Vocabulary(lib.llama, handle)
        self._context = new_context(lib, handle, config)
        self._batch = lib.llama.llama_batch_init(context.n_batch, 0, 1)

    def generate(self, prompts: list[str], n_predict: int) -> dict[str, Any]:
        """Greedy, the end of text ignored; one stamp per step."""
        llama, batch = self._llama, self._batch
        llama.llama_memory_clear(llama.llama_get_memory(self._context), True)
        batch.n_tokens = 0
        last, lengths = [], []
        for seq_id, prompt in enumerate(prompts):
            tokens = self._vocab.tokenize(prompt, True, True)
            for pos, token in enumerate(tokens.tolist()):
                self._put(token, pos, seq_id, pos + 1 == len(tokens))
            last.append(batch.n_tokens - 1)
            lengths.append(len(tokens))
        tokens_out, stamps = self._decode(last), []
        n_streams = len(prompts)
        for i in range(n_streams):
            batch.n_seq_id[i], batch.seq_id[i][0], batch.logits[i] = 1, i, 1
        batch.n_tokens = n_streams
        rows = list(range(n_streams))
        stamps.append(time.perf_counter())
        for step in range(n_predict - 1):
            for i in rows:
                batch.token[i], batch.pos[i] = tokens_out[i], lengths[i] + step
            tokens_out = self._decode(rows)
            stamps.append(time.perf_counter())
        return {"stamps": stamps, "n_streams": n_streams}

    def _put(self, token: int, pos: int, seq_id: int, logits: bool) -> None:
        batch, i = self._batch, self._batch.n_tokens
        batch.token[i], batch.pos[i], batch.n_seq_id[i] = token, pos, 1
        batch.seq_id[i][0], batch.logits[i] = seq_id, logits
        batch.n_tokens = i + 1

    def _decode(self, rows: list[int]) -> list[int]:
        llama = self._llama
        code = llama.llama_decode(self._context, self._batch)
        if code != 0:
            raise RuntimeError(f"llama_decode gave {code}")
        n_vocab = self._vocab.n_vocab
        out = []
        for row in rows:
            logits = llama.llama_get_logits_ith(self._context, row)
            address = ctypes.cast(logits, ctypes.c_void_p).value or 0
            view = np.ctypeslib.as_array((ctypes.c_float * n_vocab).from_address(address))
            out.append(int(view.argmax()))
        return out


def main() -> int:
    """Serve stdin."""
    bare = Bare(Path(sys.argv[1]), ContextConfig(**json.loads(sys.argv[2])))
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        order = json.loads(line)
        print(json.dumps(bare.generate(order["prompts"], order["n_predict"])), flush=True)
    return 0


if __name__ == "__main__":
    started()
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(0)
