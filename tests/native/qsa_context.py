"""A small decoding loop over libllama: sequences, logits of chosen rows, and the switch."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType
from numpy.typing import NDArray

from llamamg.library import Library

Logits = NDArray[np.float32]
Row = tuple[int, int, int]  # sequence, position, token


def tokens(n: int, seed: int = 1) -> list[int]:
    """Random token ids of the micro model's vocabulary."""
    return [int(t) for t in np.random.default_rng(seed).integers(0, 50000, n)]


def difference(a: Logits, b: Logits) -> float:
    """Largest difference relative to the largest logit."""
    return float(np.abs(a - b).max() / np.abs(b).max())


@contextmanager
def qsa(library: Library, value: int) -> Iterator[None]:
    """The switch at a value, and back."""
    before = library.mg.switch("qsa")
    library.mg.set_switch("qsa", value)
    try:
        yield
    finally:
        library.mg.set_switch("qsa", before)


class Counted:
    """What the counters did inside a `with`."""

    def __init__(self, library: Library) -> None:
        self.library = library

    def __enter__(self) -> Counted:
        self.before = self.library.mg.qsa_stats()
        return self

    def __exit__(self, *_: object) -> None:
        after = self.library.mg.qsa_stats()
        self.n_native = after.n_native - self.before.n_native
        self.n_fallback = after.n_fallback - self.before.n_fallback
        self.n_pooled = after.n_pooled - self.before.n_pooled


class Model:
    def __init__(self, library: Library, path: Path, *, n_gpu_layers: int = 0) -> None:
        self.library, self.llama = library, library.llama
        params = self.llama.llama_model_default_params()
        params.n_gpu_layers = n_gpu_layers
        self.pointer = self.llama.llama_model_load_from_file(str(path).encode(), params)
        assert self.pointer, f"{path} does not load"
        self.n_vocab = self.llama.llama_vocab_n_tokens(self.llama.llama_model_get_vocab(self.pointer))

    def close(self) -> None:
        self.llama.llama_model_free(self.pointer)


class Context:
    """Decodes rows; positions are the caller's. Use as a context manager."""

    def __init__(
        self, model: Model, *, n_ctx: int = 512, n_seq: int = 1, n_ubatch: int = 512, kind: str = "F32",
        unified: bool = False, n_rollback: int = 0, flash: bool = True, watch: Any = None,
    ) -> None:  # fmt: skip
        self.model, self.llama = model, model.llama
        params = self.llama.llama_context_default_params()
        params.n_ctx, params.n_seq_max = n_ctx * (1 if unified else n_seq), n_seq
        params.n_batch, params.n_ubatch = 2048, n_ubatch
        params.n_threads = params.n_threads_batch = 1
        params.type_k = params.type_v = int(GGMLQuantizationType[kind])
        params.flash_attn_type = 1 if flash else 0
        params.kv_unified = unified
        params.n_rs_seq = n_rollback
        if watch is not None:
            params.cb_eval = watch.callback
        self.pointer = self.llama.llama_init_from_model(model.pointer, params)
        assert self.pointer, "no context"
        self.memory = self.llama.llama_get_memory(self.pointer)

    def __enter__(self) -> Context:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.llama.llama_free(self.pointer)

    def decode(self, rows: Sequence[Row], n_logits: int = 1) -> Logits:
        """Logits [n_logits, n_vocab] of the last rows of one batch."""
        batch = self.llama.llama_batch_init(len(rows), 0, 1)
        batch.n_tokens = len(rows)
        for i, (seq, position, token) in enumerate(rows):
            batch.token[i], batch.pos[i], batch.n_seq_id[i] = token, position, 1
            batch.seq_id[i][0] = seq
            batch.logits[i] = i >= len(rows) - n_logits
        status = self.llama.llama_decode(self.pointer, batch)
        self.llama.llama_batch_free(batch)
        assert status == 0, f"llama_decode returned {status}"
        return np.stack([self._row(i) for i in range(len(rows) - n_logits, len(rows))])

    def image(self, n_rows: int, n_columns: int, *, seq: int, start: int) -> Logits:
        """Decode random embeddings at the 2-D positions of an image; logits [1, n_vocab] of the last one."""
        n = n_rows * n_columns
        n_embd = self.llama.llama_model_n_embd_inp(self.model.pointer)
        batch = self.llama.llama_batch_init(n, n_embd, 1)
        positions = (ctypes.c_int32 * (4 * n))()
        pointer = type(batch.pos)
        own = ctypes.cast(batch.pos, ctypes.c_void_p).value
        batch.pos = ctypes.cast(positions, pointer)
        batch.n_tokens = n
        values = np.random.default_rng(7).standard_normal(n * n_embd).astype(np.float32)
        ctypes.memmove(batch.embd, values.ctypes.data, values.nbytes)
        for i in range(n):
            positions[i], positions[n + i], positions[2 * n + i] = start, start + i // n_columns, start + i % n_columns
            batch.n_seq_id[i], batch.seq_id[i][0], batch.logits[i] = 1, seq, i == n - 1
        status = self.llama.llama_decode(self.pointer, batch)
        batch.pos = ctypes.cast(own, pointer)
        self.llama.llama_batch_free(batch)
        assert status == 0, f"llama_decode returned {status}"
        return self._row(n - 1)[None]

    def _row(self, i: int) -> Logits:
        pointer = self.llama.llama_get_logits_ith(self.pointer, i)
        return np.ctypeslib.as_array(pointer, shape=(self.model.n_vocab,)).copy()

    def feed(self, ids: Sequence[int], *, seq: int = 0, start: int = 0, chunk: int = 2048) -> Logits:
        """Decode tokens at consecutive positions, `chunk` a batch; logits [1, n_vocab] of the last one."""
        logits = None
        for i in range(0, len(ids), chunk):
            logits = self.decode([(seq, start + i + j, token) for j, token in enumerate(ids[i : i + chunk])])
        assert logits is not None
        return logits

    def remove(self, seq: int, start: int, end: int = -1) -> bool:
        return bool(self.llama.llama_memory_seq_rm(self.memory, seq, start, end))

    def copy(self, source: int, target: int) -> None:
        self.llama.llama_memory_seq_cp(self.memory, source, target, -1, -1)

    def clear(self) -> None:
        self.llama.llama_memory_clear(self.memory, True)

    def save(self, seq: int) -> Any:
        size = self.llama.llama_state_seq_get_size(self.pointer, seq)
        data = (ctypes.c_uint8 * size)()
        assert self.llama.llama_state_seq_get_data(self.pointer, data, size, seq) == size
        return data

    def restore(self, data: Any, seq: int) -> None:
        assert self.llama.llama_state_seq_set_data(self.pointer, data, len(data), seq) == len(data)
