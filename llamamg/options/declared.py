"""Options that installed plugins declare, in the form of the table."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from llamamg.options.option import Option
from llamamg.plugins import Found, PluginError, PluginOption, plugin_options, plugin_switches


def declared_options(found: Mapping[str, Found]) -> list[Option]:
    """Flags, aliases and variables of all installed plugins; a variable beyond the first becomes a row of its own."""
    options = []
    for declared in plugin_options(found):
        options += _rows(declared)
    flags: dict[str, list[str]] = {}
    for switch in plugin_switches(found):
        row = flags.setdefault(switch.plugin, ["", "", switch.env])
        row[0 if switch.enable else 1] = switch.flag
    for name, (on, off, env) in flags.items():
        options.append(
            Option(
                names=(on,),
                negatives=(off,),
                target=f"toggle:{name}",
                env=env,
                default="on where it applies",
                help=f"enable or disable the plugin {name}",
                group=_group(name),
            )
        )
    return options


def _group(name: str) -> str:
    return f"Plugin {name}"


def _rows(declared: PluginOption) -> list[Option]:
    def check(content: str) -> str:
        try:
            declared.parse(content)
        except PluginError:
            raise ValueError(f"must be {declared.expected}") from None
        return content

    default = "" if declared.default is None else str(declared.default)
    rows = []
    if declared.type is bool and declared.aliases:
        # An alias is a switch, as in llama-server; the plugin's own flag takes on or off.
        rows.append(
            Option(
                names=declared.aliases,
                negatives=tuple(f"--no-{alias.removeprefix('--')}" for alias in declared.aliases),
                target=f"plugin:{declared.plugin}.{declared.name}",
                env=declared.env[0] if declared.env else "",
                default="on" if declared.default else "off",
                help=declared.help,
                group=_group(declared.plugin),
            )
        )
        declared = replace(declared, aliases=(), env=declared.env[1:])
    for index, env in enumerate(declared.env or ("",)):
        rows.append(
            Option(
                names=(*declared.aliases, declared.flag) if index == 0 else (),
                target=f"plugin:{declared.plugin}.{declared.name}",
                parse=check,
                metavar="VALUE",
                env=env,
                default=default or "unset",
                help=declared.help,
                group=_group(declared.plugin),
                example=default,
            )
        )
    return rows
