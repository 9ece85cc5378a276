"""Contexts of the plain library on threads of their own, or one context for all sessions; started by groups.py.

What groups are measured against: the same model and flags, llama_decode and an argmax, nothing of the engine. JSON orders
on stdin, answers on stdout.
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llamamg import library
from llamamg.config import Config, PluginsConfig
from llamamg.devices import split
from llamamg.kvcache import KVCache
from llamamg.model import load_model, new_context
from llamamg.modelfile import open_model

from .errors import BenchError
from .flags import config_of
from .groups_side import N_WARM
from .json_side import asked, say, serve

FIRST_TOKEN = 5000


class Lane:
    """A context for some sessions, and batches of it."""

    def __init__(self, stock: Stock, n_sessions: int) -> None:
        self._stock, self._n = stock, n_sessions
        self._llama = stock.lib.llama
        self.context = new_context(stock.lib, stock.handle, stock.config_for(n_sessions))
        self.kv = KVCache(self._llama, self.context, is_recurrent=stock.keeps_state, n_swa=0)
        self._batch = self._llama.llama_batch_init(max(n_sessions, self._llama.llama_n_batch(self.context)), 0, 1)
        self._tokens = [(FIRST_TOKEN + 97 * seq) % stock.n_vocab for seq in range(n_sessions)]
        self.stamps: list[float] = []

    def prefill(self, prompt: NDArray[np.int32]) -> None:
        """Compute a prompt in sequence 0."""
        batch, n = self._batch, self._llama.llama_n_batch(self.context)
        for at in range(0, len(prompt), n):
            piece = prompt[at : at + n].tolist()
            for i, token in enumerate(piece):
                self._put(i, token, at + i, 0, False)
            batch.n_tokens = len(piece)
            self._decode()
        self._llama.llama_synchronize(self.context)

    def steps(self, depth: int, n_steps: int) -> None:
        """A token of each session, so many times; `stamps` has the time after each."""
        rows = range(self._n)
        self._batch.n_tokens = self._n
        for step in range(n_steps):
            for row in rows:
                self._put(row, self._tokens[row], depth + step, row, True)
            self._decode()
            self._tokens = [self._best(row) for row in rows]
            self.stamps.append(time.perf_counter())

    def _put(self, i: int, token: int, pos: int, seq: int, has_logits: bool) -> None:
        batch = self._batch
        batch.token[i], batch.pos[i], batch.n_seq_id[i] = token, pos, 1
        batch.seq_id[i][0], batch.logits[i] = seq, has_logits

    def _decode(self) -> None:
        if code := self._llama.llama_decode(self.context, self._batch):
            raise BenchError(f"llama_decode of the plain library gave {code}")

    def _best(self, row: int) -> int:
        logits = self._llama.llama_get_logits_ith(self.context, row)
        address = ctypes.cast(logits, ctypes.c_void_p).value or 0
        return int(np.ctypeslib.as_array((ctypes.c_float * self._stock.n_vocab).from_address(address)).argmax())

    def close(self) -> None:
        """Give the context back."""
        self._llama.llama_batch_free(self._batch)
        self._llama.llama_free(self.context)


class Stock:
    """A loaded model; contexts are made for every run."""

    def __init__(self, flags: Sequence[str]) -> None:
        self.lib = library.load()
        if self.lib.patched:
            raise BenchError("this is our build: the contexts of the plain library need the unpatched one")
        config = replace(config_of(flags), plugins=PluginsConfig(none=True))
        config = split.resolve(self.lib, config, open_model(config.model.path), lambda sentence: None)
        self._config, llama = config, self.lib.llama
        self.handle = load_model(self.lib, config.model)
        self.keeps_state = bool(llama.llama_model_is_recurrent(self.handle) or llama.llama_model_is_hybrid(self.handle))
        self.n_vocab = int(llama.llama_vocab_n_tokens(llama.llama_model_get_vocab(self.handle)))
        self._held: dict[int, Any] = {}

    def config_for(self, n_sessions: int) -> Config:
        """The command line's configuration with room for so many sessions of it."""
        context = self._config.context
        n_ctx = context.n_ctx // context.n_parallel * n_sessions
        return replace(self._config, context=replace(context, n_ctx=n_ctx, n_parallel=n_sessions, kv_unified=False))

    def run(self, n_contexts: int, n_sessions: int, n_tokens: int, depth: int) -> dict[str, Any]:
        """Steps of `n_sessions` in one context or in as many; tokens per second of all together."""
        each = n_sessions // n_contexts
        lanes = [Lane(self, each) for _ in range(n_contexts)]
        try:
            self._fill(lanes, depth, each)
            errors: list[BaseException] = []
            all_warm = threading.Barrier(n_contexts)  # none is through before the last one is warm

            def work(lane: Lane) -> None:
                try:
                    lane.steps(depth, N_WARM)
                    all_warm.wait()
                    lane.steps(depth + N_WARM, n_tokens)
                except BaseException as error:
                    errors.append(error)
                    all_warm.abort()

            threads = [threading.Thread(target=work, args=(lane,)) for lane in lanes]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            if errors:
                raise errors[0]
            # From when all are warm until the first one is through: all of them work meanwhile.
            begin, end = max(lane.stamps[N_WARM - 1] for lane in lanes), min(lane.stamps[-1] for lane in lanes)
            n = sum(each for lane in lanes for stamp in lane.stamps if begin < stamp <= end)
            return {"tps": n / (end - begin), "counts": [n], "seconds": end - begin}
        finally:
            for lane in lanes:
                lane.close()

    def _fill(self, lanes: list[Lane], depth: int, each: int) -> None:
        if depth not in self._held:
            prompt = np.random.default_rng(1).integers(self.n_vocab // 8, self.n_vocab // 2, depth, dtype=np.int32)
            first = Lane(self, 1)
            try:
                first.prefill(prompt)
                self._held[depth] = {n: first.kv.save_for(0, n) for n in (1, each)}
            finally:
                first.close()
        held = self._held[depth]
        if each not in held:
            raise BenchError("one context is measured before several")
        for lane in lanes:
            for seq in range(each):
                if not lane.kv.restore(seq, held[each], 0):
                    raise BenchError("the plain library refused a state that it had saved itself")


def main(order: dict[str, Any]) -> None:
    """Serve stdin."""
    stock = Stock(order["flags"])
    say({})
    for ask in asked():
        say(stock.run(*(ask[key] for key in ("n_contexts", "n_sessions", "n_tokens", "depth"))))
    stock.lib.llama.llama_model_free(stock.handle)


if __name__ == "__main__":
    serve(main)
