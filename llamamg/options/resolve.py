"""From settings to a Config: precedence, combination, checks across options."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from llamamg import paths
from llamamg.config import Config, ContextConfig, GenerationConfig, ModelConfig, PluginsConfig, ServerConfig
from llamamg.options.checks import check
from llamamg.options.option import Combine, OptionError, Status
from llamamg.options.read import Setting, read_argv, read_environment, read_file, unknown_variables
from llamamg.options.table import Table
from llamamg.options.values import unescape
from llamamg.request import SamplingParams


@dataclass(slots=True)
class Parsed:
    """What a start asked for: `config` (None for help and version), and remarks for stderr."""

    config: Config | None
    notes: list[str]
    want: str = ""  # "help" | "version" | ""
    json_schema: str = ""  # becomes the grammar once the library with the converter is loaded


def parse(
    arguments: Sequence[str], environ: Mapping[str, str], table: Table, installed: Collection[str] = ()
) -> Parsed:
    """Read command line over environment over config file. `installed` are plugin names. Raises OptionError."""
    given = read_argv(arguments, table)
    asked = {setting.option.target.removeprefix("local.") for setting in given} & {"help", "version"}
    if asked:
        return Parsed(None, [], sorted(asked)[0])
    variables = read_environment(environ, table)
    path = next((s.value for s in reversed([*variables, *given]) if s.option.target == "local.config"), None)
    stored, plugin_texts = read_file(Path(str(path)).expanduser(), table) if path is not None else ([], {})
    notes = [*table.clashes, *unknown_variables(environ, table)]
    settings = list(_honoured(_winners(stored, variables, given), installed, notes))
    config = _config(settings, plugin_texts, notes)
    if not config.plugins.ignore_missing:
        _all_installed(config, settings, installed)
    schema = str(next((s.value for s in reversed(settings) if s.option.target == "local.json_schema"), ""))
    if schema and config.generation.sampling.grammar:
        raise OptionError("--grammar and --json-schema exclude each other: give one of them.")
    return Parsed(config, notes, json_schema=schema)


def _all_installed(config: Config, settings: Iterable[Setting], installed: Collection[str]) -> None:
    """Stop at options of plugins that are not installed, naming what asked for them."""
    sources = {setting.option.plugin: setting.source for setting in reversed(list(settings))}
    for plugin in config.plugins.options:
        if plugin not in installed:
            raise OptionError(
                f"{sources.get(plugin) or f'an option of {plugin}'} needs the plugin {plugin}, which is not installed: "
                "leave it out, or add --ignore-missing-plugins to start without it."
            )


def _winners(*layers: list[Setting]) -> list[Setting]:
    """Layers from weak to strong: an option given in a stronger layer is not read from a weaker one."""
    kept: list[Setting] = []
    for layer in layers:
        given = {id(setting.option) for setting in layer}
        kept = [setting for setting in kept if id(setting.option) not in given] + layer
    return kept


def _honoured(settings: Iterable[Setting], installed: Collection[str], notes: list[str]) -> Iterable[Setting]:
    """Stop at what is not supported, remark on what has no effect, drop what asks for nothing of a missing plugin."""
    for setting in settings:
        option = setting.option
        if option.status is Status.UNSUPPORTED:
            if setting.value not in option.neutral:
                raise OptionError(f"{setting.source} is not supported: {option.reason}.")
        elif option.status is Status.NOTED:
            notes.append(f"{setting.source} has no effect: {option.reason}.")
        elif option.plugin and option.plugin not in installed and setting.value in option.neutral:
            continue
        elif option.target:
            yield setting


def _config(settings: list[Setting], plugin_texts: Mapping[str, Mapping[str, str]], notes: list[str]) -> Config:
    fields = _combined(settings)
    plugin_options = {name: dict(texts) for name, texts in plugin_texts.items()}
    switches: dict[str, bool] = {}
    enable, disable = _enabled(fields), list(fields.get("plugins.disable", ()))
    for target, value in fields.items():
        kind, _, name = target.partition(":")
        if kind == "plugin":
            plugin, _, key = name.partition(".")
            plugin_options.setdefault(plugin, {})[key] = _text(value)
        elif kind == "toggle":
            (enable.names if value else disable).append(name)
        elif kind == "switch":
            switches[name] = bool(value)
    for plugin, key, content in fields.get("local.plugin_option", ()):
        plugin_options.setdefault(plugin, {})[key] = content
    for plugin, texts in plugin_options.items():
        _enabled_in_file(plugin, texts, enable, disable)
    if "model.path" not in fields:
        raise OptionError(
            "no model: give a GGUF file with -m FILE (or LLAMA_ARG_MODEL, or `model` in the config file)."
        )
    sampling = SamplingParams(**_part(fields, "generation.sampling."))
    if fields.get("local.escape", True) and "generation.sampling.dry_sequence_breakers" in fields:
        breakers = tuple(unescape(text) for text in sampling.dry_sequence_breakers)
        sampling = replace(sampling, dry_sequence_breakers=breakers)
    config = Config(
        model=ModelConfig(**_part(fields, "model.")),
        context=ContextConfig(**_part(fields, "context.")),
        generation=GenerationConfig(sampling=sampling, **_part(fields, "generation.")),
        server=ServerConfig(**_part(fields, "server.")),
        plugins=PluginsConfig(
            enable=tuple(dict.fromkeys(enable.names)),
            disable=tuple(dict.fromkeys(disable)),
            only=enable.only,
            none=enable.none,
            options={name: texts for name, texts in plugin_options.items() if texts},
            ignore_missing=bool(fields.get("plugins.ignore_missing", False)),
            guard_replay=int(fields.get("plugins.guard_replay", 0)),
        ),
        build=_build(fields.get("local.build")),
        native_switches={**switches, **fields.get("native_switches", {})},
    )
    return check(config, notes)


def _combined(settings: list[Setting]) -> dict[str, Any]:
    """One value per target, in the way its options combine."""
    fields: dict[str, Any] = {}
    for setting in settings:
        target, value = setting.option.target, setting.value
        if setting.option.combine is Combine.EXTEND:
            fields[target] = (*fields.get(target, ()), *_tuple(value)) if value else ()
        elif setting.option.combine is Combine.UPDATE:
            fields[target] = {**fields.get(target, {}), **_mapping(value)}
        else:
            fields[target] = value
    return fields


def _tuple(value: object) -> tuple[Any, ...]:
    assert isinstance(value, tuple)
    return value


def _mapping(value: object) -> Mapping[Any, Any]:
    assert isinstance(value, Mapping)
    return value


def _part(fields: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    names = {target.removeprefix(prefix): value for target, value in fields.items() if target.startswith(prefix)}
    return {name: value for name, value in names.items() if "." not in name}


def _text(value: object) -> str:
    return ("on" if value else "off") if isinstance(value, bool) else str(value)


@dataclass(slots=True)
class _Enable:
    names: list[str]
    only: bool = False
    none: bool = False


def _enabled(fields: Mapping[str, Any]) -> _Enable:
    """`--enable` values: names, only:names, none, auto."""
    out = _Enable([])
    for value in fields.get("local.enable", ()):
        out.only = out.only or value.startswith("only:")
        for name in (part.strip() for part in value.removeprefix("only:").split(",")):
            if name == "none":
                out.none = True
            elif name not in ("", "auto"):
                out.names.append(name)
    if out.only and not out.names:
        raise OptionError(
            "--enable only: needs names, such as --enable only:prefill-gate; for no plugin use --enable none."
        )
    return out


def _enabled_in_file(plugin: str, texts: dict[str, str], enable: _Enable, disable: list[str]) -> None:
    """`enabled = true` in a [plugins.NAME] table; the command line wins."""
    if "enabled" not in texts:
        return
    wanted = texts.pop("enabled")
    if wanted not in ("on", "off"):
        raise OptionError(f"[plugins.{plugin}] enabled: the value must be true or false.")
    if plugin not in enable.names and plugin not in disable:
        (enable.names if wanted == "on" else disable).append(plugin)


def _build(value: object) -> Path | None:
    if value is None:
        return None
    if value == "patched" or value == "upstream":
        return paths.build("patched" if value == "patched" else "upstream")
    return Path(str(value))
