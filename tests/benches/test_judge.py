"""The statistics of `llamamg bench ab` on a fake clock that walks through recorded step times."""

from __future__ import annotations

from typing import Any

import pytest

from benches.errors import BenchError
from benches.judge import ACTED, NO_EFFECT, NOT_MEASURED, TOKENS_CHANGED, failed, judge
from benches.loads import LOADS, Sizes
from benches.session import Session
from benches.switching import Toggled
from llamamg.guard import Guard, GuardKind

from .fake_clock import World, engine_with

SIZES = Sizes(depth=24, n_tokens=24, n_prompt=200)


def row(
    name: str,
    seed: int = 0,
    load: str = "solo",
    n_pairs: int = 40,
    guard: GuardKind = GuardKind.SAME_TOKENS,
    by_times: bool = False,
    **world: Any,
) -> dict[str, Any]:
    made = World(seed)
    for key, value in world.items():
        setattr(made, key, value)
    engine = engine_with(name, made, LOADS[load].n_slots)
    sides = Toggled(Session(engine, LOADS[load], SIZES, made.clock), name)
    return judge(sides, name, LOADS[load].metrics, guard, n_pairs, by_times=by_times)


def test_the_same_twice_is_rarely_called_different() -> None:
    claimed = [row("same", seed)["metrics"]["decode_tps"]["better"] for seed in range(100)]
    assert sum(verdict is not None for verdict in claimed) <= 4


def test_five_percent_per_step_is_found() -> None:
    found = [row("slow", seed)["metrics"]["decode_tps"]["better"] for seed in range(20)]
    assert sum(verdict is False for verdict in found) >= 18


def test_a_plugin_that_does_nothing_is_an_error() -> None:
    result = row("nothing")
    assert result["status"] == NO_EFFECT
    assert "metrics" not in result, "timing it would say nothing"
    assert failed([result])


def test_a_plugin_that_changes_a_token_and_does_not_count_it_is_an_error() -> None:
    result = row("quiet")
    assert (result["status"], result["effect"]) == (TOKENS_CHANGED, 0)
    assert result["tokens"]["on"]["n_changed"] > result["tokens"]["off"]["n_changed"] == 0
    assert row("quiet", margin=0.1)["status"] == NO_EFFECT, "a near tie may fall either way"
    assert row("quiet", guard=GuardKind.CLOSE)["status"] == NO_EFFECT


def test_a_plugin_that_changes_a_token_is_an_error() -> None:
    result = row("flips", n_pairs=3)
    assert result["status"] == TOKENS_CHANGED
    assert "token 120" in result["reason"], "x is 120"
    assert result["tokens"]["off"]["n_changed"] == 0
    assert failed([result])


def test_a_near_tie_is_counted_and_allowed() -> None:
    result = row("flips", n_pairs=3, margin=0.1)
    assert result["status"] == ACTED
    assert result["tokens"]["on"]["n_ties"] > 0


def test_two_tokens_near_each_other_do_not_excuse_a_third() -> None:
    """What a context computes from somebody else's state comes from far behind, whatever the best two are like."""
    result = row("flips", n_pairs=3, margin=0.1, other=33)
    assert result["status"] == TOKENS_CHANGED
    assert result["tokens"]["on"]["n_ties"] == 0
    assert "far behind" in result["reason"]


def test_a_plugin_that_promises_bits_may_not_change_a_near_tie() -> None:
    assert row("flips", n_pairs=3, margin=0.1, guard=GuardKind.EXACT)["status"] == TOKENS_CHANGED


def test_near_ties_excuse_an_exact_plugin_where_times_decide_what_is_computed_together() -> None:
    assert row("flips", n_pairs=3, margin=0.1, guard=GuardKind.EXACT, by_times=True)["status"] == ACTED
    assert row("flips", n_pairs=3, margin=0.9, guard=GuardKind.EXACT, by_times=True)["status"] == TOKENS_CHANGED


def test_a_plugin_that_promises_closeness_is_not_judged_by_tokens() -> None:
    assert row("flips", n_pairs=3, guard=GuardKind.CLOSE)["status"] == ACTED


def test_a_model_that_does_not_repeat_itself_is_not_blamed_on_the_plugin() -> None:
    world = World(0)
    engine = engine_with("same", world)
    sides = Toggled(Session(engine, LOADS["solo"], SIZES, world.clock), "same")
    plain, n = sides.block, iter(range(100))

    def block(enabled: bool) -> Any:
        made = plain(enabled)
        made.tokens[0][3] = 40 + next(n)
        return made

    sides = _With(sides, block)
    result = judge(sides, "same", ("decode_tps",), GuardKind.SAME_TOKENS, 3)
    assert result["status"] == NOT_MEASURED
    assert "session 0 got token 4" in result["reason"]
    assert "at position 3, far behind" in result["reason"]


@pytest.mark.parametrize(("differing", "status"), [({1}, NO_EFFECT), ({1, 3}, NO_EFFECT), ({1, 3, 5}, TOKENS_CHANGED)])
def test_a_plugin_that_stood_still_is_blamed_only_for_what_comes_and_goes_with_it(
    differing: set[int], status: str
) -> None:
    """Blocks 0 and 1 are the probes, then off and on take turns."""
    world = World(0)
    engine = engine_with("nothing", world)
    sides = Toggled(Session(engine, LOADS["solo"], SIZES, world.clock), "nothing")
    plain, n = sides.block, iter(range(100))

    def block(enabled: bool) -> Any:
        made = plain(enabled)
        if next(n) in differing:
            made.tokens[0][3] = 40
        return made

    row = judge(_With(sides, block), "nothing", ("decode_tps",), GuardKind.SAME_TOKENS, 3)
    assert row["status"] == status


class _With:
    how = "a test"

    def __init__(self, sides: Toggled, block: Any) -> None:
        self.reference, self.block = sides.reference, block


def test_a_plugin_that_raises_stops_the_run_with_its_error() -> None:
    with pytest.raises(BenchError, match=r"fails was switched off by an error.*on purpose"):
        row("fails")


def test_a_plugin_that_needs_a_restart_is_refused_in_one_process() -> None:
    world = World(0)
    engine = engine_with("same", world, guard=Guard.exact(), toggle="restart")
    sides = Toggled(Session(engine, LOADS["solo"], SIZES, world.clock), "same")
    with pytest.raises(BenchError, match="can only be switched at the start"):
        judge(sides, "same", ("decode_tps",), GuardKind.EXACT, 3)


def test_a_plugin_switched_only_while_idle_can_be_compared() -> None:
    world = World(0)
    engine = engine_with("same", world, guard=Guard.exact(), toggle="idle")
    sides = Toggled(Session(engine, LOADS["solo"], SIZES, world.clock), "same")
    assert judge(sides, "same", ("decode_tps",), GuardKind.EXACT, 3)["status"] == ACTED


def test_a_budget_shortens_the_run() -> None:
    world = World(0)
    sides = Toggled(Session(engine_with("same", world), LOADS["solo"], SIZES, world.clock), "same")
    assert judge(sides, "same", ("decode_tps",), GuardKind.EXACT, 30, budget_s=0.0)["n_pairs"] == 3
