"""A plugin that raises is switched off, and nothing else is."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import pytest

from llamamg.hookcalls import HookCalls
from llamamg.hooks import ARGUMENTS, COMPILED
from llamamg.plugins import PluginError

ENGINE = SimpleNamespace(slots=[])


def boom(self: Any) -> None:
    raise RuntimeError("boom")


@pytest.mark.parametrize("hook", COMPILED)
@pytest.mark.parametrize("way", ["each", "first"])
def test_raising_in_a_compiled_hook(make: Any, hook: str, way: str) -> None:
    fine = make.plugin("z", {hook: lambda self: "answer"})
    plugins = make.on(make.plugin("a", {hook: boom}), fine)
    calls = HookCalls(plugins.hooks, plugins.quarantine)
    args = [None] * len(ARGUMENTS[hook])
    answers = [getattr(calls, way)(hook, *args) for _ in range(2)]
    assert answers == ([["answer"]] * 2 if way == "each" else ["answer"] * 2)
    assert plugins.enabled() == ["z"]
    bad, good = plugins.views()
    assert (bad.state, bad.quarantined) == ("quarantined", f"{hook}: RuntimeError: boom")
    assert (good.state, good.quarantined) == ("on", None)


@pytest.mark.parametrize("hook", ["engine_start", "register_metrics", "register_routes"])
def test_raising_while_the_engine_starts(make: Any, hook: str) -> None:
    plugins = make.on(make.plugin("a", {hook: boom}), make.plugin("b"))
    plugins.start(ENGINE)
    assert plugins.enabled() == ["b"]
    assert plugins.views()[0].quarantined == "start: RuntimeError: boom"


def test_raising_in_engine_stop_does_not_keep_others_from_stopping(make: Any) -> None:
    stopped: list[str] = []
    plugins = make.on(
        make.plugin("a", {"engine_stop": boom}), make.plugin("b", {"engine_stop": lambda self: stopped.append("b")})
    )
    plugins.start(ENGINE)
    plugins.stop()
    assert stopped == ["b"]


def test_raising_in_native_switches(make: Any) -> None:
    plugins = make.on(
        make.plugin("a", {"native_switches": boom}), make.plugin("b", {"native_switches": lambda self: {"x": 1}})
    )
    assert plugins.enabled() == ["b"]
    assert plugins.native_switches() == {"x": 1}


def test_switches_of_a_quarantined_plugin_go_back(make: Any) -> None:
    plugins = make.on(make.plugin("a", {"idle": boom, "native_switches": lambda self: {"x": 1}}))
    applied: list[Any] = []
    plugins.apply_switches = applied.append
    plugins.quarantine(plugins.hooks.idle[0], RuntimeError("boom"))
    assert applied == [{}]


def test_what_requires_it_goes_off_too(make: Any) -> None:
    plugins = make.on(make.plugin("a", {"idle": boom}), make.plugin("b", requires=("a",)))
    plugins.quarantine("a", RuntimeError("boom"))
    assert plugins.enabled() == []
    assert plugins.views()[1].reason == "requires a, which was switched off by an error"


def test_patch_tries_again(make: Any) -> None:
    plugins = make.on(make.plugin("a", {"idle": boom}))
    plugins.quarantine(plugins.hooks.idle[0], RuntimeError("boom"))
    plugins.toggle("a", True)
    view = plugins.views()[0]
    assert (view.state, view.quarantined) == ("on", None)
    assert len(plugins.hooks.idle) == 1


def test_switching_it_off_by_hand_clears_the_mark(make: Any) -> None:
    plugins = make.on(make.plugin("a", {"idle": boom}))
    plugins.quarantine("a", RuntimeError("boom"))
    plugins.toggle("a", False)
    assert plugins.views()[0].state == "off"


def test_two_plugins_that_fail_on_the_news_both_end_up_off(make: Any) -> None:
    told = itertools.count()

    def fail(self: Any) -> None:
        next(told)
        raise RuntimeError("boom")

    plugins = make.on(
        make.plugin("a", {"idle": boom}), *[make.plugin(n, {"plugin_quarantined": fail}) for n in ("b", "c")]
    )
    plugins.quarantine(plugins.hooks.idle[0], RuntimeError("boom"))
    assert plugins.enabled() == []
    assert next(told) >= 2


def test_an_error_of_the_engine_is_not_blamed_on_a_plugin(make: Any) -> None:
    plugins = make.on(make.plugin("a", {"idle": boom}))
    with pytest.raises(ValueError, match="belongs to no plugin"):
        plugins.quarantine(len, RuntimeError("engine"))
    with pytest.raises(KeyError):
        plugins.find_owner(len)
    assert plugins.enabled() == ["a"]


def test_a_failed_configure_at_a_toggle_is_shown(make: Any) -> None:
    plugins = make.unconfigured(make.plugin("a", {"configure": boom}))
    plugins.configure(make.config())
    with pytest.raises(PluginError, match="RuntimeError: boom"):
        plugins.toggle("a", True)
    assert plugins.views()[0].state == "quarantined"
