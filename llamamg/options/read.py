"""Reading options from the command line, the environment and a config file into settings."""

from __future__ import annotations

import difflib
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from llamamg.options.option import Combine, Option, OptionError
from llamamg.options.table import Table
from llamamg.options.values import TRUTHY, boolean

tomllib: Any = import_module("tomllib" if sys.version_info >= (3, 11) else "tomli")


@dataclass(frozen=True, slots=True)
class Setting:
    """One value of one option, and where it came from, in the user's words."""

    option: Option
    value: object
    source: str


def read_argv(arguments: Sequence[str], table: Table) -> list[Setting]:
    """Settings of a command line. Raises OptionError."""
    settings = []
    rest = list(arguments)
    while rest:
        name = rest.pop(0)
        inline: str | None = None
        if not name.startswith("-") or name == "-":
            raise OptionError(
                f"unexpected argument {name!r}: options start with a dash, and the model is given by --model."
            )
        if name.startswith("--") and "=" in name:
            name, _, inline = name.partition("=")
        option, negative = table.find(name)
        if option.parse is None:
            if inline is not None:
                raise OptionError(f"{name} takes no value.")
            settings.append(Setting(option, switched(option, not negative), name))
            continue
        if inline is None:
            if not rest or rest[0] in table.by_name:
                raise OptionError(f"{name} needs a value: {name} {option.metavar}.")
            inline = rest.pop(0)
        settings.append(Setting(option, parsed(option, inline, name), name))
    return settings


def read_environment(environ: Mapping[str, str], table: Table) -> list[Setting]:
    """Settings of the environment, in the order of the table. Raises OptionError."""
    settings = []
    for name, (option, negative) in table.by_env.items():
        if name not in environ or (name.startswith("LLAMAMG_") and not environ[name]):
            continue
        content = environ[name]
        if negative:  # llama-server takes any value for a no
            settings.append(Setting(option, switched(option, False), name))
        elif option.parse is not None:
            settings.append(Setting(option, parsed(option, content, name), name))
        elif option.negatives or option.target.startswith("switch:"):
            settings.append(Setting(option, switched(option, _yes_or_no(content, name)), name))
        elif content.lower() in TRUTHY or _yes_or_no(content, name):
            settings.append(Setting(option, switched(option, True), name))
    return settings


def unknown_variables(environ: Mapping[str, str], table: Table) -> list[str]:
    """Remarks on variables that look like options and are none: a misspelt one must not go unnoticed."""
    remarks = []
    for name in sorted(environ):
        if name.startswith("LLAMA_ARG_") and name not in table.by_env:
            near = difflib.get_close_matches(name, table.by_env, n=1, cutoff=0.8)
            remarks.append(f"{name} is not an option and has no effect{f'; did you mean {near[0]}?' if near else '.'}")
    return remarks


def read_file(path: Path, table: Table) -> tuple[list[Setting], dict[str, dict[str, str]]]:
    """Settings of a config file, and the options of its [plugins.NAME] tables as text. Raises OptionError."""
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise OptionError(f"--config: there is no file {path}.") from None
    except (OSError, UnicodeDecodeError) as error:
        raise OptionError(f"--config: {path} cannot be read: {error}.") from None
    except tomllib.TOMLDecodeError as error:
        raise OptionError(f"--config: {path} is not valid TOML: {error}.") from None
    for key in content:
        if key not in ("serve", "plugins"):
            raise OptionError(f"{path}: unknown table or key {key!r}; known are [serve] and [plugins.NAME].")
    serve, plugins = content.get("serve", {}), content.get("plugins", {})
    if not isinstance(serve, dict) or not isinstance(plugins, dict):
        raise OptionError(f"{path}: serve and plugins must be tables, [serve] and [plugins.NAME].")
    settings = []
    for key, value in serve.items():
        source = f"[serve] {key} in {path}"
        option, negative = table.find(f"--{key}", f"{path}, [serve]")
        if option.target in ("local.config", "local.help", "local.version"):
            raise OptionError(f"{source}: this option belongs on the command line.")
        settings += _file_values(option, negative, value, source)
    return settings, {name: _plugin_texts(name, entry, path) for name, entry in plugins.items()}


def switched(option: Option, on: bool) -> object:
    """The value of an option that takes none on the command line."""
    if option.combine is Combine.UPDATE:
        return {option.const: on}
    return option.const if on else False


def parsed(option: Option, content: str, source: str) -> object:
    """The value of a text. Raises OptionError that names the source and says what it must be."""
    assert option.parse is not None
    try:
        return option.parse(content)
    except ValueError as error:
        shown = content if len(content) <= 60 else content[:57] + "…"
        raise OptionError(f"{source} {shown!r}: the value {error}.") from None


def _yes_or_no(content: str, source: str) -> bool:
    try:
        return boolean(content)
    except ValueError as error:
        raise OptionError(f"{source} {content!r}: the value {error}.") from None


def _file_values(option: Option, negative: bool, value: Any, source: str) -> list[Setting]:
    if option.parse is None:
        if not isinstance(value, bool):
            raise OptionError(f"{source}: the value must be true or false.")
        if value or option.negatives:
            return [Setting(option, switched(option, value != negative), source)]
        return []
    if isinstance(value, list) and option.combine is Combine.EXTEND:
        return [Setting(option, parsed(option, _as_text(item, source), source), source) for item in value]
    return [Setting(option, parsed(option, _as_text(value, source), source), source)]


def _as_text(value: Any, source: str) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, (str, int, float)):
        return str(value)
    if isinstance(value, list) and all(isinstance(item, (str, int, float)) for item in value):
        return ",".join(str(item) for item in value)
    if isinstance(value, dict):
        return json.dumps(value)
    raise OptionError(f"{source}: the value must be text, a number, true, false or a list of these.")


def _plugin_texts(name: str, entry: Any, path: Path) -> dict[str, str]:
    if not isinstance(entry, dict):
        raise OptionError(f"{path}: plugins.{name} must be a table, [plugins.{name}].")
    return {key.replace("_", "-"): _as_text(value, f"[plugins.{name}] {key} in {path}") for key, value in entry.items()}
