"""Every option of the table: names, help, and the same result from flag, variable and config file."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from llamamg.config import Config, ModelConfig
from llamamg.options.option import Option, OptionError, Status
from llamamg.options.table import CORE, REST, Table

TESTED_BY_NAME = ("local.config", "local.help", "local.version", "local.escape", "local.json_schema")
VALUES = [
    o
    for o in CORE
    if o.parse is not None and o.example and o.status is Status.SUPPORTED and o.target not in TESTED_BY_NAME
]
SWITCHES = [o for o in CORE if o.parse is None and o.status is Status.SUPPORTED and o.target not in TESTED_BY_NAME]
STOPPING = [o for o in (*CORE, *REST) if o.status is Status.UNSUPPORTED]
STOPS = {"fit": "on", "reasoning-format": "deepseek"}  # values that are not neutral, where 7 is no value
NOTED = [o for o in CORE if o.status is Status.NOTED]
FILES = [o for o in CORE if o.metavar in ("FILE", "DIR") and not o.example]


def by_name(option: Option) -> str:
    return option.names[0] if option.names else option.env


def leaves(value: Any, prefix: str = "") -> dict[str, Any]:
    """Every field of a Config by its dotted name."""
    out = {}
    for field in dataclasses.fields(value):
        content = getattr(value, field.name)
        if dataclasses.is_dataclass(content):
            out.update(leaves(content, f"{prefix}{field.name}."))
        else:
            out[f"{prefix}{field.name}"] = content
    return out


DEFAULTS = leaves(Config(ModelConfig(Path("some.gguf"))))
LOCAL = {
    "local.enable": "plugins.enable",
    "local.plugin_option": "plugins.options",
    "local.build": "build",
}


def changed(config: Config) -> dict[str, Any]:
    return {name: value for name, value in leaves(config).items() if value != DEFAULTS[name]}


def toml_value(text: str) -> str:
    try:
        float(text)
    except ValueError:
        return json.dumps(text)
    return text


@pytest.mark.parametrize("option", VALUES, ids=by_name)
def test_value_reaches_its_field_from_everywhere(option: Option, start: Any) -> None:
    field = LOCAL.get(option.target, option.target)
    by_flag = start(option.names[0], option.example, model=option.target != "model.path")
    assert set(changed(by_flag)) == {field}
    for name in option.names[1:]:
        assert start(name, option.example, model=option.target != "model.path") == by_flag
    if option.flag.startswith("--"):
        assert start(f"{option.flag}={option.example}", model=option.target != "model.path") == by_flag
        underscored = "--" + option.key.replace("-", "_")
        assert start(underscored, option.example, model=option.target != "model.path") == by_flag
    if option.env:
        assert start(env={option.env: option.example}, model=option.target != "model.path") == by_flag
    file = f"[serve]\n{option.key} = {toml_value(option.example)}"
    assert start(file=file, model=option.target != "model.path") == by_flag


@pytest.mark.parametrize("option", SWITCHES, ids=by_name)
def test_switch_reaches_its_field_from_everywhere(option: Option, start: Any) -> None:
    field = LOCAL.get(option.target, option.target)
    results = [start(name) for name in option.names]
    results += [start(env={option.env: word}) for word in ("1", "on", "true", "enabled") if option.env]
    results.append(start(file=f"[serve]\n{option.key} = true"))
    assert all(result == results[0] for result in results)
    if not option.negatives:
        assert set(changed(results[0])) == {field}
        if option.env:
            assert changed(start(env={option.env: "off"})) == {}
        assert changed(start(file=f"[serve]\n{option.key} = false")) == {}
        return
    off = [start(name) for name in option.negatives]
    off += [start(env={option.env: word}) for word in ("0", "off", "false", "disabled") if option.env]
    off += [start(env={option.negative_env: "1"})] if option.negative_env else []
    off.append(start(file=f"[serve]\n{option.key} = false"))
    off.append(start(file=f"[serve]\n{option.negatives[-1].lstrip('-')} = true"))
    assert all(result == off[0] for result in off)
    assert off[0] != results[0]
    assert set(changed(off[0])) | set(changed(results[0])) == {field}


@pytest.mark.parametrize("option", STOPPING, ids=by_name)
def test_unsupported_option_stops_with_its_reason(option: Option, start: Any) -> None:
    neutral = [str(value) for value in option.neutral]
    if option.parse is None and option.negatives:
        names = [n for n, on in [*((n, True) for n in option.names), *((n, False) for n in option.negatives)]]
        wanted = option.names if False in option.neutral else option.negatives
        for name in names:
            if name in wanted:
                with pytest.raises(OptionError, match="is not supported"):
                    start(name)
            else:
                assert changed(start(name)) == {}
        return
    value = [] if option.parse is None else [STOPS.get(option.key, "7")]
    with pytest.raises(OptionError) as stopped:
        start(option.names[-1], *value)
    assert option.reason in str(stopped.value)
    assert option.names[-1] in str(stopped.value)
    if option.env:
        with pytest.raises(OptionError, match=option.env):
            start(env={option.env: value[0] if value else "1"})
    for text in neutral:
        assert changed(start(option.names[0], "off" if text == "False" else text)) == {}


def test_every_option_has_help_and_unsupported_ones_a_reason(table: Table) -> None:
    for option in table:
        assert len(option.help) > 10, option
        assert bool(option.reason) == (option.status is not Status.SUPPORTED), option
        assert option.target or option.status is not Status.SUPPORTED or option.env == "LLAMA_ATTN_ROT_DISABLE", option


def test_every_target_is_a_field(table: Table) -> None:
    for option in table:
        if option.target and option.target.partition(":")[0] not in ("plugin", "switch", "toggle"):
            assert option.target in DEFAULTS or option.target.startswith("local."), option.target


def test_options_taking_a_value_are_all_tested() -> None:
    covered = {id(o) for o in (*VALUES, *SWITCHES, *STOPPING, *NOTED, *FILES)}
    left = {o.target for o in CORE if id(o) not in covered}
    assert left <= set(TESTED_BY_NAME)


def test_no_name_or_variable_is_used_twice() -> None:
    names = [name for option in (*CORE, *REST) for name in (*option.names, *option.negatives)]
    variables = [option.env for option in (*CORE, *REST) if option.env]
    assert sorted(names) == sorted(set(names))
    assert sorted(variables) == sorted(set(variables))
