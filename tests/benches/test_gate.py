"""`llamamg bench gate` on the stand-in model: what is stepped, counted and printed."""

from __future__ import annotations

import argparse
from typing import Any

import pytest

from benches import gate
from benches.errors import BenchError
from benches.gate_stage import Policy, Stage, Switched
from llamamg.plugins.testing import on
from llamamg.testing import fake_engine


@pytest.fixture
def stage() -> Stage:
    Switched.stamps.clear()
    Switched.gate = None
    engine, _, _ = fake_engine(4, plugins=on(Switched), n_batch=64)
    return Stage(engine, n_decoders=2, depth=20, n_prompt=200, n_prompts=1, n_short=10)


def test_a_policy_is_options_of_the_gate() -> None:
    made = Policy.parse("itl-target-ms=60,min-share=0.3").gate()
    assert made is not None
    assert (made.itl_target_ms, made.min_share, made.max_partial) == (60.0, 0.3, 1)
    assert Policy.parse("off").gate() is None


@pytest.mark.parametrize("text", ["itl-goal=3", "itl-target-ms", "on"])
def test_a_wrong_policy_names_the_options(text: str) -> None:
    with pytest.raises(BenchError, match="is not one of max-partial"):
        Policy.parse(text)


def test_steps_have_the_chunk_they_are_timed_for(stage: Stage) -> None:
    assert stage.solo() > 0
    stage.begin_decoding()
    assert len(stage.alone(30)) == 30
    begin = len(Switched.stamps)
    steps = stage.steps_of([1, 4, 100], 6)
    assert [step["chunk"] for step in steps] == [1, 4]  # 100 tokens in each of ten steps are more than the prompt has
    sizes = [n for _, _, n in Switched.stamps[begin:]]
    assert sizes.count(1) >= 9
    assert sizes.count(4) >= 9


def test_a_batch_that_has_no_room_for_the_chunk_is_an_error(stage: Stage) -> None:
    stage.n_prompt = 500
    stage.begin_decoding()
    with pytest.raises(BenchError, match=r"steps of 70 prompt tokens came out as \[\(2, 62\)\]: use a larger -b"):
        stage.steps_of([70], 2)


def test_under_a_policy(stage: Stage) -> None:
    stage.solo()
    stage.begin_decoding()
    row = stage.under(Policy.parse("chunk=8,itl-ratio=0"))
    # 25 steps of 8 tokens for the prompt, two more for the short one that passes
    assert 25 <= len(row["gaps_ms"]) <= 29
    assert row["prefill_tps"] == pytest.approx(210 / row["wall_s"])
    assert 0 < row["short_ttft_ms"] < 1e3 * row["wall_s"]
    assert len(stage.under(Policy.parse("off"))["gaps_ms"]) < 10


def test_the_table_says_the_bound() -> None:
    steps = [{"chunk": c, "t_ms": 10.0 + c, "n_steps": 10} for c in (1, 4, 16, 64)]
    row = {
        "policy": "off", "itl_ms": {"p50": 20.0, "p99": 30.0, "max": 40.0}, "p99_ratio": 3.0, "max_ratio": 4.0,
        "prefill_share": 0.5, "short_ttft_ms": 123.0,
    }  # fmt: skip
    result: dict[str, Any] = {
        "sizes": {"decoders": 2, "prompts": 1, "depth": 20, "prompt": 200, "short": 10}, "solo_tps": 1000.0,
        "alone_ms": {"p50": 10.0, "p99": 11.0, "max": 12.0}, "steps": steps, "rows": [row],
    }  # fmt: skip
    assert gate.bound(result, 3) == (16, pytest.approx(16 / 0.026 / 1000))
    text = gate.table(result)
    assert "a step of at most 3x alone takes c = 16, the prompt 62 % of solo" in text
    assert "30.0" in text
    assert "123" in text


def test_sizes_are_checked() -> None:
    parser = argparse.ArgumentParser()
    gate.add_arguments(parser)
    args = parser.parse_args(["--alone", "3"])
    args.flags = []
    with pytest.raises(BenchError, match="--alone must be at least 20"):
        gate.run(args)
