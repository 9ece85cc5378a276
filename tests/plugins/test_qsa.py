"""The plugin qsa: where it applies, that the switch follows it, and that an engine computes natively with it."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from prometheus_client import generate_latest

from llamamg import Unavailable, facts
from llamamg.config import Config, ContextConfig, ModelConfig, PluginsConfig
from llamamg.engine import Engine
from llamamg.library import Library
from llamamg.loading import load
from llamamg.plugins import PluginError, PluginSet, PluginView, discover
from llamamg.request import Finished, Request, SamplingParams
from llamamg_plugins.qsa import Qsa


def configured(path: Path, **context: Any) -> None:
    Qsa().configure(Config(ModelConfig(path), ContextConfig(**context)))


def test_it_applies_to_its_architecture(micro_model: Path) -> None:
    configured(micro_model)


def test_other_architectures_are_left_alone(smol_model: Path) -> None:
    with pytest.raises(Unavailable, match="sparse attention of qwen4exp, and this model is llama"):
        configured(smol_model)


def test_it_needs_flash_attention(micro_model: Path) -> None:
    with pytest.raises(Unavailable, match="leave out -fa off"):
        configured(micro_model, flash_attn="off")


def test_it_needs_a_patched_build(micro_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("llamamg_plugins.qsa.has_switch", lambda name: False)
    with pytest.raises(Unavailable, match="run `llamamg build`"):
        configured(micro_model)


def test_facts_without_a_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("llamamg.library._loaded", None)
    assert facts.has_switch("anything")
    assert facts.qsa_stats().n_native == 0


@pytest.mark.parametrize(
    ("context", "what"),
    [
        ({"n_parallel": 2, "kv_unified": True}, "--no-kv-unified"),
        ({}, "--no-kv-unified"),
        ({"n_parallel": 2, "n_ubatch": 8192, "n_batch": 8192}, "--ubatch-size of 4080 or less"),
    ],
)
def test_raw_keys_are_not_dropped_everywhere(micro_model: Path, context: dict[str, Any], what: str) -> None:
    with pytest.raises(Unavailable, match=what):
        Qsa(drop_raw_keys=True).configure(Config(ModelConfig(micro_model), ContextConfig(**context)))


@pytest.fixture
def engine(library: Library, micro_model: Path) -> Iterator[Callable[..., Engine]]:
    """Engines with these plugins and nothing else; the switch is put back at the end."""
    if not library.patched:
        pytest.skip("the unpatched build has no native QSA")
    engines: list[Engine] = []

    def make(plugins: PluginsConfig, unified: bool = False) -> Engine:
        context = ContextConfig(n_ctx=1024, n_parallel=2, kv_unified=unified, n_threads=1, n_batch=256, warmup=False)
        config = replace(Config(ModelConfig(micro_model), context), plugins=plugins)
        engines.append(load(config, PluginSet.discover(plugins)))
        return engines[-1]

    yield make
    for made in engines:
        made.stop(1)
    library.mg.set_switch("qsa", 0)
    library.mg.set_switch("qsa-drop-raw", 0)


def answer(engine: Engine, seed: int = 1, n_predict: int = 12, cache_prompt: bool = False) -> tuple[int, ...]:
    """Greedy tokens after a prompt of 30 tokens: everything visible is selected."""
    prompt = np.random.default_rng(seed).integers(1000, 5000, 30, dtype=np.int32)
    sampling = SamplingParams(temperature=0.0, ignore_eos=True)
    request = Request(prompt, sampling, n_predict=n_predict, return_tokens=True, cache_prompt=cache_prompt)
    events: list[Any] = []
    engine.deliver = events.extend
    engine.submit(request)
    for _ in range(1000):
        engine.step()
        for _, event in events:
            if isinstance(event, Finished):
                return tuple(event.tokens)
    raise AssertionError("the request does not end")


def view(engine: Engine) -> PluginView:
    return next(view for view in engine.plugins.views() if view.name == "qsa")


def effect(engine: Engine) -> int:
    return view(engine).effect


def metrics(engine: Engine) -> dict[str, float]:
    text = generate_latest(engine.plugins.registry).decode()
    return {line.split()[0]: float(line.split()[1]) for line in text.splitlines() if line.startswith("llamamg:qsa_")}


def test_an_engine_computes_natively_and_says_the_same(engine: Callable[..., Engine], library: Library) -> None:
    off = answer(engine(PluginsConfig(none=True)))
    assert library.mg.switch("qsa") == 0
    on = engine(PluginsConfig(enable=("qsa",), only=True))
    assert library.mg.switch("qsa") == 1
    assert answer(on) == off
    assert effect(on) >= 12


def test_it_is_on_by_itself_and_toggles(engine: Callable[..., Engine], library: Library) -> None:
    made = engine(PluginsConfig())
    assert "qsa" in made.plugins.enabled()
    first = answer(made)
    n = effect(made)
    made.plugins.toggle("qsa", False)
    assert library.mg.switch("qsa") == 0
    assert answer(made) == first
    assert effect(made) == n > 0
    made.plugins.toggle("qsa", True)
    assert answer(made) == first
    assert effect(made) > n


def test_switching_on_says_what_it_rebuilt(
    engine: Callable[..., Engine], library: Library, capfd: pytest.CaptureFixture[str]
) -> None:
    """The prompt that a slot keeps was computed by upstream's graph; its keys are pooled when the switch turns."""
    made = engine(PluginsConfig(only=True))
    made.plugins.start(made)
    answer(made)
    before = library.mg.qsa_stats()
    made.plugins.toggle("qsa", True)
    n_rebuilt = library.mg.qsa_stats().n_rebuilt - before.n_rebuilt
    assert n_rebuilt == (30 + 12 - 1) // 4
    said = capfd.readouterr().err
    assert re.search(rf"llamamg: rebuilt {n_rebuilt} pooled keys in each of \d layers in [\d.]+ ms", said)
    assert "MiB of pooled keys; switching on rebuilt" in view(made).note
    counted = metrics(made)
    assert counted["llamamg:qsa_rebuilt_keys_total"] == library.mg.qsa_stats().n_rebuilt
    assert counted["llamamg:qsa_rebuilt_seconds_total"] > 0
    assert counted["llamamg:qsa_pooled_bytes"] == library.mg.qsa_stats().n_bytes > 0


def test_switching_off_is_refused_without_room(
    engine: Callable[..., Engine], library: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = engine(PluginsConfig(enable=("qsa",), only=True))
    first = answer(made)
    monkeypatch.setattr("llamamg.loading.main_memory", lambda: (0, 2**30))
    with pytest.raises(
        PluginError, match=r"cannot switch: .* missing \d+ MiB on main memory, where \d+ MiB are needed"
    ):
        made.plugins.toggle("qsa", False)
    assert "qsa" in made.plugins.enabled()
    assert library.mg.switch("qsa") == 1
    n = effect(made)
    assert answer(made) == first
    assert effect(made) > n
    monkeypatch.undo()
    made.plugins.toggle("qsa", False)
    assert library.mg.switch("qsa") == 0
    assert answer(made) == first


def test_what_upstream_computes_instead_is_counted_and_said(engine: Callable[..., Engine]) -> None:
    """A second sequence in a unified cache: its cells are not its positions."""
    made = engine(PluginsConfig(enable=("qsa",), only=True), unified=True)
    made.plugins.start(made)
    answer(made)
    assert "upstream" not in view(made).note
    before = metrics(made)
    answer(made, seed=2)
    after = metrics(made)
    assert after["llamamg:qsa_fallback_ubatches_total"] - before["llamamg:qsa_fallback_ubatches_total"] >= 12
    assert after["llamamg:qsa_native_ubatches_total"] == before["llamamg:qsa_native_ubatches_total"]
    assert "ubatches left to upstream's attention, the last one because: the cells of a sequence" in view(made).note


def test_without_raw_keys_the_toggle_is_gone(engine: Callable[..., Engine], library: Library) -> None:
    """Two slots, answers that reuse a cached prompt and rewind to a snapshot: all as with raw keys."""
    with_raw = engine(PluginsConfig(enable=("qsa",), only=True))
    wanted = [answer(with_raw, seed) for seed in (1, 2, 1, 3)]
    with_raw.stop(1)
    options = {"qsa": {"drop-raw-keys": "on"}}
    made = engine(PluginsConfig(enable=("qsa",), only=True, options=options))
    assert library.mg.switch("qsa-drop-raw") == 1
    assert library.mg.qsa_stats().n_lean == 1
    assert [answer(made, seed) for seed in (1, 2, 1, 3)] == wanted
    with pytest.raises(PluginError, match="raw index keys were dropped at the start .*; restart"):
        made.plugins.toggle("qsa", False)
    assert "qsa" in made.plugins.enabled()
    assert (library.mg.switch("qsa"), library.mg.switch("qsa-drop-raw")) == (1, 1)
    assert "raw index keys are dropped, so only a restart switches it off" in view(made).note
    assert answer(made) == wanted[0]


def test_without_raw_keys_prompts_that_left_their_slot_are_computed_again(engine: Callable[..., Engine]) -> None:
    """The cache copies rows of cells, and pooled keys are not among them: it has to keep nothing."""
    options = {"qsa": {"drop-raw-keys": "on"}}
    names = ("qsa", "async-cache")
    made = engine(PluginsConfig(disable=tuple(name for name in discover() if name not in names), options=options))
    made.plugins.start(made)
    wanted = [answer(made, seed, cache_prompt=True) for seed in (1, 2, 3)]
    assert [answer(made, seed, cache_prompt=True) for seed in (1, 2, 3)] == wanted
    assert made.plugins.enabled() == ["qsa"]
    reason = next(view.reason for view in made.plugins.views() if view.name == "async-cache")
    assert reason is not None
    assert "the memory of this model cannot be copied" in reason
    assert "leave out --qsa-drop-raw-keys" in reason
    with pytest.raises(PluginError, match="async-cache cannot be enabled here"):
        made.plugins.toggle("async-cache", True)
