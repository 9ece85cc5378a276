"""What a plugin says about itself: data, readable without making an instance."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from llamamg.guard import Guard

T = TypeVar("T", bound=type[Any])

TOGGLES = ("step", "idle", "restart")
NAME = re.compile(r"[a-z][a-z0-9]*(-[a-z0-9]+)*")


class PluginError(Exception):
    """A sentence about a plugin that says what to do."""


class Unavailable(Exception):
    """Raised by `configure` or `engine_start`: the plugin does not apply here, and why."""


@dataclass(frozen=True, slots=True)
class PluginDeclaration:
    """The arguments of `@plugin`."""

    name: str
    summary: str
    helps: str
    hurts: str
    guard: Guard
    toggle: str = "step"  # step: between any two steps | idle: while no slot is busy | restart: only at the start
    requires: tuple[str, ...] = ()
    conflicts: tuple[str, ...] = ()
    effect: str = "calls"  # the unit of the effect counter
    cli_switches: tuple[str, str] | None = None  # flags that mean --enable NAME and --disable NAME
    cli_env: str = ""  # the variable that stands for them


def plugin(
    *,
    name: str,
    summary: str,
    helps: str,
    hurts: str,
    guard: Guard,
    toggle: str = "step",
    requires: tuple[str, ...] = (),
    conflicts: tuple[str, ...] = (),
    effect: str = "calls",
    cli_switches: tuple[str, str] | None = None,
    cli_env: str = "",
) -> Callable[[T], T]:
    """Declare a class as a plugin; its instances count in the int attribute `effect` what they really did.

    Raises ValueError for a name that is not kebab-case or an unknown toggle class.
    """
    if not NAME.fullmatch(name):
        raise ValueError(f"plugin name {name!r}: use lower-case words joined by '-', like 'prefill-gate'")
    if toggle not in TOGGLES:
        raise ValueError(f"plugin {name}: toggle={toggle!r}; use one of {', '.join(TOGGLES)}")
    for field, value in (("requires", requires), ("conflicts", conflicts)):
        if isinstance(value, str):
            raise ValueError(f"plugin {name}: {field} must be a tuple of names, like ({value!r},)")
    declaration = PluginDeclaration(
        name, summary, helps, hurts, guard, toggle, tuple(requires), tuple(conflicts), effect, cli_switches, cli_env
    )

    def declare(cls: T) -> T:
        cls.declaration = declaration
        if not hasattr(cls, "effect"):
            cls.effect = 0
        return cls

    return declare
