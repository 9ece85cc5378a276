"""States that a recurrent sequence can go back to: only where there are any, and only as many as fit."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from llamamg import affordable_rollback, keeps_state
from llamamg.config import Config, ContextConfig, ModelConfig
from llamamg.memory import estimate
from llamamg.modelfile import open_model
from llamamg_plugins.spec import Spec


def config(path: Path, **context: Any) -> Config:
    return Config(ModelConfig(path, n_gpu_layers=99), ContextConfig(**{"n_ctx": 1024, "n_parallel": 2, **context}))


def gpu(n_bytes: int) -> Any:
    return SimpleNamespace(name="CUDA0", type="gpu", memory_free=n_bytes)


def needed(found: Config, n_rs_seq: int, devices: list[Any]) -> int:
    with_states = Config(found.model, ContextConfig(n_ctx=1024, n_parallel=2, n_rs_seq=n_rs_seq))
    need = estimate(with_states, open_model(found.model.path), devices).devices["CUDA0"]
    return need.weights + need.context


def test_which_models_keep_a_state(micro_model: Path, smol_model: Path) -> None:
    assert keeps_state(config(micro_model))
    assert not keeps_state(config(smol_model))
    assert not keeps_state(config(Path("nowhere.gguf")))


@pytest.mark.parametrize("n", [0, 1, 4, 7])
def test_as_many_states_as_fit_on_the_device(micro_model: Path, n: int) -> None:
    found = config(micro_model)
    room = needed(found, n, [gpu(1 << 40)])
    assert room < needed(found, n + 1, [gpu(1 << 40)])
    assert affordable_rollback(found, [gpu(room)], 7) == n


@pytest.mark.parametrize(
    ("options", "context", "states"),
    [
        ({}, {}, 7),
        ({"rollback": 3}, {}, 3),
        ({"rollback": 0}, {}, 0),
        ({"rollback": 99}, {}, 7),
        ({"draft_n_max": 4}, {}, 3),
        ({}, {"n_rs_seq": 2}, 2),
        ({}, {"n_ubatch": 8}, 6),  # libllama keeps two fewer than a ubatch has tokens, and else ends the process
        ({}, {"n_batch": 4, "n_ubatch": 4}, 2),
        ({}, {"n_batch": 1, "n_ubatch": 1}, 0),
    ],
)
def test_the_plugin_asks_for_what_its_drafts_need(
    micro_model: Path, options: dict[str, Any], context: dict[str, Any], states: int
) -> None:
    made = Spec(type="suffix", **options).configure(config(micro_model, **context), [])
    assert made.context.n_rs_seq == states


def test_a_plain_model_needs_none(smol_model: Path) -> None:
    made = Spec(type="suffix").configure(config(smol_model), [])
    assert (made.context.n_rs_seq, made.context.n_draft_max) == (0, 31)


@pytest.mark.parametrize(
    ("fit", "options", "states"), [(8, {}, 7), (7, {}, 6), (2, {}, 1), (1, {}, 0), (7, {"draft_n_max": 7}, 7)]
)
def test_a_copy_for_wider_drafts_must_fit_too(
    micro_model: Path, fit: int, options: dict[str, Any], states: int
) -> None:
    found = config(micro_model)
    plugin = Spec(type="suffix", **options)
    found = Config(found.model, ContextConfig(n_ctx=1024, n_parallel=2, n_draft_max=plugin.n_max))
    with_states = Config(found.model, ContextConfig(n_ctx=1024, n_parallel=2, n_draft_max=plugin.n_max, n_rs_seq=fit))
    need = estimate(with_states, open_model(micro_model), [gpu(1 << 40)]).devices["CUDA0"]
    made = plugin.configure(found, [gpu(need.weights + need.context)])
    assert made.context.n_rs_seq == states


def test_no_room_for_a_second_state_is_said(micro_model: Path) -> None:
    found = config(micro_model)
    with pytest.raises(RuntimeError, match="second state of each sequence"):
        Spec(type="suffix").configure(found, [gpu(needed(found, 0, [gpu(1 << 40)]))])
