"""Which plugins are wanted: `auto`, names, `only:` and `none`, and what conflicts and requirements make of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from llamamg.config import PluginsConfig
from llamamg.plugins.declaration import PluginDeclaration, PluginError
from llamamg.plugins.discovery import Found

PLANNED = frozenset({"spec", "async-cache"})  # plugins of this project that other versions ship


@dataclass(slots=True)
class Selection:
    """Names in the order they are to be configured (requirements first), and why others were left out."""

    named: set[str] = field(default_factory=set)
    order: list[str] = field(default_factory=list)
    left_out: dict[str, str] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)


def select(config: PluginsConfig, found: Mapping[str, Found]) -> Selection:
    """The plugins to try. Raises PluginError for unknown, broken, contradicting or conflicting names."""
    out = Selection()
    if config.none and config.enable:
        raise PluginError(f"--enable none excludes other names; leave it out to enable {', '.join(config.enable)}")
    for name in (*config.enable, *config.disable, *config.options):
        if name not in found:
            sentence = unknown(name, found)
            if not config.ignore_missing:
                raise PluginError(f"{sentence}; --ignore-missing-plugins starts without it")
            out.warnings.append(f"{sentence}: ignored")
    both = sorted(set(config.enable) & set(config.disable))
    if both:
        raise PluginError(f"{both[0]} is both enabled and disabled: remove one of the two")
    for name in config.enable:
        if name in found and found[name].broken is not None:
            raise PluginError(f"plugin {name} cannot be enabled: {found[name].broken}")
    named = {name for name in config.enable if name in found}
    auto = {name for name, entry in found.items() if entry.shipped and entry.broken is None} - named
    if config.only or config.none:
        auto = set()
    auto -= set(config.disable)
    wanted = [name for name in found if name in named or name in auto]
    out.named = named
    out.order = requirements_first(_without_conflicts(wanted, named, found, out), found)
    return out


def unknown(name: str, found: Mapping[str, Found]) -> str:
    """The sentence for a name that is not installed."""
    known = ", ".join(sorted(found)) or "none"
    if name in PLANNED:
        return f"plugin {name} is not part of this version (installed: {known})"
    return f"there is no plugin named {name!r} (installed: {known})"


def declaration_of(name: str, found: Mapping[str, Found]) -> PluginDeclaration:
    """The declaration of an installed plugin that is not broken."""
    declaration = found[name].declaration
    if declaration is None:
        raise PluginError(f"plugin {name} cannot be used: {found[name].broken}")
    return declaration


def conflict(name: str, other: str, found: Mapping[str, Found]) -> bool:
    """Whether two plugins exclude each other; it is enough that one of them says so."""
    return other in declaration_of(name, found).conflicts or name in declaration_of(other, found).conflicts


def _without_conflicts(wanted: list[str], named: set[str], found: Mapping[str, Found], out: Selection) -> list[str]:
    """Names given by the user win over automatic ones; between two given names the user has to choose."""
    kept: list[str] = []
    for name in sorted(wanted, key=lambda name: name not in named):
        other = next((other for other in kept if conflict(name, other, found)), None)
        if other is None:
            kept.append(name)
        elif name in named:
            raise PluginError(f"{name} conflicts with {other}: enable only one of the two")
        else:
            out.left_out[name] = f"conflicts with {other}"
    return [name for name in wanted if name in kept]


def requirements_first(names: list[str], found: Mapping[str, Found]) -> list[str]:
    """The names sorted so that a plugin comes after what it requires. Raises PluginError on a circle."""
    order: list[str] = []
    path: list[str] = []

    def visit(name: str) -> None:
        if name in order:
            return
        if name in path:
            circle = " -> ".join([*path, name])
            raise PluginError(f"plugins require each other in a circle, {circle}: disable one of them")
        path.append(name)
        for required in declaration_of(name, found).requires:
            if required in names:
                visit(required)
        path.pop()
        order.append(name)

    for name in names:
        visit(name)
    return order
