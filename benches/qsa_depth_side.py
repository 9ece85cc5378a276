"""One library in a process of its own for `bench qsa-depth`: orders on stdin, answers on stdout, a JSON object per line.

Every measurement starts from a marked state: the recurrent part is put back and the cells behind the mark are removed, so
both positions of the switch, and another library with the same state, compute the same tokens on the same cells.
"""

from __future__ import annotations

import ctypes
import re
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from llamamg import library
from llamamg.model import CACHE_TYPES

from .errors import BenchError
from .json_side import asked, say, serve

PARTIAL_ONLY = 1  # of a sequence's state: what cannot be cut back
N_BATCH = 2048
N_WARM = 4  # decoded tokens before the clock starts
COMPUTE = re.compile(r"(\S+)\s+compute buffer size\s*=\s*([\d.]+) MiB")


class Side:
    """A model and at most one context of it."""

    def __init__(self, model: str, gpu_layers: int, threads: int, cache_type: str, ubatch: int) -> None:
        self.lib = library.load()
        self.llama, self.mg = self.lib.llama, self.lib.mg
        self._threads, self._type, self._ubatch = threads, CACHE_TYPES[cache_type], ubatch
        params = self.llama.llama_model_default_params()
        params.n_gpu_layers = gpu_layers
        self._model = self.llama.llama_model_load_from_file(model.encode(), params)
        if not self._model:
            raise BenchError(f"{model} could not be loaded; see the log above")
        self.n_vocab: int = self.llama.llama_vocab_n_tokens(self.llama.llama_model_get_vocab(self._model))
        self._batch = self.llama.llama_batch_init(N_BATCH, 0, 1)
        self._context: Any = None
        self._n_past, self._n_seq = [0], 1  # of the sequences in use; of the context
        self._marks: list[Any] = []
        self._tokens = np.zeros(0, np.int64)

    def facts(self) -> dict[str, Any]:
        """What tells libraries and models apart."""
        switches = [switch.name for switch in self.mg.switches()]
        return {"build": self.lib.build_info, "n_vocab": self.n_vocab, "switches": switches}

    # -- orders

    def open(self, n_ctx: int, n_seq: int, native: bool) -> dict[str, Any]:
        """A context of `n_ctx` tokens for all of `n_seq` sequences: its compute buffers in MiB, by device."""
        self.close()
        self._switch(native)
        params = self.llama.llama_context_default_params()
        params.n_ctx, params.n_seq_max, params.n_outputs_max = n_ctx, n_seq, n_seq
        params.n_batch, params.n_ubatch = N_BATCH, self._ubatch
        params.n_threads = params.n_threads_batch = self._threads
        params.type_k = params.type_v = self._type
        params.flash_attn_type, params.kv_unified, params.no_perf = 1, False, True
        with tempfile.NamedTemporaryFile(suffix=".log") as log:
            self.mg.set_log("info", Path(log.name))
            self._context = self.llama.llama_init_from_model(self._model, params)
            self.mg.set_log("warn")
            text = Path(log.name).read_text(encoding="utf-8", errors="replace")
        if not self._context:
            raise BenchError(f"no context of {n_seq} x {n_ctx // n_seq} tokens could be made: lower the depths")
        self._n_past, self._n_seq = [0], n_seq
        self._tokens = np.random.default_rng(0).integers(0, self.n_vocab, n_ctx)
        return {
            "compute_mib": {name: float(mib) for name, mib in COMPUTE.findall(text)},
            "pipeline": "pipeline parallelism enabled" in text,
        }

    def close(self) -> None:
        """Give the context back."""
        if self._context:
            self.llama.llama_free(self._context)
        self._context, self._marks = None, []

    def advance(self, to: int, native: bool) -> dict[str, Any]:
        """Compute sequence 0 up to position `to`; tokens per second."""
        self._switch(native)
        begin, n = time.perf_counter(), to - self._n_past[0]
        self._compute(n)
        self._n_past[0] = to
        return {"tps": n / (time.perf_counter() - begin)}

    def save(self, path: str) -> None:
        """Sequence 0 as a file."""
        if not self.llama.llama_state_seq_save_file(self._context, path.encode(), 0, None, 0):
            raise BenchError(f"the state of a sequence could not be written to {path}: is there room?")

    def restore(self, path: str, position: int) -> None:
        """Sequence 0 from a file, at `position`."""
        n = ctypes.c_size_t()
        none = (self.llama.llama_token * 1)()
        if not self.llama.llama_state_seq_load_file(self._context, path.encode(), 0, none, 0, ctypes.byref(n)):
            raise BenchError(
                "the library did not take the state of a sequence: is it of the same model and cache type?"
            )
        self._n_past = [position]

    def spread(self) -> None:
        """Every other sequence becomes a copy of sequence 0."""
        memory = self.llama.llama_get_memory(self._context)
        for seq in range(1, self._n_seq):
            self.llama.llama_memory_seq_cp(memory, 0, seq, -1, -1)
        self._n_past = self._n_past[:1] * self._n_seq

    def gather(self) -> None:
        """Sequence 0 alone again."""
        memory = self.llama.llama_get_memory(self._context)
        for seq in range(1, self._n_seq):
            self.llama.llama_memory_seq_rm(memory, seq, -1, -1)
        self._n_past = self._n_past[:1]

    def mark(self) -> None:
        """Measurements begin here from now on."""
        self._marks = []
        for seq in range(len(self._n_past)):
            size = self.llama.llama_state_seq_get_size_ext(self._context, seq, PARTIAL_ONLY)
            state = (ctypes.c_uint8 * size)()
            self.llama.llama_state_seq_get_data_ext(self._context, state, size, seq, PARTIAL_ONLY)
            self._marks.append(state)

    def prefill(self, n: int, native: bool) -> dict[str, Any]:
        """Compute `n` tokens of sequence 0 from the mark; tokens per second. One ubatch before it is not timed."""
        self._switch(native)
        self._compute(min(n, self._ubatch))
        self._back()
        before = self._n_native()
        begin = time.perf_counter()
        self._compute(n)
        seconds = time.perf_counter() - begin
        self._back()
        return {"tps": n / seconds, "n_native": self._n_native() - before}

    def decode(self, n: int, native: bool) -> dict[str, Any]:
        """Decode `n` tokens of every sequence together from the mark; tokens per second over all of them."""
        self._switch(native)
        begin, before = 0.0, self._n_native()
        for i in range(n + N_WARM):
            if i == N_WARM:
                begin = time.perf_counter()
            self._run((int(self._tokens[past + i]), past + i, seq, True) for seq, past in enumerate(self._n_past))
            self._wait()
        seconds = time.perf_counter() - begin
        self._back()
        return {"tps": n * len(self._n_past) / seconds, "n_native": self._n_native() - before}

    def logits(self, path: str, native: bool) -> None:
        """Logits of one more token of sequence 0, from the mark: float32 [n_vocab]."""
        self._switch(native)
        self._run([(1234 % self.n_vocab, self._n_past[0], 0, True)])
        row = self.llama.llama_get_logits_ith(self._context, 0)
        np.save(path, np.ctypeslib.as_array(row, (self.n_vocab,)))
        self._back()

    # -- inside

    def _switch(self, native: bool) -> None:
        if native or self.lib.patched:
            self.mg.set_switch("qsa", int(native))

    def _n_native(self) -> int:
        """Ubatches that the native graph has computed in this process."""
        return self.mg.qsa_stats().n_native if self.lib.patched else 0

    def _wait(self) -> None:
        self.llama.llama_synchronize(self._context)

    def _back(self) -> None:
        memory = self.llama.llama_get_memory(self._context)
        for seq, (state, past) in enumerate(zip(self._marks, self._n_past, strict=True)):
            self.llama.llama_state_seq_set_data_ext(self._context, state, len(state), seq, PARTIAL_ONLY)
            if not self.llama.llama_memory_seq_rm(memory, seq, past, -1):
                raise BenchError(f"the library did not go back to position {past} of sequence {seq}")
        self._wait()

    def _compute(self, n: int) -> None:
        past = self._n_past[0]
        tokens = self._tokens[past : past + n].tolist()
        for at in range(0, n, N_BATCH):
            piece = enumerate(tokens[at : at + N_BATCH], past + at)
            self._run((token, position, 0, False) for position, token in piece)
        self._wait()

    def _run(self, rows: Iterable[tuple[int, int, int, bool]]) -> None:
        batch, n = self._batch, 0
        for n, (token, position, seq, output) in enumerate(rows, 1):
            batch.token[n - 1], batch.pos[n - 1], batch.n_seq_id[n - 1] = token, position, 1
            batch.seq_id[n - 1][0], batch.logits[n - 1] = seq, output
        batch.n_tokens = n
        status = self.llama.llama_decode(self._context, batch)
        if status != 0:
            raise BenchError(f"llama_decode returned {status} at position {self._n_past[0]}: see the log above")


ORDERS = ("open", "close", "advance", "save", "restore", "spread", "gather", "mark", "prefill", "decode", "logits")


def main(order: dict[str, Any]) -> None:
    """Serve stdin; the first line out has the facts."""
    side = Side(**order)
    say(side.facts())
    for ask in asked():
        name = ask.pop("do")
        assert name in ORDERS, name
        say(getattr(side, name)(**ask) or {})


if __name__ == "__main__":
    serve(main)
