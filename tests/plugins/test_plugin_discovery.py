"""Finding plugins: broken packages are reported and disturb nobody, declarations are data."""

from __future__ import annotations

from typing import Any

import pytest

from llamamg.guard import Guard
from llamamg.plugins import PluginError, PluginSet, discover, plugin

WORDS = {"summary": "s", "helps": "h", "hurts": "u", "guard": Guard.exact()}


class NeedsArguments:
    def __init__(self, model: str) -> None: ...


@pytest.mark.parametrize(
    ("target", "sentence"),
    [
        (
            ModuleNotFoundError("No module named 'cupy'"),
            "cannot be imported: ModuleNotFoundError: No module named 'cupy'",
        ),
        (SyntaxError("invalid syntax"), "cannot be imported: SyntaxError"),
        (object, "is not a class decorated with @plugin"),
        (
            plugin(name="other", **WORDS)(type("Other", (), {})),
            "leads to a plugin named other; give both the same name",
        ),
        (plugin(name="bad", **WORDS)(NeedsArguments), "all arguments of its constructor need defaults"),
    ],
)
def test_a_broken_package_is_reported_and_others_work(make: Any, target: Any, sentence: str) -> None:
    points = (make.Point("bad", target),)
    plugins = make.unconfigured(make.plugin("good"), points=points, enable=("good",))
    plugins.configure(make.config())
    assert plugins.enabled() == ["good"]
    view = next(view for view in plugins.views() if view.name == "bad")
    assert view.state == "unavailable"
    assert sentence in (view.reason or "")
    assert any("bad" in warning and sentence in warning for warning in plugins.warnings)
    with pytest.raises(PluginError, match="plugin bad cannot be used"):
        plugins.toggle("bad", True)
    with pytest.raises(PluginError, match="plugin bad cannot be enabled"):
        make.unconfigured(points=points, enable=("bad",)).configure(make.config())


def test_a_name_taken_twice_keeps_the_shipped_one(make: Any) -> None:
    ours, theirs = make.plugin("same"), make.plugin("same")
    found = discover([make.Point("same", theirs, make.Dist("theirs")), make.Point("same", ours, make.Dist("llamamg"))])
    assert found["same"].cls is ours
    assert found["same"].shipped
    assert found["same (theirs)"].broken == "its name is taken by llamamg; uninstall llamamg or theirs"


def test_the_same_package_seen_twice_is_one(make: Any) -> None:
    cls = make.plugin("a")
    found = discover([make.Point("a", cls), make.Point("a", cls)])
    assert list(found) == ["a"]
    assert found["a"].broken is None


@pytest.mark.parametrize("name", ["Upper", "under_score", "two--dashes", "-x", "", "9lives"])
def test_names_are_kebab_case(name: str) -> None:
    with pytest.raises(ValueError, match="lower-case words joined by '-'"):
        plugin(name=name, **WORDS)


def test_wrong_toggle_class() -> None:
    with pytest.raises(ValueError, match="use one of step, idle, restart"):
        plugin(name="a", toggle="sometimes", **WORDS)


def test_a_text_where_a_tuple_belongs() -> None:
    with pytest.raises(ValueError, match=r"conflicts must be a tuple of names, like \('prefill-gate',\)"):
        plugin(name="a", conflicts="prefill-gate", **WORDS)  # type: ignore[arg-type]


def test_guards_have_text_forms() -> None:
    assert str(Guard.exact()) == "exact"
    assert str(Guard.same_tokens()) == "same-tokens"
    assert str(Guard.close(kl=1e-4, top1=0.999)) == "close(kl=0.0001, top1=0.999)"
    with pytest.raises(ValueError, match="top1 between 0 and 1"):
        Guard.close(kl=0.1, top1=2.0)


def test_installed_plugins_include_the_two_shipped_ones() -> None:
    from llamamg.config import PluginsConfig

    views = {view.name: view for view in PluginSet.discover(PluginsConfig()).views()}
    for name in ("prefill-gate", "seq-compact"):
        assert views[name].auto
        assert views[name].available, views[name].reason
        assert views[name].state == "auto"


@pytest.mark.parametrize("name", [name for name, entry in discover().items() if entry.shipped])
def test_properties_of_a_shipped_plugin_can_be_read_before_it_starts(name: str) -> None:
    """pluggy before 1.7 looks at every attribute of a plugin that is registered, and properties may raise there."""
    cls = discover()[name].cls
    assert cls is not None
    instance = cls()
    for attribute in dir(cls):
        getattr(instance, attribute)
