"""The plugin expert-tiles: where it applies. Its kernels are measured, and their logits compared, by `llamamg bench steps`."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from llamamg import Unavailable, facts, n_experts
from llamamg.config import Config, ModelConfig
from llamamg.library import Library
from llamamg_plugins.expert_tiles import SWITCH, ExpertTiles

GPU, CPU = SimpleNamespace(backend="CUDA"), SimpleNamespace(backend="CPU")


def configured(path: Path, devices: list[Any]) -> ExpertTiles:
    plugin = ExpertTiles(percent=120)
    plugin.configure(Config(ModelConfig(path)), devices)
    return plugin


def test_experts_are_read_from_the_model(micro_model: Path, smol_model: Path) -> None:
    assert n_experts(Config(ModelConfig(micro_model))) > 1
    assert n_experts(Config(ModelConfig(smol_model))) == 0
    assert n_experts(Config(ModelConfig(Path("there-is-none.gguf")))) == 0


def test_it_needs_a_cuda_device_and_experts(micro_model: Path, smol_model: Path) -> None:
    assert configured(micro_model, [CPU, GPU]).native_switches() == {SWITCH: 120}
    with pytest.raises(Unavailable, match="no CUDA device"):
        configured(micro_model, [CPU])
    with pytest.raises(Unavailable, match="no experts"):
        configured(smol_model, [GPU])


def test_it_stays_off_without_the_switch(monkeypatch: pytest.MonkeyPatch, micro_model: Path) -> None:
    monkeypatch.setattr("llamamg_plugins.expert_tiles.has_switch", lambda name: False)
    with pytest.raises(Unavailable, match="run `llamamg build"):
        configured(micro_model, [GPU])


def test_the_library_has_its_switch_and_counts(library: Library) -> None:
    if not library.patched:
        pytest.skip("the build under test is the unpatched one")
    assert SWITCH in {switch.name for switch in library.mg.switches()}
    assert facts.native_count("tiled") >= 0
