"""Sampling kernels of libllamamg: the best token of a row of logits, and log-probabilities. They run on the CPU."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np

from llamamg import library as native
from llamamg.abi import ffi
from llamamg.config import Config, ContextConfig, ModelConfig
from llamamg.model import load_model, new_context
from llamamg.replay import decode

from .errors import BenchError
from .kernels_case import Case, Check
from .kernels_device import Device
from .kernels_model import large_vocabulary_model

N_TOP = 10
ROWS = (1, 5)


class Rows:
    """A context with `n` rows of logits, which are overwritten with chosen values."""

    def __init__(self, n: int, seed: int = 1) -> None:
        self.lib = native.load()
        config = Config(
            ModelConfig(large_vocabulary_model()), ContextConfig(n_ctx=256 * n, n_parallel=n, n_threads=1, warmup=False)
        )
        llama = self.lib.llama
        self.model = load_model(self.lib, config.model)
        self.n, self.n_vocab = n, int(llama.llama_vocab_n_tokens(llama.llama_model_get_vocab(self.model)))
        self.context = new_context(self.lib, self.model, config)
        decode(llama, self.context, [[i, 0, 1, [1]] for i in range(n)])
        self.logits = np.random.default_rng(seed).normal(0.0, 3.0, (n, self.n_vocab)).astype(np.float32)
        for i in range(n):
            np.ctypeslib.as_array(llama.llama_get_logits_ith(self.context, i), (self.n_vocab,))[:] = self.logits[i]
        self.pointer = ffi.cast("void *", ctypes.cast(self.context, ctypes.c_void_p).value)

    def close(self) -> None:
        """Free context and model."""
        self.lib.llama.llama_free(self.context)
        self.lib.llama.llama_model_free(self.model)


class Best(Rows):
    """mg_sample_rows without samplers: the best token of each row."""

    def __init__(self, n: int) -> None:
        super().__init__(n)
        self._none = ffi.new("void *[]", n)
        self._index, self._tokens = ffi.new("int32_t[]", list(range(n))), ffi.new("int32_t[]", n)

    def run(self) -> Any:
        """Token ids [n]."""
        failed = self.lib.mg.lib.mg_sample_rows(self.pointer, self.n, self._none, self._none, self._index, self._tokens)
        if failed:
            raise BenchError(str(self.lib.mg.error()))
        return np.array(list(self._tokens), np.int32)


class BestUpstream(Rows):
    """llama_sampler_sample with upstream's greedy sampler, row by row."""

    def __init__(self, n: int) -> None:
        super().__init__(n)
        llama = self.lib.llama
        self._chain = llama.llama_sampler_chain_init(llama.llama_sampler_chain_default_params())
        llama.llama_sampler_chain_add(self._chain, llama.llama_sampler_init_greedy())

    def run(self) -> Any:
        """Token ids [n]."""
        llama = self.lib.llama
        tokens = [llama.llama_sampler_sample(self._chain, self.context, i) for i in range(self.n)]
        return np.array(tokens, np.int32)

    def close(self) -> None:
        self.lib.llama.llama_sampler_free(self._chain)
        super().close()


class Logprobs(Rows):
    """mg_logprobs: the ten best tokens of a row with their log-probabilities."""

    def __init__(self) -> None:
        super().__init__(1)
        self._ids, self._values = ffi.new("int32_t[]", N_TOP), ffi.new("float[]", N_TOP)
        self._own = ffi.new("float *")

    def run(self) -> Any:
        """[2, N_TOP]: ids and log-probabilities."""
        n = self.lib.mg.lib.mg_logprobs(self.pointer, 0, 0, N_TOP, self._ids, self._values, self._own)
        if n != N_TOP:
            raise BenchError(str(self.lib.mg.error()))
        return np.array([list(self._ids), list(self._values)], np.float64)


def cases(device: Device) -> list[Case]:
    """All of them on the CPU, none elsewhere."""
    if device.kind != "cpu":
        return []
    rows = {n: _logits(n) for n in ROWS}
    n_vocab = rows[1].shape[1]
    out = [
        Case(
            name="argmax",
            size=f"{n} x {n_vocab} f32",
            n_bytes=4 * n * n_vocab,
            n_flops=n * n_vocab,
            prepare=lambda n=n: Best(n),  # type: ignore[misc]
            check=lambda got, n=n: _check_best(rows[n], got),  # type: ignore[misc]
            upstream=lambda n=n: BestUpstream(n),  # type: ignore[misc]
        )
        for n in ROWS
    ]
    out.append(
        Case(
            name="logprobs",
            size=f"1 x {n_vocab} f32, best {N_TOP}",
            n_bytes=4 * n_vocab,
            n_flops=3 * n_vocab,
            prepare=Logprobs,
            check=lambda got: check_logprobs(rows[1][0], got),
            upstream_note="llama-server does this in its own code, the library has no function for it",
        )
    )
    return out


def _logits(n: int) -> Any:
    rows = Rows(n)
    rows.close()
    return rows.logits


def _check_best(logits: Any, got: Any) -> Check:
    wrong = int((logits.astype(np.float64).argmax(axis=1) != got).sum())
    return Check(wrong == 0, float(wrong), "wrong tokens")


def check_logprobs(logits: Any, got: Any) -> Check:
    """Log-softmax in float64."""
    x = logits.astype(np.float64)
    logprob = x - (x.max() + np.log(np.exp(x - x.max()).sum()))
    best = np.argsort(-x, kind="stable")[:N_TOP]
    error = float(np.abs(got[1] - logprob[best]).max())
    return Check(bool((got[0] == best).all()) and error < 1e-5, error, "largest error in nats")
