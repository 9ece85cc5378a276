"""The plugin small-graphs: it follows the library, turns its switch between steps, and changes no token."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llamamg import Unavailable, facts
from llamamg.config import Config, ContextConfig, ModelConfig, PluginsConfig
from llamamg.library import Library
from llamamg.loading import load
from llamamg.plugins import PluginError, PluginSet
from llamamg.request import Finished, Request, SamplingParams
from llamamg_plugins.small_graphs import FIXUP, RECORD, SWITCH, SmallGraphs


def test_it_stays_off_without_the_switch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("llamamg_plugins.small_graphs.has_switch", lambda name: False)
    plugin = SmallGraphs()
    with pytest.raises(Unavailable, match="run `llamamg build`"):
        plugin.configure(Config(ModelConfig(Path("model.gguf"))))
    assert plugin.effect == 0


def test_a_build_from_before_record_rows_keeps_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("llamamg_plugins.small_graphs.has_switch", lambda name: name == SWITCH)
    monkeypatch.setattr("llamamg_plugins.native_effect.native_count", lambda name: 0)
    plugin = SmallGraphs(count=2)
    plugin.configure(Config(ModelConfig(Path("model.gguf"))))
    assert plugin.native_switches() == {SWITCH: 2}


@pytest.mark.parametrize(("option", "value", "switch"), [("record-below", "32", RECORD), ("quick-fixup", "off", FIXUP)])
def test_what_an_older_build_cannot_do_is_no_silence(
    monkeypatch: pytest.MonkeyPatch, option: str, value: str, switch: str
) -> None:
    monkeypatch.setattr("llamamg_plugins.small_graphs.has_switch", lambda name: name != switch)
    monkeypatch.setattr("llamamg_plugins.native_effect.native_count", lambda name: 0)
    for plugins in (
        PluginsConfig(options={SWITCH: {option: value}}),
        PluginsConfig(enable=(SWITCH,), only=True, options={SWITCH: {option: value}}),
    ):
        with pytest.raises(
            PluginError, match=f"no {switch}: run `llamamg build`, or leave out --small-graphs-{option}"
        ):
            PluginSet.discover(plugins).configure(Config(ModelConfig(Path("model.gguf")), plugins=plugins), [])
    count = PluginsConfig(enable=(SWITCH,), only=True, options={SWITCH: {"count": "2"}})
    plugins_on = PluginSet.discover(count)
    plugins_on.configure(Config(ModelConfig(Path("model.gguf")), plugins=count), [])
    assert switch not in plugins_on.native_switches()


def test_it_asks_for_a_switch_that_the_library_has(library: Library) -> None:
    if not library.patched:
        pytest.skip("the build under test is the unpatched one")
    plugin = SmallGraphs(count=3, record_below=48)
    plugin.configure(Config(ModelConfig(Path("model.gguf"))))
    assert plugin.native_switches() == {SWITCH: 3, RECORD: 48, FIXUP: 1}
    assert {SWITCH, RECORD, FIXUP} <= {switch.name for switch in library.mg.switches()}
    assert facts.native_count("spared") >= 0
    assert facts.native_count("fixup") >= 0


def test_the_number_of_graphs_and_what_is_recorded_are_options(library: Library) -> None:
    def made(**options: str) -> PluginSet:
        given = {SWITCH: {name.replace("_", "-"): value for name, value in options.items()}}
        plugins = PluginSet.discover(PluginsConfig(enable=(SWITCH,), only=True, options=given))
        plugins.configure(Config(ModelConfig(Path("model.gguf"))), [])
        return plugins

    if library.patched:
        assert made(count="2").native_switches() == {SWITCH: 2, RECORD: 32, FIXUP: 1}
        assert made(record_below="0").native_switches() == {SWITCH: 1, RECORD: 0, FIXUP: 1}
        assert made(quick_fixup="off", count="8").native_switches() == {SWITCH: 8, RECORD: 32, FIXUP: 0}
    for count in ("0", "9", "-1", "many"):
        with pytest.raises(PluginError, match=f"'{count}' is not a whole number from 1 to 8"):
            made(count=count)
    with pytest.raises(PluginError, match="record-below"):
        made(record_below="-1")


def talk(engine: Any, toggle_after: int | None) -> tuple[list[list[int]], int]:
    """One session answers while a long prompt is computed in pieces; tokens of both, and what the plugin counted."""

    def effect() -> int:
        return int(next(view.effect for view in engine.plugins.views() if view.name == SWITCH))

    before, events = effect(), []
    engine.deliver = events.extend
    chance = np.random.default_rng(1)
    ids = []
    for n_prompt, n_predict in ((20, 60), (400, 5)):
        sampling = SamplingParams(temperature=0.0, ignore_eos=True)
        prompt = chance.integers(1000, 5000, n_prompt, dtype=np.int32)
        ids.append(
            engine.submit(Request(prompt, sampling, n_predict=n_predict, return_tokens=True, cache_prompt=False))
        )
        while n_prompt == 20 and not events:
            engine.step()
    n_step = 0
    while sum(isinstance(event, Finished) for _, event in events) < 2:
        engine.step()
        n_step += 1
        if n_step == toggle_after:
            engine.plugins.toggle(SWITCH, not next(v.enabled for v in engine.plugins.views() if v.name == SWITCH))
    tokens = sorted(list(event.tokens) for _, event in events if isinstance(event, Finished))
    return tokens, effect() - before


@pytest.mark.usefixtures("default_switches")
def test_an_engine_has_it_on_and_says_the_same_without(library: Library, micro_model: Path) -> None:
    if not library.patched:
        pytest.skip("the build under test is the unpatched one")
    context = ContextConfig(
        n_ctx=2048, n_parallel=2, kv_unified=False, n_threads=1, n_batch=512, n_ubatch=64, warmup=False
    )
    plugins = PluginsConfig(
        enable=("small-graphs", "prefill-gate"), only=True, options={"prefill-gate": {"chunk": "16", "itl-ratio": "0"}}
    )
    engine = load(Config(ModelConfig(micro_model), context, plugins=plugins), PluginSet.discover(plugins))
    try:
        tokens, kept = talk(engine, None)
        assert kept > 10
        turned, _ = talk(engine, 7)  # off in the middle
        assert turned == tokens
        off, kept = talk(engine, None)
        assert (off, kept) == (tokens, 0)
        turned, _ = talk(engine, 7)  # on in the middle
        assert turned == tokens
    finally:
        engine.stop(1)
