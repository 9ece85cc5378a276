"""What a hook site costs, counted in calls and allocations instead of time."""

from __future__ import annotations

import sys
from typing import Any

from llamamg.hookcalls import HookCalls
from llamamg.hooks import COMPILED, Hooks, first


def calls_made(function: Any) -> list[str]:
    """Names of all Python and C functions entered while `function` runs."""
    entered: list[str] = []

    def profile(frame: Any, event: str, arg: Any) -> None:
        if event == "call":
            entered.append(frame.f_code.co_name)
        elif event == "c_call":
            entered.append(arg.__name__)

    sys.setprofile(profile)
    try:
        function()
    finally:
        sys.setprofile(None)
    return entered[1:-1]  # without `function` itself and the setprofile that ends it


def empty_step(hooks: Hooks) -> None:
    if hooks.order_prefills:
        first(hooks.order_prefills, None, None)
    if hooks.prefill_budget:
        first(hooks.prefill_budget, None)
    for f in hooks.plan_step:
        f(None, None)
    for f in hooks.batch_submitted:
        f(None)
    for f in hooks.batch_done:
        f(None, 0.0)
    for f in hooks.step_done:
        f(None, None)


def test_a_step_without_plugins_calls_nothing() -> None:
    hooks = Hooks()
    assert calls_made(lambda: empty_step(hooks)) == ["empty_step"]


def test_a_step_without_plugins_allocates_nothing() -> None:
    hooks = Hooks()
    empty_step(hooks)
    before = sys.getallocatedblocks()
    for _ in range(1000):
        empty_step(hooks)
    assert sys.getallocatedblocks() - before < 100  # 1000 steps with one object each would show


def test_a_hook_with_all_arguments_is_one_call(make: Any) -> None:
    def plan_step(self: Any, state: Any, plan: Any) -> None: ...

    hooks = make.on(make.plugin("a", {"plan_step": plan_step})).hooks

    def site() -> None:
        for f in hooks.plan_step:
            f(None, None)

    assert calls_made(site) == ["plan_step"]


def test_a_hook_with_some_arguments_is_two_calls(make: Any) -> None:
    def plan_step(self: Any, plan: Any) -> None: ...

    hooks = make.on(make.plugin("a", {"plan_step": plan_step})).hooks
    assert calls_made(lambda: hooks.plan_step[0](None, None)) == ["<lambda>", "plan_step"]


def test_a_disabled_plugin_is_not_called(make: Any) -> None:
    plugins = make.on(make.plugin("a", {"plan_step": lambda self, state, plan: None}))
    plugins.toggle("a", False)
    assert calls_made(lambda: empty_step(plugins.hooks)) == ["empty_step"]


def test_the_engines_guarded_call_of_an_empty_hook_enters_no_plugin_code() -> None:
    calls = HookCalls(Hooks(), lambda function, error: None)
    assert all(calls.each(name) == [] and calls.first(name) is None for name in COMPILED)


def test_hooks_object_has_no_dict() -> None:
    assert not hasattr(Hooks(), "__dict__")
