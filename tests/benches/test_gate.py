"""`llamamg bench gate` on the stand-in model: what is stepped, counted and printed."""

from __future__ import annotations

import argparse
import itertools
from typing import Any

import pytest

from benches import gate, gate_policy, gate_stage
from benches.errors import BenchError
from benches.gate_measure import Plan, measure
from benches.gate_outliers import Seen, Watch, largest, outliers
from benches.gate_policy import Policy, Stamp, Switched
from benches.gate_stage import Stage
from benches.gate_table import bound, table
from llamamg.plugins.testing import on
from llamamg.plugins.testing import plugin as made_plugin
from llamamg.testing import fake_engine


def make(n_prefill_slots: int = 0, n_slots: int = 6, n_ctx_slot: int = 4096) -> Stage:
    Switched.stamps.clear()
    Switched.gate = None
    flights = made_plugin("flights", {"batches_in_flight": lambda self: 2})
    classes = (Switched, flights) if n_prefill_slots else (Switched,)
    engine, _, _ = fake_engine(
        n_slots, plugins=on(*classes), n_batch=64, n_ctx_slot=n_ctx_slot, n_prefill_slots=n_prefill_slots
    )
    return Stage(engine, n_prompt=200, n_short=10)


@pytest.fixture
def stage() -> Stage:
    return make()


def test_a_policy_is_options_of_the_gate() -> None:
    made = Policy.parse("itl-target-ms=60,min-share=0.3").gate()
    assert made is not None
    assert (made.limits.target_s, made.limits.min_share, made.max_partial) == (0.06, 0.3, 1)  # type: ignore[union-attr]
    assert Policy.parse("off").gate() is None
    limited = Policy.parse("itl-ratio=3@7.5")
    assert (limited.text, limited.seconds, Policy.parse("off@6").seconds) == ("itl-ratio=3", 7.5, 6.0)
    with pytest.raises(BenchError, match="a number of seconds"):
        Policy.parse("off@soon")


def test_a_policy_may_bound_the_sms_of_prompts() -> None:
    bounded = Policy.parse("itl-ratio=2,prefill-sms=96@5")
    assert (bounded.n_sms, bounded.options, bounded.seconds) == (96, {"itl-ratio": "2"}, 5.0)
    assert (Policy.parse("off,prefill-sms=64").gate(), Policy.parse("off,prefill-sms=64").n_sms) == (None, 64)
    with pytest.raises(BenchError, match="a number of SMs"):
        Policy.parse("prefill-sms=many")


def test_sms_are_bounded_for_that_policy_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    stage, turned, n_limited = make(n_prefill_slots=3), [], iter((5, 12, 12, 12))
    monkeypatch.setattr(gate_policy, "set_switch", lambda name, n: turned.append((name, n)) or True)
    monkeypatch.setattr(gate_stage, "native_count", lambda name: next(n_limited))
    stage.n_short = 0
    stage.solo()
    stage.decode(2, 20)
    row = stage.under(Policy.parse("off,prefill-sms=96"), 1)
    assert (row["prefill_sms"], row["n_limited"]) == (96, 7)
    assert "prefill_sms" not in stage.under(Policy.parse("off"), 1)
    assert turned == [("prefill-sms", 0), ("prefill-sms", 0), ("prefill-sms", 96), ("prefill-sms", 0)]


def test_a_library_that_cannot_bound_them_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gate_policy, "set_switch", lambda name, n: False)
    stage = make()
    stage.use(Policy.parse("off"))
    with pytest.raises(BenchError, match="no switch prefill-sms"):
        stage.use(Policy.parse("off,prefill-sms=96"))


@pytest.mark.parametrize("text", ["itl-goal=3", "itl-target-ms", "on"])
def test_a_wrong_policy_names_the_options(text: str) -> None:
    with pytest.raises(BenchError, match="is not one of max-partial"):
        Policy.parse(text)


def test_steps_have_the_chunk_they_are_timed_for(stage: Stage) -> None:
    assert stage.solo() > 0
    stage.decode(2, 20)
    assert len(stage.alone(30)) == 2 * 30
    begin = len(Switched.stamps)
    steps = stage.steps_of([1, 4, 100], 6)
    assert [step["chunk"] for step in steps] == [1, 4]  # 100 tokens in each of ten steps are more than the prompt has
    sizes = [stamp.n_prompt for stamp in Switched.stamps[begin:]]
    assert sizes.count(1) >= 9
    assert sizes.count(4) >= 9


def test_a_batch_that_has_no_room_for_the_chunk_is_an_error(stage: Stage) -> None:
    stage.n_prompt = 500
    stage.decode(2, 20)
    with pytest.raises(BenchError, match=r"steps of 70 prompt tokens came out as \[\(2, 62\)\]: use a larger -b"):
        stage.steps_of([70], 2)


def test_under_a_policy_until_the_prompt_is_done(stage: Stage) -> None:
    stage.solo()
    stage.decode(2, 20)
    row = stage.under(Policy.parse("chunk=8,itl-ratio=0"), 1)
    # 25 steps of 8 tokens for the prompt, two more for the short one that passes
    assert 25 <= row["n_gaps_least"] <= 29
    assert 2 * 25 <= len(row["gaps_ms"]) <= 2 * 30
    assert row["n_tokens"] == 210
    assert row["prefill_tps"] == pytest.approx(210 / row["wall_s"])
    assert 0 < row["short_ttft_ms"] < 1e3 * row["wall_s"]
    assert row["chunks"] == {"2": 1, "8": 26}
    assert stage.under(Policy.parse("off"), 1)["n_gaps_least"] < 10


def test_prompts_follow_each_other_until_there_are_gaps_enough(stage: Stage) -> None:
    stage.solo()
    stage.decode(2, 20)
    row = stage.under(Policy.parse("chunk=8,itl-ratio=0"), 2, n_gaps=120)
    assert row["n_gaps_least"] >= 120
    assert row["n_prompts_begun"] >= 4
    assert not [slot for slot in stage.engine.slots[2:] if slot.sequence is not None], "a prompt was left running"


def test_the_time_limit_ends_a_policy(stage: Stage) -> None:
    stage.n_short = 0
    stage.solo()
    stage.decode(2, 20)
    row = stage.under(Policy.parse("chunk=1,itl-ratio=0"), 1, n_gaps=10**9, seconds=0.05)
    assert 0.04 <= row["wall_s"] < 5
    assert row["prefill_tps"] == pytest.approx(row["n_tokens"] / row["wall_s"])


def test_gaps_are_each_sessions_own() -> None:
    """Tokens of two sessions that come one after the other must not halve their gaps."""
    stage = make()
    stage.decode(2, 20)
    first, second = (request.id for request in stage._decoders)
    stage._tokens = {first: [0.0, 10.0, 20.0, 30.0], second: [5.0, 15.0, 40.0]}
    assert stage._gaps({first: 2, second: 1}, 25.0) == [10_000.0, 10_000.0, 10_000.0, 25_000.0]
    worst = largest(stage._pairs({first: 2, second: 1}, 25.0), 10.0, [])
    assert (worst[0]["ms"], worst[0]["at_s"]) == (25_000.0, 5.0)


def test_long_gaps_say_what_happened_in_them() -> None:
    ends = [1.0, 2.0, 3.0, 5.0, 6.0, 8.0, 9.0, 11.0, 12.0]
    sizes = [8, 8, 8, 16, 16, 16, 16, 16, 16]
    stamps = [Stamp(at, 2, size) for at, size in zip(ends, sizes, strict=True)]
    gaps = [*itertools.pairwise(ends)] * 2  # two sessions whose tokens come together
    found = outliers(gaps, 1.0, stamps, [Seen(7.5, "checkpoint"), Seen(8.5, "hand-over")])
    assert [(gap["ms"], gap["at_s"], gap["chunks"]) for gap in found] == [
        (2000.0, 2.0, [16]),
        (2000.0, 5.0, [16]),
        (2000.0, 8.0, [16]),
    ]
    assert [gap["size_changed"] for gap in found] == [True, False, False]
    assert [gap["events"] for gap in found] == [[], ["checkpoint"], []]
    second = outliers(
        [(5.0, 8.0), (8.0, 9.0), (9.0, 10.0)], 1.0, [Stamp(4, 2, 8), Stamp(5, 2, 16), Stamp(7, 2, 16)], []
    )
    assert [(gap["size_changed"], gap["second_of_size"]) for gap in second] == [(False, True)]


def test_checkpoints_and_hand_overs_are_noticed_once(stage: Stage) -> None:
    slot = stage.engine.slots[1]
    watch = Watch(stage.engine)
    watch.look(1.0)
    slot.checkpoints = [object()]  # type: ignore[list-item]
    watch.look(2.0)
    slot.context = 1
    slot.checkpoints = []
    watch.look(3.0)
    watch.look(4.0)
    assert watch.seen == [Seen(2.0, "checkpoint"), Seen(3.0, "hand-over")]


def test_separate_contexts() -> None:
    stage = make(n_prefill_slots=3)
    stage.n_short = 80  # what is shorter stays in its group
    stage.solo()
    stage.decode(2, 20)
    assert stage.engine.runner.n_contexts == 2
    begin = len(Switched.stamps)
    row = stage.under(Policy.parse("itl-ratio=2"), 2, n_gaps=60)
    stamps = Switched.stamps[begin:]
    assert not [stamp for stamp in stamps if stamp.n_rows and stamp.n_prompt], "a prompt was computed among decoders"
    assert sum(stamp.n_prompt for stamp in stamps) >= row["n_tokens"] > 200
    assert row["n_gaps_least"] >= 60
    assert row["short_ttft_ms"] > 0


def test_all_of_it_and_the_table() -> None:
    parser = argparse.ArgumentParser()
    gate.add_arguments(parser)
    line = "--depth 20 --prompt 200 --short 10 --steps 6 --alone 20 --gaps 40 --block 64 --block-steps 5"
    args = parser.parse_args(line.split())
    stage = make(n_slots=8)
    part: dict[str, Any] = {"contexts": "one"}
    result = {"sizes": vars(args), "contexts": [part]}
    policies = [Policy.parse("chunk=8,itl-ratio=0"), Policy.parse("off")]
    for _ in measure(stage.engine, Plan(args, [1, 8], (4, 2)), policies, part):
        assert "one context" in table(result)
    assert [(case["decoders"], case["prompts"], len(case["rows"])) for case in part["cases"]] == [(2, 1, 2), (4, 2, 1)]
    assert len(part["prefill_only"]["on_s"]) == len(part["decode_only"]["off_s"]) == 4
    text = table(result)
    for words in (
        "t(c) ms",
        "1 prompt(s) beside 2 sessions",
        "2 prompt(s) beside 4 sessions",
        "largest of off",
        "gaps above 1.5x the median: ",
        "prompts only",
    ):
        assert words in text


def test_the_table_says_the_bound() -> None:
    steps = [
        {"chunk": c, "t_ms": 10.0 + c, "p99_ms": 11.0 + c, "tps": 1e3 * c / (10 + c), "n_gaps": 10}
        for c in (1, 4, 16, 64)
    ]
    case = {
        "decoders": 2,
        "prompts": 1,
        "alone_ms": {"p50": 10.0, "p99": 11.0, "max": 12.0},
        "steps": steps,
        "rows": [],
    }
    part = {"contexts": "separate", "solo_tps": 1000.0, "cases": [case]}
    assert bound(part, 3) == (16, pytest.approx(16 / 0.026 / 1000))
    assert bound(part, 1) == (0, 0.0)
    result = {"sizes": {"depth": 20, "prompt": 200}, "contexts": [part]}
    assert "a gap of at most 3x alone takes c = 16, the prompt 62 % of solo" in table(result)


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("--alone 3", "--alone must be at least 20"),
        ("--then 4", "sessions and prompts, such as 4"),
        ("--then 2+2", "more sessions than --decoders 2"),
        ("--gaps 0 --seconds 5", "give both, or neither"),
        ("--policy off,prefill-sms=96", "give it to --separate-policy"),
    ],
)
def test_sizes_are_checked(line: str, sentence: str) -> None:
    parser = argparse.ArgumentParser()
    gate.add_arguments(parser)
    args = parser.parse_args(line.split())
    args.flags = []
    with pytest.raises(BenchError, match=sentence):
        gate.run(args)
