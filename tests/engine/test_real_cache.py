"""The plugin async-cache on real models: a restored conversation goes on bit for bit as one that never left its slot."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llamamg.library import Library
from llamamg.request import Finished, Request, SamplingParams, Started
from llamamg_plugins.async_cache import AsyncCache


def greedy(prompt: list[int], n_predict: int = 12, **fields: Any) -> Request:
    sampling = SamplingParams(temperature=0.0, ignore_eos=True, n_probs=2)
    return Request(np.array(prompt, np.int32), sampling, n_predict=n_predict, return_tokens=True, **fields)


def talk(n: int, seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(1000, 5000, n).tolist()


def answer(live: Any, request: Request) -> tuple[list[int], list[Any], int]:
    """Tokens, their probabilities, and how many prompt tokens were not computed."""
    live.engine.submit(request)
    last = live.last(request)
    assert isinstance(last, Finished), last
    started = next(event for event in live.of(request) if isinstance(event, Started))
    until = time.monotonic() + 20
    while any(slot.copying is not None and not slot.copying.is_over for slot in live.engine.slots):
        assert time.monotonic() < until
        time.sleep(0.002)
    return list(last.tokens), list(last.probs), started.n_cached


@pytest.mark.parametrize("options", [{}, {"kv_unified": True}, {"flash_attn": "off"}, {"cache_type_k": "q8_0"}])
def test_restored_equals_never_evicted(
    live: Callable[..., Any], smol_model: Path, library: Library, options: dict[str, Any]
) -> None:
    if not library.patched:
        pytest.skip("an unpatched build does not show its cells")
    check(live, smol_model, {"n_ctx": 2048, **options})


@pytest.mark.parametrize("options", [{}, {"cache_type_k": "q8_0", "cache_type_v": "q8_0"}])
def test_a_hybrid_restored_equals_never_evicted(
    live: Callable[..., Any], micro_model: Path, library: Library, options: dict[str, Any]
) -> None:
    if not library.patched:
        pytest.skip("an unpatched build does not show its cells")
    check(live, micro_model, {"n_ctx": 2048, **options})


@pytest.mark.parametrize("n_mib", [64, 1])
def test_a_hybrid_whose_states_stay_on_its_devices(
    live: Callable[..., Any], micro_model: Path, library: Library, monkeypatch: pytest.MonkeyPatch, n_mib: int
) -> None:
    """Room for all of them, and for one only: then they come back from main memory, by way of that one."""
    if not library.patched:
        pytest.skip("an unpatched build does not show its cells")
    monkeypatch.setattr("llamamg_plugins.async_cache_parts.device_bytes", lambda cells, n: n_mib << 20)
    kept = check(live, micro_model, {"n_ctx": 2048})._parts.kept
    assert kept.n_taken > 4
    assert (kept.n_put >= 2) or n_mib == 1


def check(live: Callable[..., Any], model: Path, options: dict[str, Any]) -> Any:
    first, other = talk(400, 1), talk(350, 2)
    stays = live(model, n_parallel=2, **options)
    tokens, _, _ = answer(stays, greedy(first, id_slot=0))
    answer(stays, greedy(other, id_slot=1))
    follow_up = first + tokens + talk(30, 3)
    expected = answer(stays, greedy(follow_up, id_slot=0))
    answer(stays, greedy(other + talk(20, 4), id_slot=1))
    later = follow_up + expected[0] + talk(10, 5)
    expected_later = answer(stays, greedy(later, id_slot=0))

    cached = live(model, n_parallel=2, plugins=(AsyncCache,), **options)
    assert answer(cached, greedy(first, id_slot=0))[0] == tokens
    answer(cached, greedy(other, id_slot=1))
    answer(cached, greedy(other, id_slot=0))  # evicts the first one
    assert answer(cached, greedy(follow_up, id_slot=1)) == expected  # and it comes back elsewhere
    answer(cached, greedy(other + talk(20, 4), id_slot=1))
    assert answer(cached, greedy(later, id_slot=0)) == expected_later
    assert expected[2] >= 400
    assert cached.engine.plugins.enabled() == ["async-cache"]
    return cached.engine.plugins._members["async-cache"].instance
