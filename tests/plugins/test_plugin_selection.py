"""Which plugins are on: auto, names, only:, none, conflicts, requirements and options of plugins that are missing."""

from __future__ import annotations

from typing import Any

import pytest

from llamamg.plugins import PluginError, Unavailable


def decline(self: Any) -> None:
    raise Unavailable("one GPU")


def enabled(make: Any, **config: Any) -> list[str]:
    ours = (make.plugin("ours"), make.plugin("ours-not-here", {"configure": decline}))
    plugins = make.unconfigured(make.plugin("theirs"), make.plugin("more"), shipped=ours, **config)
    plugins.configure(make.config())
    return sorted(plugins.enabled())


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({}, ["ours"]),
        ({"enable": ("theirs",)}, ["ours", "theirs"]),
        ({"enable": ("theirs", "more")}, ["more", "ours", "theirs"]),
        ({"enable": ("ours",)}, ["ours"]),
        ({"enable": ("theirs",), "only": True}, ["theirs"]),
        ({"none": True}, []),
        ({"disable": ("ours",)}, []),
        ({"enable": ("theirs",), "disable": ("ours",)}, ["theirs"]),
    ],
)
def test_enabling_rules(make: Any, config: dict[str, Any], expected: list[str]) -> None:
    assert enabled(make, **config) == expected


@pytest.mark.parametrize("where", ["enable", "disable"])
def test_unknown_name_lists_the_known_ones(make: Any, where: str) -> None:
    with pytest.raises(PluginError, match=r"no plugin named 'theirz' \(installed: more, ours, ours-not-here, theirs\)"):
        enabled(make, **{where: ("theirz",)})


def test_option_of_a_missing_plugin_stops_the_start(make: Any) -> None:
    with pytest.raises(PluginError, match=r"spec is not part of this version.*--ignore-missing-plugins"):
        enabled(make, options={"spec": {"type": "ngram-map-k4v"}})


def test_ignore_missing_makes_it_a_warning(make: Any) -> None:
    plugins = make.unconfigured(shipped=(make.plugin("ours"),), options={"spec": {"type": "x"}}, ignore_missing=True)
    plugins.configure(make.config())
    assert plugins.enabled() == ["ours"]
    assert len(plugins.warnings) == 1
    assert "spec is not part of this version" in plugins.warnings[0]


def test_named_plugin_that_does_not_apply_stops_the_start(make: Any) -> None:
    with pytest.raises(PluginError, match="ours-not-here cannot be enabled here: one GPU; start without"):
        enabled(make, enable=("ours-not-here",))


def test_enabled_and_disabled_at_once(make: Any) -> None:
    with pytest.raises(PluginError, match="ours is both enabled and disabled"):
        enabled(make, enable=("ours",), disable=("ours",))


def test_none_with_names(make: Any) -> None:
    with pytest.raises(PluginError, match="--enable none excludes"):
        enabled(make, enable=("ours",), none=True)


@pytest.mark.parametrize("declaring", ["a", "b"])
def test_two_named_plugins_in_conflict(make: Any, declaring: str) -> None:
    conflicts = {"a": ("b",), "b": ("a",)}[declaring]
    classes = [make.plugin(name, conflicts=conflicts if name == declaring else ()) for name in ("a", "b")]
    with pytest.raises(PluginError, match=r"conflicts with .: enable only one"):
        make.on(*classes)


def test_an_automatic_plugin_gives_way_to_a_named_one(make: Any) -> None:
    ours, theirs = make.plugin("ours"), make.plugin("theirs", conflicts=("ours",))
    plugins = make.unconfigured(theirs, shipped=(ours,), enable=("theirs",))
    plugins.configure(make.config())
    assert plugins.enabled() == ["theirs"]
    view = next(view for view in plugins.views() if view.name == "ours")
    assert (view.state, view.reason) == ("unavailable", "conflicts with theirs")


def test_requirement_missing(make: Any) -> None:
    with pytest.raises(PluginError, match="a requires b, which is not on: add --enable b"):
        make.on(make.plugin("a", requires=("b",)))
    plugins = make.unconfigured(shipped=(make.plugin("a", requires=("b",)),))
    plugins.configure(make.config())
    assert plugins.enabled() == []
    assert plugins.views()[0].reason == "requires b, which is not on"


def test_requirements_are_configured_first(make: Any) -> None:
    order: list[str] = []
    classes = [
        make.plugin("a", {"configure": lambda self: order.append("a")}, requires=("b",)),
        make.plugin("b", {"configure": lambda self: order.append("b")}, requires=("c",)),
        make.plugin("c", {"configure": lambda self: order.append("c")}),
    ]
    assert sorted(make.on(*classes).enabled()) == ["a", "b", "c"]
    assert order == ["c", "b", "a"]


def test_requirement_that_does_not_apply(make: Any) -> None:
    ours = (make.plugin("a", requires=("b",)), make.plugin("b", {"configure": decline}))
    plugins = make.unconfigured(shipped=ours)
    plugins.configure(make.config())
    assert plugins.enabled() == []


def test_requirements_in_a_circle(make: Any) -> None:
    with pytest.raises(PluginError, match="circle, a -> b -> a"):
        make.on(make.plugin("a", requires=("b",)), make.plugin("b", requires=("a",)))


def test_named_plugin_that_fails_in_configure_stops_the_start_an_automatic_one_does_not(make: Any) -> None:
    cls = make.plugin("a", {"configure": lambda self: {}["gpu"]})
    with pytest.raises(PluginError, match=r"a failed in configure \(KeyError: 'gpu'\); start without --enable a"):
        make.on(cls)
    plugins = make.unconfigured(shipped=(cls, make.plugin("b")))
    plugins.configure(make.config())
    assert plugins.enabled() == ["b"]
    assert plugins.views()[0].state == "quarantined"
    assert any("plugin a is off" in warning for warning in plugins.warnings)


def test_an_option_that_cannot_be_had_stops_the_start_whoever_enabled_the_plugin(make: Any) -> None:
    def refuse(self: Any) -> None:
        raise PluginError("--folder /x is in use")

    with pytest.raises(PluginError, match="^--folder /x is in use$"):
        make.unconfigured(shipped=(make.plugin("a", {"configure": refuse}),)).configure(make.config())
    with pytest.raises(PluginError, match="^--folder /x is in use$"):
        make.on(make.plugin("a", {"configure": refuse}))


def test_two_plugins_that_want_different_values_of_a_native_switch(make: Any) -> None:
    a = make.plugin("a", {"native_switches": lambda self: {"x": 1}})
    b = make.plugin("b", {"native_switches": lambda self: {"x": 0}})
    with pytest.raises(PluginError, match="a and b want different values of the native switch x"):
        make.on(a, b)
