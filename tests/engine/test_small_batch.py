"""A batch must have room for one token of every sequence of its context, or libllama ends the process."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from llamamg.config import Config, ContextConfig, ModelConfig, PluginsConfig
from llamamg.errors import LoadError
from llamamg.library import Library
from llamamg.loading import load
from llamamg.plugins import PluginSet
from llamamg.testing import ask


@pytest.mark.parametrize(
    ("n_parallel", "n_batch", "n_replay", "words"),
    [
        (3, 2, 0, r"use -b 3 or more, or -np 2 or fewer"),
        (-1, 3, 0, r"use -b 4 or more, or -np 3 or fewer"),
        (3, 3, 8, r"use -b 4 or more, or -np 2 or fewer"),
        (1, 1, 8, r"use -b 2 or more$"),
    ],
)
def test_a_batch_too_small_is_refused_before_the_model_is_loaded(
    library: Library, micro_model: Path, n_parallel: int, n_batch: int, n_replay: int, words: str
) -> None:
    context = ContextConfig(n_ctx=512, n_parallel=n_parallel, n_batch=n_batch, n_ubatch=n_batch, n_threads=1)
    config = Config(ModelConfig(micro_model), context, plugins=PluginsConfig(guard_replay=n_replay))
    loaded: list[float] = []
    with pytest.raises(LoadError, match=words):
        load(config, PluginSet(PluginsConfig(none=True), {}), loaded.append)
    assert not loaded


@pytest.mark.parametrize("options", [{"n_parallel": 3, "n_batch": 3}, {"n_parallel": 4, "n_batch": 2, "n_groups": 2}])
def test_the_smallest_batch_serves_all_slots_at_once(
    live: Callable[..., Any], micro_model: Path, options: dict[str, int]
) -> None:
    """In groups each context has its own batch, so that two sequences of each need two tokens."""
    made = live(micro_model, n_ubatch=2, **options)
    requests = [ask([5 + i, 6, 7], n_predict=4, id_slot=i, return_tokens=True) for i in range(options["n_parallel"])]
    assert [len(tokens) for tokens in made.tokens(*requests)] == [4] * len(requests)
