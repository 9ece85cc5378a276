"""Options of plugins: how they are declared, converted and refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from llamamg.hookspecs import hookimpl
from llamamg.plugins import Options, PluginError, discover, plugin_options, plugin_switches


def with_options(make: Any, *adds: tuple[str, dict[str, Any]], **declaration: Any) -> type[Any]:
    class Base:
        def __init__(self, **values: Any) -> None:
            self.values = values
            if values.get("depth") == 13:
                raise ValueError("13 and width do not go together")

        @hookimpl
        def register_options(self, options: Options) -> None:
            for name, rest in adds:
                options.add(name, **{"help": "h", **rest})

    return make.declared("p", Base, **declaration)


TYPED = (
    ("depth", {"type": int, "default": 3, "minimum": 1}),
    ("max-ms", {"type": float, "default": 1.5}),
    ("eager", {"type": bool, "default": False}),
    ("mode", {"default": "fast", "choices": ("fast", "slow")}),
    ("file", {"type": Path}),
)


def parsed(make: Any, **given: str) -> dict[str, Any]:
    plugins = make.on(with_options(make, *TYPED), options={"p": {k.replace("_", "-"): v for k, v in given.items()}})
    values: dict[str, Any] = plugins._members["p"].instance.values
    return values


def test_defaults_reach_the_constructor(make: Any) -> None:
    assert parsed(make) == {"depth": 3, "max_ms": 1.5, "eager": False, "mode": "fast", "file": None}


def test_texts_are_converted(make: Any) -> None:
    values = parsed(make, depth="7", max_ms="2", eager="on", mode="slow", file="x")
    assert values == {"depth": 7, "max_ms": 2.0, "eager": True, "mode": "slow", "file": Path("x")}


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"depth": "many"}, "option depth of plugin p: 'many' is not a whole number of at least 1"),
        ({"depth": "1.5"}, "option depth of plugin p: '1.5' is not a whole number of at least 1"),
        ({"depth": "9" * 20}, f"option depth of plugin p: '{'9' * 20}' is not a whole number of at least 1"),
        ({"depth": "0"}, "option depth of plugin p: '0' is not a whole number of at least 1"),
        ({"max_ms": "fast"}, "option max-ms of plugin p: 'fast' is not a number"),
        ({"max_ms": "nan"}, "option max-ms of plugin p: 'nan' is not a number"),
        ({"max_ms": "inf"}, "option max-ms of plugin p: 'inf' is not a number"),
        ({"eager": "maybe"}, "option eager of plugin p: 'maybe' is not on or off"),
        ({"mode": "medium"}, "option mode of plugin p: 'medium' is not one of fast, slow"),
        ({"debth": "1"}, "plugin p has no option 'debth'; its options are: depth, eager, file, max-ms, mode"),
        ({"depth": "13"}, r"plugin p does not take these options \(ValueError: 13 and width do not go together\)"),
    ],
)
def test_wrong_values_are_refused_with_a_sentence(make: Any, given: dict[str, str], sentence: str) -> None:
    with pytest.raises(PluginError, match=sentence):
        parsed(make, **given)


def test_wrong_value_for_a_plugin_that_is_off_is_refused_too(make: Any) -> None:
    plugins = make.unconfigured(with_options(make, *TYPED), options={"p": {"depth": "x"}})
    with pytest.raises(PluginError, match="option depth"):
        plugins.configure(make.config())


@pytest.mark.parametrize(
    ("add", "sentence"),
    [
        ((("Depth", {}),), "option name 'Depth'"),
        ((("a", {}), ("a", {})), "declared twice"),
        ((("a", {"help": ""}),), "needs a help text"),
    ],
)
def test_bad_declarations_make_the_plugin_unusable_and_say_why(make: Any, add: Any, sentence: str) -> None:
    plugins = make.unconfigured(with_options(make, *add))
    view = plugins.views()[0]
    assert not view.available
    assert sentence in (view.reason or "")


def test_the_command_line_gets_all_options_and_switches(make: Any) -> None:
    adds = (("a-b", {"type": int, "default": 1, "aliases": ("--x",), "env": ("X",)}),)
    cls = with_options(make, *adds, cli_switches=("--p", "--no-p"))
    found = discover([make.Point("p", cls), make.Point("broken", ImportError("no"))])
    (option,) = plugin_options(found)
    assert (option.plugin, option.name, option.flag) == ("p", "a-b", "--p-a-b")
    assert (option.aliases, option.env, option.default, option.help) == (("--x",), ("X",), 1, "h")
    assert [(s.plugin, s.flag, s.enable) for s in plugin_switches(found)] == [
        ("p", "--p", True),
        ("p", "--no-p", False),
    ]
