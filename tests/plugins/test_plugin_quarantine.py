"""A plugin that raises is switched off, and nothing else is."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import pytest

from llamamg.hookcalls import HookCalls
from llamamg.hooks import ARGUMENTS, COMPILED
from llamamg.plugins import PluginError, Unavailable
from llamamg.request import Failed
from llamamg.testing import ask, fake_engine

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


def unavailable(self: Any, engine: Any) -> None:
    raise Unavailable("this context has no such thing")


def test_what_does_not_apply_to_the_context_stays_off_with_what_requires_it(make: Any) -> None:
    stopped: list[str] = []
    stop = {"engine_stop": lambda self: stopped.append("a"), "idle": lambda self: True}
    a = make.plugin("a", {"engine_start": unavailable, **stop})
    plugins = make.unconfigured(shipped=(a, make.plugin("b", requires=("a",)), make.plugin("c")))
    plugins.configure(make.config())
    plugins.start(ENGINE)
    assert plugins.enabled() == ["c"]
    first, second, _ = plugins.views()
    assert (first.reason, first.quarantined) == ("this context has no such thing", None)
    assert second.reason == "requires a, which does not apply here"
    assert not plugins.hooks.idle
    with pytest.raises(PluginError, match="a cannot be enabled here: this context has no such thing"):
        plugins.toggle("a", True)
    plugins.stop()
    assert stopped == []


def test_what_was_enabled_by_name_and_does_not_apply_is_an_error(make: Any) -> None:
    plugins = make.on(make.plugin("a", {"engine_start": unavailable}))
    with pytest.raises(PluginError, match="no such thing; start without --enable a"):
        plugins.start(ENGINE)


def test_an_engine_whose_plugin_refuses_to_start_says_so_without_a_traceback(
    make: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    plugins = make.on(make.plugin("a", {"engine_start": unavailable}))
    engine, _, events = fake_engine(plugins=plugins)
    request = ask("hello")
    engine.submit(request)
    engine.start()
    engine.stop(10)
    assert isinstance(engine.error, PluginError)
    assert [(id_, type(event)) for id_, event in events] == [(request.id, Failed)]
    assert capsys.readouterr().err == ""


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
