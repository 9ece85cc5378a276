"""A plugin that raises, in any hook called while serving: it is off, the step finishes, the text is right."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from llamamg import arrange, hookimpl
from llamamg.errors import BatchError
from llamamg.guard import Guard
from llamamg.hooks import COMPILED
from llamamg.plugins import plugin
from llamamg.request import Finished
from llamamg.testing import ask, fake_engine, run

DECLARE: dict[str, Any] = {"summary": "", "helps": "", "hurts": "", "guard": Guard.exact()}
PROMPTS = [list(range(40 + 9 * i, 90)) for i in range(3)]


def plugin_with(hook: str, function: Callable[..., Any], name: str = "broken") -> type[Any]:
    return plugin(name=name, **DECLARE)(type("Made", (), {hook: hookimpl(function)}))


def serve(engine: Any, runner: Any, events: list[Any], *, fail_once: bool) -> list[str]:
    failed: list[int] = []

    def fail(batch: Any) -> BatchError | None:
        if not fail_once or failed or len(runner.batches) < 2:
            return None
        failed.append(1)
        return BatchError(-3, "Compute error.")

    runner.fail = fail
    requests = [ask(prompt, n_predict=8) for prompt in PROMPTS]
    for request in requests:
        engine.submit(request)
    run(engine)
    engine._post(lambda: None)
    engine._idle()
    texts = {id_: event.text for id_, event in events if isinstance(event, Finished)}
    return [texts[request.id] for request in requests]


@pytest.mark.parametrize("hook", [name for name in COMPILED if name != "plugin_quarantined"])
def test_raising(with_plugins: Callable[..., Any], hook: str, monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[int] = []

    def function(self: Any) -> Any:
        called.append(1)
        raise RuntimeError("a mistake")

    classes = [plugin_with(hook, function)]
    if hook in ("draft_verified", "spec_limit"):
        classes.append(plugin_with("draft", lambda self, sequence, limit: [sequence.last_token + 1], "drafter"))
    if hook == "is_stored":
        monkeypatch.setattr(arrange, "SWAP_BYTES_MAX", 1)
        classes.append(plugin_with("arrange_slots", lambda self: None, "mover"))
    n_groups = 2 if hook in ("batches_in_flight", "balance_groups") else 1
    hybrid = hook == "take_state"
    engine, runner, events = with_plugins(*classes, n_draft_max=2, n_groups=n_groups, hybrid=hybrid)
    fail_once = hook == "batch_failed"
    plain = fake_engine(2, hybrid=hybrid)
    assert serve(engine, runner, events, fail_once=fail_once) == serve(*plain, fail_once=fail_once)
    assert called == [1]
    assert "broken" not in engine.plugins.enabled()
    view = next(view for view in engine.plugins.views() if view.name == "broken")
    assert view.quarantined == f"{hook}: RuntimeError: a mistake"
    assert not any(slot.busy for slot in engine.slots)


def test_one_that_raises_does_not_cost_the_next_one_its_turn(with_plugins: Callable[..., Any]) -> None:
    def raising(self: Any) -> Any:
        raise RuntimeError("a mistake")

    engine, runner, events = with_plugins(
        plugin_with("prefill_budget", raising, "a-broken"), plugin_with("prefill_budget", lambda self: 5, "b-good")
    )
    request = ask(PROMPTS[0], n_predict=1)
    engine.submit(request)
    run(engine)
    assert {n for batch in runner.batches for _, _, n, _ in batch} == {5}
    assert isinstance(events[-1][1], Finished)


def lose_a_row(self: Any, plan: Any) -> None:
    plan.batches[0].rows.pop()


def repeat_a_row(self: Any, plan: Any) -> None:
    plan.batches[0].rows.append(plan.batches[0].rows[0])


@pytest.mark.parametrize("mistake", [lose_a_row, repeat_a_row])
def test_a_plan_that_is_wrong_is_put_back(with_plugins: Callable[..., Any], mistake: Callable[..., Any]) -> None:
    engine, runner, events = with_plugins(plugin_with("plan_step", mistake))
    plain = fake_engine(2)
    assert serve(engine, runner, events, fail_once=False) == serve(*plain, fail_once=False)
    assert runner.batches == plain[1].batches
    assert engine.plugins.enabled() == []


@pytest.mark.parametrize(
    ("hook", "answer"),
    [
        ("order_prefills", []),
        ("order_prefills", ["not a sequence"]),
        ("prefill_budget", 0),
        ("prefill_budget", "many"),
        ("draft", 5),
        ("draft", [10**6]),
        ("draft", [-1]),
        ("spec_limit", "many"),
        ("select_slot", "not a slot"),
        ("arrange_slots", [(0, 0)]),
        ("arrange_slots", 5),
        ("batches_in_flight", 0),
        ("batches_in_flight", "many"),
        ("balance_groups", [(0, 0)]),
        ("balance_groups", [(1, 0)]),
        ("balance_groups", 5),
        ("find_prefix", "not a hit"),
        ("take_state", "not a state"),
    ],
)
def test_answers_that_make_no_sense(with_plugins: Callable[..., Any], hook: str, answer: Any) -> None:
    classes = [plugin_with(hook, lambda self: answer)]
    if hook == "spec_limit":
        classes.append(plugin_with("draft", lambda self: [], "drafter"))
    n_groups = 2 if hook in ("batches_in_flight", "balance_groups") else 1
    hybrid = hook == "take_state"
    engine, runner, events = with_plugins(*classes, n_draft_max=2, n_groups=n_groups, hybrid=hybrid)
    plain = fake_engine(2, hybrid=hybrid)
    assert serve(engine, runner, events, fail_once=False) == serve(*plain, fail_once=False)
    assert "broken" not in engine.plugins.enabled()


def test_tokens_of_an_order_that_leaves_prompts_out_wait_but_are_not_lost(with_plugins: Callable[..., Any]) -> None:
    def last_only(self: Any, waiting: Any) -> Any:
        return waiting[-1:]

    engine, runner, events = with_plugins(plugin_with("order_prefills", last_only))
    assert serve(engine, runner, events, fail_once=False) == serve(*fake_engine(2), fail_once=False)
    assert engine.plugins.enabled() == ["broken"]
