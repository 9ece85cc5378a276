"""Compiling hooks: order, adapters, what is refused, tracing, and that the engine really calls every hook."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

import llamamg
from llamamg.hooks import COMPILED, ONCE, Hooks, first
from llamamg.hookspecs import hookimpl
from llamamg.plugins import PluginError


def names_called(plugins: Any, hook: str = "plan_step") -> list[str]:
    return [plugins.find_owner(function) for function in getattr(plugins.hooks, hook)]


def test_third_party_before_shipped_each_by_name(make: Any) -> None:
    hooks = {"plan_step": lambda self: None}
    shipped = (make.plugin("b-ours", hooks), make.plugin("a-ours", hooks))
    theirs = (make.plugin("z-theirs", hooks), make.plugin("c-theirs", hooks))
    plugins = make.unconfigured(*theirs, shipped=shipped, enable=("z-theirs", "c-theirs"))
    plugins.configure(make.config())
    expected = ["c-theirs", "z-theirs", "a-ours", "b-ours"]
    assert names_called(plugins) == expected
    plugins.toggle("c-theirs", False)
    plugins.toggle("c-theirs", True)
    assert names_called(plugins) == expected  # a toggle does not change the order


def test_tryfirst_and_trylast(make: Any) -> None:
    class Last:
        @hookimpl(trylast=True)
        def plan_step(self) -> None: ...

    class First:
        @hookimpl(tryfirst=True)
        def plan_step(self) -> None: ...

    plain = make.plugin("b", {"plan_step": lambda self: None})
    plugins = make.on(make.declared("a", Last), plain, make.declared("c", First))
    assert names_called(plugins) == ["c", "b", "a"]


def test_an_implementation_with_all_arguments_is_called_directly(make: Any) -> None:
    plugins = make.on(make.plugin("a", {"plan_step": lambda self, state, plan: None}))
    assert plugins.hooks.plan_step[0].__func__.__name__ == "<lambda>"
    assert plugins.hooks.plan_step[0].__self__ is plugins._members["a"].instance


def test_wrappers_are_refused(make: Any) -> None:
    class Wrapping:
        @hookimpl(wrapper=True)
        def plan_step(self) -> Any:
            return (yield)

    with pytest.raises(PluginError, match="plan_step is a wrapper"):
        make.on(make.declared("a", Wrapping))


def test_misspelt_hook_says_which_was_meant(make: Any) -> None:
    with pytest.raises(PluginError, match="unknown hook plan_stp; did you mean plan_step"):
        make.on(make.plugin("a", {"plan_stp": lambda self: None}))


def test_unknown_argument_is_refused(make: Any) -> None:
    with pytest.raises(PluginError, match=r"plugin a.*nonsense"):
        make.on(make.plugin("a", {"plan_step": lambda self, nonsense: None}))


def test_functions_without_the_marker_are_no_hooks(make: Any) -> None:
    class Plain:
        def plan_step(self, anything: Any) -> None: ...

    assert make.on(make.declared("a", Plain)).hooks.plan_step == ()


def test_first_of_nobody_is_none() -> None:
    assert first(()) is None


def test_tracing_attributes_time_to_plugin_and_hook(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLAMAMG_TRACE_HOOKS", "1")
    monkeypatch.setattr("llamamg.hooks.time.perf_counter", iter([10.0, 10.5, 20.0, 20.25]).__next__)

    def fail(self: Any, state: Any) -> None:
        raise ValueError

    plugins = make.on(make.plugin("a", {"idle": lambda self, state: True}), make.plugin("b", {"idle": fail}))
    good, bad = plugins.hooks.idle
    assert good("state") is True
    with pytest.raises(ValueError):  # noqa: PT011 - the time of a failing hook counts too
        bad("state")
    assert plugins.hooks.seconds == {("a", "idle"): 0.5, ("b", "idle"): 0.25}
    assert {view.name: view.hook_ms for view in plugins.views()} == {"a": 500.0, "b": 250.0}
    assert plugins.find_owner(good) == "a"


def test_without_tracing_no_time_is_shown(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LLAMAMG_TRACE_HOOKS", raising=False)
    plugins = make.on(make.plugin("a", {"idle": lambda self, state: True}))
    plugins.hooks.idle[0]("state")
    assert plugins.hooks.seconds == {}
    assert plugins.views()[0].hook_ms is None


def test_nobody_holds_stale_functions_after_a_toggle(make: Any) -> None:
    plugins = make.on(make.plugin("a", {"idle": lambda self: True}))
    held: Hooks = plugins.hooks
    plugins.toggle("a", False)
    assert held.idle == ()
    plugins.toggle("a", True)
    assert len(held.idle) == 1


def test_every_hook_has_a_call_site() -> None:
    """A hook the engine never calls would be a silent no-op for every plugin that implements it."""
    package = Path(llamamg.__file__).parent
    sources = "\n".join(
        path.read_text(encoding="utf-8")
        for path in package.rglob("*.py")
        if path.name not in ("hooks.py", "hookspecs.py", "hookdocs.py")
    )
    called = set(
        re.findall(
            r'\.(?:each|first|first_with_owner|_call)\(\s*(?:member, |self\._members\[name\], )?"(\w+)"', sources
        )
    )
    called |= set(re.findall(r"for \w+ in self\.(?:_calls\.)?hooks\.(\w+):", sources))
    called |= set(re.findall(r"instance\.(register_options)\(", sources))
    assert sorted(set(ONCE + COMPILED) - called) == []
