"""A decode that takes long is ended from outside; a prompt is shown to the sampler natively."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llamamg.config import Config, ContextConfig, ModelConfig, PluginsConfig
from llamamg.loading import load
from llamamg.plugins import PluginSet
from llamamg.request import Event, Failed, Finished, Request, SamplingParams
from llamamg.testing import ask


def loaded(model: Path, n_ctx: int) -> Any:
    config = Config(
        ModelConfig(model), ContextConfig(n_ctx=n_ctx, n_parallel=1, n_threads=1), plugins=PluginsConfig(none=True)
    )
    return load(config, PluginSet.discover(config.plugins))


@pytest.mark.usefixtures("library")
def test_stop_aborts_a_running_prefill_and_a_new_engine_works(smol_model: Path) -> None:
    engine = loaded(smol_model, 8192)
    events: list[tuple[int, Event]] = []
    started = threading.Event()

    def deliver(pairs: list[tuple[int, Event]]) -> None:
        events.extend(pairs)
        started.set()

    engine.deliver = deliver
    submit = engine.runner.submit

    def submit_after_abort(batch: Any) -> None:
        engine.runner.abort()  # as `stop` does when the time is up
        submit(batch)

    engine.runner.submit = submit_after_abort
    engine.start()
    prompt = np.random.default_rng(0).integers(5, 40000, 4000).astype(np.int32)
    engine.submit(Request(prompt, SamplingParams(), stream=True))
    assert started.wait(60)
    engine.stop(0.1)
    assert not engine.alive
    last = events[-1][1]
    assert isinstance(last, Failed)
    assert last.message in ("the computation was aborted", "the server is shutting down")
    assert not any(isinstance(event, Finished) for _, event in events)

    again = loaded(smol_model, 512)  # the flag is the process's: it must be down again
    done: list[Event] = []
    finished = threading.Event()

    def take(pairs: list[tuple[int, Event]]) -> None:
        done.extend(event for _, event in pairs)
        if any(isinstance(event, Finished | Failed) for _, event in pairs):
            finished.set()

    again.deliver = take
    again.start()
    again.submit(ask([504, 1797], temperature=0.0, n_predict=2))
    assert finished.wait(60)
    again.stop(5.0)
    assert isinstance(done[-1], Finished)


@pytest.mark.usefixtures("library")
def test_penalties_see_the_prompt(smol_model: Path) -> None:
    engine = loaded(smol_model, 512)
    engine.deliver = lambda pairs: None
    prompt = engine.vocab.tokenize("one two one two one two one two one", True, True)

    def first_token(**sampling: Any) -> int:
        got: list[Event] = []
        engine.deliver = lambda pairs: got.extend(event for _, event in pairs)
        engine.submit(ask(prompt.tolist(), n_predict=1, return_tokens=True, temperature=0.0, **sampling))
        for _ in range(50):
            engine.step()
            if got and isinstance(got[-1], Finished):
                return got[-1].tokens[0]
        raise AssertionError("no token")

    likely = first_token()
    assert likely in prompt.tolist(), "the prompt must repeat itself for this test to mean anything"
    assert first_token(repeat_penalty=1.9, repeat_last_n=-1) != likely
    assert first_token(repeat_penalty=1.9, repeat_last_n=0) == likely
    engine.stop()
