"""Finding installed plugins by entry points. A package that cannot be read is reported and disturbs nobody else."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from importlib.metadata import entry_points
from typing import Any, Protocol

import pluggy

from llamamg import hookspecs
from llamamg.hooks import COMPILED, ONCE
from llamamg.plugins.declaration import PluginDeclaration, PluginError
from llamamg.plugins.options import Options, PluginOption

GROUP = "llamamg"
DISTRIBUTION = "llamamg"


class Distribution(Protocol):
    """The installed package behind an entry point."""

    @property
    def name(self) -> str:
        """As in its metadata."""


class EntryPoint(Protocol):
    """What is used of `importlib.metadata.EntryPoint`."""

    @property
    def name(self) -> str:
        """Left of the `=`."""

    @property
    def value(self) -> str:
        """Right of the `=`."""

    @property
    def dist(self) -> Distribution | None:
        """The package, if known."""

    def load(self) -> Any:
        """Import the module and take the class."""


@dataclass(slots=True)
class Found:
    """An installed plugin: its class and declaration, or the sentence that says why it cannot be used."""

    name: str
    shipped: bool
    package: str  # the distribution it comes from, for messages
    cls: type[Any] | None = None
    declaration: PluginDeclaration | None = None
    options: dict[str, PluginOption] = field(default_factory=dict)
    broken: str | None = None


def new_manager() -> pluggy.PluginManager:
    """A pluggy manager that knows the hookspecs."""
    manager = pluggy.PluginManager("llamamg")
    manager.add_hookspecs(hookspecs)
    return manager


def discover(points: Iterable[EntryPoint] | None = None) -> dict[str, Found]:
    """All installed plugins by name, shipped ones first, each part sorted. Their modules are imported, nothing more."""
    found: dict[str, Found] = {}
    for point in sorted(entry_points(group=GROUP) if points is None else points, key=_shipped_first):
        package = point.dist.name if point.dist is not None else point.value.partition(":")[0]
        entry = Found(point.name, _is_shipped(point), package)
        other = found.get(point.name)
        if other is not None:
            if other.package != package:  # the same package may be seen twice on the path
                entry.broken = f"its name is taken by {other.package}; uninstall {other.package} or {package}"
                found[f"{point.name} ({package})"] = entry
            continue
        try:
            _read(entry, point)
        except PluginError as error:
            entry.broken = str(error)
        except Exception as error:  # whatever somebody else's module raises
            entry.broken = f"{point.value} of package {package} cannot be imported: {type(error).__name__}: {error}"
        found[point.name] = entry
    return found


def _is_shipped(point: EntryPoint) -> bool:
    return point.dist is not None and point.dist.name == DISTRIBUTION


def _shipped_first(point: EntryPoint) -> tuple[bool, str, str]:
    return (not _is_shipped(point), point.name, point.value)


def _read(entry: Found, point: EntryPoint) -> None:
    cls = point.load()
    declaration = getattr(cls, "declaration", None)
    if not isinstance(declaration, PluginDeclaration):
        raise PluginError(f"{point.value} of package {entry.package} is not a class decorated with @plugin(…)")
    if declaration.name != point.name:
        raise PluginError(
            f"entry point {point.name} of package {entry.package} leads to a plugin named {declaration.name}; "
            "give both the same name"
        )
    entry.options = read_options(cls, declaration.name)
    entry.cls, entry.declaration = cls, declaration


def read_options(cls: type[Any], name: str) -> dict[str, PluginOption]:
    """The options a plugin class declares, by name. Raises PluginError when the class breaks a rule of the hooks."""
    try:
        instance = cls()
    except TypeError as error:
        raise PluginError(f"plugin {name}: all arguments of its constructor need defaults ({error})") from error
    check_hooks(instance, name)
    options = Options(name)
    if hasattr(instance, "register_options"):
        instance.register_options(options)
    return options.declared


def check_hooks(instance: object, name: str) -> None:
    """Refuse misspelt hooks, unknown arguments and wrappers; pluggy alone would notice at the first call or never."""
    manager = new_manager()
    try:
        manager.register(instance, name)
    except pluggy.PluginValidationError as error:
        raise PluginError(f"plugin {name}: {str(error).strip().splitlines()[-1]}") from error
    for caller in manager.get_hookcallers(instance) or ():
        if not caller.has_spec():
            near = difflib.get_close_matches(caller.name, ONCE + COMPILED, n=1)
            hint = f"; did you mean {near[0]}?" if near else "; docs/hooks.md lists all hooks"
            raise PluginError(f"plugin {name} implements an unknown hook {caller.name}{hint}")
        for impl in caller.get_hookimpls():
            if impl.wrapper or impl.hookwrapper:
                raise PluginError(f"plugin {name}: hook {caller.name} is a wrapper; hooks here take no wrappers")


def plugin_options(found: Mapping[str, Found] | None = None) -> list[PluginOption]:
    """The options of all installed plugins, for the command line."""
    entries = discover() if found is None else found
    return [option for entry in entries.values() for option in entry.options.values()]


@dataclass(frozen=True, slots=True)
class PluginSwitch:
    """A flag of llama-server's fork that means `--enable PLUGIN` or `--disable PLUGIN`."""

    plugin: str
    flag: str
    enable: bool
    env: str = ""


def plugin_switches(found: Mapping[str, Found] | None = None) -> list[PluginSwitch]:
    """The `cli_switches` of all installed plugins, for the command line."""
    entries = discover() if found is None else found
    switches = []
    for name, entry in entries.items():
        if entry.declaration is not None and entry.declaration.cli_switches is not None:
            on, off = entry.declaration.cli_switches
            env = entry.declaration.cli_env
            switches += [PluginSwitch(name, on, True, env), PluginSwitch(name, off, False, env)]
    return switches
