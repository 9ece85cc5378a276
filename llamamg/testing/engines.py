"""An engine put together from the stand-ins, and what asks it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from llamamg.config import Config, ContextConfig, ModelConfig, PluginsConfig
from llamamg.engine import Engine
from llamamg.layout import layout_of
from llamamg.loading import assemble
from llamamg.model import ModelInfo
from llamamg.plugins import PluginSet
from llamamg.request import Event, Request, SamplingParams
from llamamg.testing.cells import FakeCells
from llamamg.testing.memory import FakeKV
from llamamg.testing.runner import FakeRunner, NextToken, count_up
from llamamg.testing.vocabulary import FakeSampler, FakeVocabulary


def model_info() -> ModelInfo:
    """Facts of the stand-in model."""
    return ModelInfo("fake", "fake.gguf", "fake", "F32", 1, 1, 4096, 8, 1, 256, 2, 0, False, False, None)


def fake_engine(
    n_slots: int = 2,
    *,
    n_ctx_slot: int = 512,
    hybrid: bool = False,
    n_rs_seq: int = 0,
    snapshots: bool = True,
    next_token: NextToken = count_up,
    plugins: PluginSet | None = None,
    config: Config | None = None,
    n_batch: int = 64,
    n_ubatch: int = 16,
    n_groups: int = 1,
    n_prefill_slots: int = 0,
) -> tuple[Engine, FakeRunner, list[tuple[int, Event]]]:
    """An engine whose thread is not started (call `engine.step()`), its runner, and the list its events go to."""
    config = config or Config(ModelConfig(Path("fake.gguf")), plugins=PluginsConfig(none=True))
    context: ContextConfig = replace(
        config.context, n_parallel=n_slots, n_groups=n_groups, n_prefill_slots=n_prefill_slots
    )
    config = replace(config, context=context)
    if plugins is None:
        plugins = PluginSet.discover(config.plugins)
        config = plugins.configure(config, [])
    layout = layout_of(config.context)
    kv = FakeKV(n_slots, hybrid=hybrid, n_rs_seq=n_rs_seq, snapshots=snapshots, layout=layout)
    runner = FakeRunner(kv, next_token, n_batch, n_ubatch)

    def new_sampler(request: Request) -> Any:
        return FakeSampler(request.sampling)

    engine = assemble(
        config,
        plugins,
        runner,
        kv,
        FakeVocabulary(),
        model_info(),
        n_ctx_slot=n_ctx_slot,
        new_sampler=new_sampler,
        layout=layout,
    )
    events: list[tuple[int, Event]] = []
    engine.deliver = events.extend
    engine.cells = FakeCells(kv)
    return engine, runner, events


def ask(text: str | list[int], **fields: Any) -> Request:
    """A request for the stand-in model; fields of SamplingParams may be given beside those of Request."""
    names = SamplingParams.__dataclass_fields__
    sampling = SamplingParams(**{key: fields.pop(key) for key in list(fields) if key in names})
    tokens = list(text.encode()) if isinstance(text, str) else text
    return Request(np.array(tokens, np.int32), sampling, **fields)


def run(engine: Engine, n_steps_max: int = 10_000) -> int:
    """Step until nothing is left to do; how many steps did something."""
    n = 0
    while engine.step():
        n += 1
        if n >= n_steps_max:
            raise AssertionError(f"still busy after {n} steps")
    return n
