"""The plugin prefill-pipeline: where it applies, and that its switches follow it. What they do: tests/benches/test_pipeline.py."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from llamamg import Unavailable, facts
from llamamg.abi import Device
from llamamg.config import Config, ModelConfig
from llamamg.library import Library
from llamamg_plugins.prefill_pipeline import SWITCHES, PrefillPipeline, n_stages


def device(name: str, kind: str = "gpu", able: bool = True) -> Device:
    return Device(name, "", "", "", kind, able, able, 0, 0)


CPU, GPUS = device("CPU", "cpu", able=False), [device("CUDA0"), device("CUDA1")]


def config(**model: Any) -> Config:
    return Config(ModelConfig(Path("model.gguf"), **model))


@pytest.mark.parametrize(
    ("model", "devices", "expected"),
    [
        ({}, [CPU], 0),
        ({}, [*GPUS, CPU], 2),
        ({}, [GPUS[0], device("OLD0", able=False)], 1),
        ({"devices": ("CUDA1",)}, [*GPUS, CPU], 1),
        ({"rpc": ("there:1", "there:2")}, [CPU], 2),
        ({"rpc": ("there:1",)}, [GPUS[0], CPU], 2),
    ],
)
def test_stages_are_counted(model: dict[str, Any], devices: list[Device], expected: int) -> None:
    assert n_stages(config(**model), devices) == expected


def test_it_stays_off_where_nothing_is_a_pipeline(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(Unavailable, match="here are 1"):
        PrefillPipeline().configure(config(), [GPUS[0], CPU])
    with pytest.raises(Unavailable, match="-sm row is no pipeline"):
        PrefillPipeline().configure(config(split_mode="row"), GPUS)
    monkeypatch.setattr("llamamg_plugins.prefill_pipeline.has_switch", lambda name: False)
    with pytest.raises(Unavailable, match="run `llamamg build`"):
        PrefillPipeline().configure(config(), GPUS)


def test_it_asks_for_switches_that_the_library_has(library: Library) -> None:
    if not library.patched:
        pytest.skip("the build under test is the unpatched one")
    PrefillPipeline().configure(config(), GPUS)
    assert PrefillPipeline().native_switches() == dict.fromkeys(SWITCHES, 1)
    assert set(SWITCHES) <= {switch.name for switch in library.mg.switches()}
    assert PrefillPipeline().effect == 0
    for name in PrefillPipeline.counted:
        assert facts.native_count(name) >= 0
    with pytest.raises(KeyError, match="does not count 'sheep'"):
        facts.native_count("sheep")


def test_facts_without_a_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("llamamg.library._loaded", None)
    assert facts.native_count("rebuilt") == 0


# In a process of its own, which keeps the two as devices.
SERVED = """
import json, sys
import numpy as np
from llamamg.config import Config, ContextConfig, ModelConfig, PluginsConfig
from llamamg.loading import load
from llamamg.plugins import PluginSet
from llamamg.request import Finished, Request, SamplingParams
from pathlib import Path
context = ContextConfig(n_ctx=1024, n_parallel=1, kv_unified=False, n_threads=1, n_batch=128, n_ubatch=64, warmup=False)
model = ModelConfig(Path(sys.argv[1]), n_gpu_layers="all", rpc=tuple(sys.argv[2].split(",")))
plugins = PluginsConfig(disable=("qsa",))
engine = load(Config(model, context, plugins=plugins), PluginSet.discover(plugins))
found = []
for on in (True, False):
    if not on:
        engine.plugins.toggle("prefill-pipeline", False)
    before = next(view.effect for view in engine.plugins.views() if view.name == "prefill-pipeline")
    prompt = np.random.default_rng(1).integers(1000, 5000, 512, dtype=np.int32)
    events = []
    engine.deliver = events.extend
    sampling = SamplingParams(temperature=0.0, ignore_eos=True)
    engine.submit(Request(prompt, sampling, n_predict=6, return_tokens=True, cache_prompt=False))
    while not any(isinstance(event, Finished) for _, event in events):
        engine.step()
    tokens = next(list(event.tokens) for _, event in events if isinstance(event, Finished))
    view = next(view for view in engine.plugins.views() if view.name == "prefill-pipeline")
    found.append({"enabled": view.enabled, "effect": view.effect - before, "tokens": tokens})
engine.stop(1)
print(json.dumps(found))
"""


def test_an_engine_over_two_devices_has_it_on_and_says_the_same_without(
    library: Library, micro_model: Path, two_rpc_devices: str
) -> None:
    if not library.patched:
        pytest.skip("the build under test is the unpatched one")
    command = [sys.executable, "-c", SERVED, str(micro_model), two_rpc_devices]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    on, off = json.loads(done.stdout.splitlines()[-1])
    assert on["enabled"]
    assert on["effect"] >= 3  # of 8 ubatches; the others have a mask of another width
    assert not off["enabled"]
    assert off["effect"] == 0
    assert on["tokens"] == off["tokens"]
