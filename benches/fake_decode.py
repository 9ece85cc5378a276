"""The engine with everything of ours real and the library faked: a decode that only takes time, a sampler that only answers.

The fakes sit at the native boundary, so filling the batch arrays and gathering the sampled tokens are measured too.
"""

from __future__ import annotations

import ctypes
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from llamamg.config import Config, ContextConfig, ModelConfig, PluginsConfig
from llamamg.engine import Engine
from llamamg.loading import assemble
from llamamg.plugins import PluginSet
from llamamg.request import Request
from llamamg.runner import ModelRunner
from llamamg.testing import FakeKV, FakeSampler, FakeVocabulary, model_info

PR_SET_TIMERSLACK = 29


class TimedDecode:
    """Stands in for llama_decode: releases the interpreter lock for `decode_s` and stamps each call.

    `starts[i]` is when call i began, on the engine thread; `cpu[i]` is that thread's CPU time then. The arrays are filled
    to the end and then left alone, so recording costs the same at every step.
    """

    def __init__(self, decode_s: float, n_max: int) -> None:
        self.decode_s = decode_s
        self.starts = np.zeros(n_max)
        self.cpu = np.zeros(n_max)
        self.n_tokens = np.zeros(n_max, np.int32)
        self.n = 0

    def __call__(self, context: Any, batch: Any) -> int:
        started = time.perf_counter()
        if self.n == 0:
            precise_sleep()
        if self.n < len(self.starts):
            self.starts[self.n] = started
            self.cpu[self.n] = time.thread_time()
            self.n_tokens[self.n] = batch.n_tokens
            self.n += 1
        left = self.decode_s - (time.perf_counter() - started)
        if left > 0:
            time.sleep(left)
        return 0


def _nothing(*arguments: Any) -> None:
    """Stands in for native calls."""


def precise_sleep() -> None:
    """Let this thread's sleeps end on time: Linux adds 50 µs to each unless told not to."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_TIMERSLACK, 1, 0, 0, 0)


def timed_engine(decode: TimedDecode, n_slots: int, n_ctx_slot: int, plugins: PluginsConfig) -> Engine:
    """An engine ready to start; it generates printable ASCII, one letter per slot."""
    config = Config(ModelConfig(Path("fake.gguf")), ContextConfig(n_parallel=n_slots, n_ctx=n_slots * n_ctx_slot))
    config = replace(config, plugins=plugins)
    found = PluginSet.discover(config.plugins)
    config = found.configure(config, [])
    llama = SimpleNamespace(llama_batch=SimpleNamespace, llama_decode=decode)
    sample = SimpleNamespace(mg_sample_rows=_nothing, mg_abort_install=_nothing, mg_abort_set=_nothing)
    runner = ModelRunner(llama, SimpleNamespace(lib=sample, error=None), 0, 2048, 512, n_slots)
    runner._sampler._tokens[:] = ord("a") + np.arange(n_slots)  # what "sampling" leaves in the array

    def new_sampler(request: Request) -> Any:
        sampler = FakeSampler(request.sampling)
        sampler.chain = sampler.grammar = 0  # type: ignore[attr-defined]
        sampler.banned = frozenset()  # type: ignore[attr-defined]
        return sampler

    return assemble(
        config,
        found,
        runner,
        FakeKV(n_slots),
        FakeVocabulary(),
        model_info(),
        n_ctx_slot=n_ctx_slot,
        new_sampler=new_sampler,
    )
