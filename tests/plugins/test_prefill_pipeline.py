"""The plugin prefill-pipeline: where it applies, and that its switches follow it. What they do: tests/benches/test_pipeline.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from llamamg import Unavailable, facts
from llamamg.abi import Device
from llamamg.config import Config, ModelConfig
from llamamg.library import Library
from llamamg_plugins.prefill_pipeline import COUNTED, SWITCHES, PrefillPipeline, n_stages


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
    for name in COUNTED:
        assert facts.native_count(name) >= 0
    with pytest.raises(KeyError, match="does not count 'sheep'"):
        facts.native_count("sheep")


def test_facts_without_a_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("llamamg.library._loaded", None)
    assert facts.native_count("rebuilt") == 0
