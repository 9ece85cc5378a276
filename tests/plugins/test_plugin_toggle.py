"""Switching plugins while the server runs."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from llamamg.plugins import PluginError, Unavailable

HOOK = {"idle": lambda self: True}


def engine(*busy: bool) -> Any:
    return SimpleNamespace(slots=[SimpleNamespace(busy=b) for b in busy])


def test_off_and_on_again_keeps_instance_and_effect(make: Any) -> None:
    plugins = make.on(make.plugin("a", HOOK))
    instance = plugins._members["a"].instance
    instance.effect = 5
    plugins.toggle("a", False)
    assert plugins.hooks.idle == ()
    assert (plugins.views()[0].state, plugins.views()[0].effect) == ("off", 5)
    plugins.toggle("a", True)
    assert len(plugins.hooks.idle) == 1
    assert plugins._members["a"].instance is instance


def test_toggling_to_the_present_state_changes_nothing(make: Any) -> None:
    plugins = make.on(make.plugin("a", HOOK))
    before = plugins.hooks.idle
    plugins.toggle("a", True)
    assert plugins.hooks.idle is before


def test_a_plugin_that_was_never_enabled_can_be_switched_on(make: Any) -> None:
    plugins = make.unconfigured(make.plugin("a", HOOK))
    plugins.configure(make.config())
    assert plugins.hooks.idle == ()
    plugins.toggle("a", True)
    assert len(plugins.hooks.idle) == 1


def test_unknown_plugin(make: Any) -> None:
    with pytest.raises(PluginError, match=r"no plugin named 'b' \(installed: a\)"):
        make.on(make.plugin("a")).toggle("b", True)


def test_conflict_names_what_to_switch_off(make: Any) -> None:
    plugins = make.unconfigured(make.plugin("a"), make.plugin("b", conflicts=("a",)), enable=("a",))
    plugins.configure(make.config())
    with pytest.raises(PluginError, match="b conflicts with a: switch a off first"):
        plugins.toggle("b", True)
    plugins.toggle("a", False)
    plugins.toggle("b", True)
    with pytest.raises(PluginError, match="a conflicts with b: switch b off first"):
        plugins.toggle("a", True)
    assert plugins.enabled() == ["b"]


def test_requirements_are_kept(make: Any) -> None:
    plugins = make.on(make.plugin("a", requires=("b",)), make.plugin("b"))
    with pytest.raises(PluginError, match="a requires b: switch a off first"):
        plugins.toggle("b", False)
    plugins.toggle("a", False)
    plugins.toggle("b", False)
    with pytest.raises(PluginError, match="a requires b: switch b on first"):
        plugins.toggle("a", True)


def test_restart_plugins_are_refused_with_the_flag(make: Any) -> None:
    plugins = make.unconfigured(make.plugin("a", toggle="restart"), make.plugin("b", toggle="restart"), enable=("a",))
    plugins.configure(make.config())
    with pytest.raises(PluginError, match="restart with --disable a"):
        plugins.toggle("a", False)
    with pytest.raises(PluginError, match="restart with --enable b"):
        plugins.toggle("b", True)
    assert plugins.enabled() == ["a"]


def test_idle_plugins_wait_for_idle_slots(make: Any) -> None:
    plugins = make.on(make.plugin("a", HOOK, toggle="idle"))
    running = engine(True, False, True)
    plugins.start(running)
    with pytest.raises(PluginError, match="while nothing runs; busy slots: 2; try again later"):
        plugins.toggle("a", False)
    assert plugins.enabled() == ["a"]
    for slot in running.slots:
        slot.busy = False
    plugins.toggle("a", False)
    assert plugins.enabled() == []


def test_a_plugin_that_would_change_the_context_needs_a_restart(make: Any) -> None:
    def wider(self: Any, config: Any) -> Any:
        return replace(config, context=replace(config.context, n_draft_max=8))

    plugins = make.unconfigured(make.plugin("a", {"configure": wider}))
    plugins.configure(make.config())
    with pytest.raises(PluginError, match="a changes the context: restart with --enable a"):
        plugins.toggle("a", True)
    assert plugins.enabled() == []


def test_switching_on_what_does_not_apply_says_why(make: Any) -> None:
    def decline(self: Any) -> None:
        raise Unavailable("one GPU")

    plugins = make.unconfigured(make.plugin("a", {"configure": decline}))
    plugins.configure(make.config())
    with pytest.raises(PluginError, match="a cannot be enabled here: one GPU"):
        plugins.toggle("a", True)
    assert plugins.views()[0].reason == "one GPU"


def test_a_plugin_that_cannot_start_stays_off(make: Any) -> None:
    plugins = make.unconfigured(make.plugin("a", {"engine_start": lambda self: 1 / 0, **HOOK}))
    plugins.configure(make.config())
    plugins.start(engine())
    with pytest.raises(PluginError, match="a could not be enabled, it raised ZeroDivisionError"):
        plugins.toggle("a", True)
    assert plugins.hooks.idle == ()


def test_switch_clash_at_a_toggle_changes_nothing(make: Any) -> None:
    a = make.plugin("a", {"native_switches": lambda self: {"x": 1}})
    b = make.plugin("b", {"native_switches": lambda self: {"x": 0}})
    plugins = make.unconfigured(a, b, enable=("a",))
    plugins.configure(make.config())
    applied: list[Any] = []
    plugins.apply_switches = applied.append
    with pytest.raises(PluginError, match="different values of the native switch x"):
        plugins.toggle("b", True)
    assert (plugins.enabled(), applied) == (["a"], [])


@pytest.mark.parametrize("enabled", [True, False])
def test_a_refused_switch_leaves_everything_as_it_was(make: Any, enabled: bool) -> None:
    plugins = make.on(make.plugin("a", HOOK))
    if not enabled:
        plugins.toggle("a", False)
    hooks = plugins.hooks.idle

    def refuse(wanted: Any) -> None:
        raise PluginError("300 MiB are missing")

    plugins.apply_switches = refuse
    with pytest.raises(PluginError, match="300 MiB are missing"):
        plugins.toggle("a", not enabled)
    assert plugins.views()[0].enabled is enabled
    assert plugins.hooks.idle == hooks


def test_quarantine_survives_a_refused_switch(make: Any, caplog: pytest.LogCaptureFixture) -> None:
    plugins = make.on(make.plugin("a", HOOK))

    def refuse(wanted: Any) -> None:
        raise PluginError("300 MiB are missing")

    plugins.apply_switches = refuse
    plugins.quarantine("a", ValueError("no"))
    assert plugins.views()[0].state == "quarantined"
    assert "the native switches of plugin a stay as they are: 300 MiB are missing" in caplog.text


def test_a_note_is_shown(make: Any) -> None:
    plugins = make.on(make.plugin("a", HOOK))
    assert plugins.views()[0].note == ""
    plugins._members["a"].instance.note = "doing well"
    assert plugins.views()[0].note == "doing well"
