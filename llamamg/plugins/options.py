"""Plugin options: declared by the plugin, given as text on the command line, in the environment or in a file."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from llamamg.plugins.declaration import NAME, PluginError

EXPECTED = {int: "a whole number", float: "a number", bool: "on or off", str: "text"}
N_LARGEST = (1 << 63) - 1  # GET /plugins answers in JSON, whose numbers end there
BOOLEANS = {"on": True, "true": True, "yes": True, "1": True, "off": False, "false": False, "no": False, "0": False}


@dataclass(frozen=True, slots=True)
class PluginOption:
    """One option of one plugin. Its main flag is `--PLUGIN-NAME`; `aliases` are further flags, `env` variables."""

    plugin: str
    name: str
    type: Callable[[str], Any]
    default: Any
    help: str
    aliases: tuple[str, ...] = ()
    env: tuple[str, ...] = ()
    minimum: float | None = None
    choices: tuple[str, ...] = ()

    @property
    def flag(self) -> str:
        """The main command-line flag."""
        return f"--{self.plugin}-{self.name}"

    @property
    def expected(self) -> str:
        """In words, what a value has to be."""
        if self.choices:
            return "one of " + ", ".join(self.choices)
        what = EXPECTED.get(self.type) if isinstance(self.type, type) else None
        what = what or str(getattr(self.type, "__name__", self.type))
        return what if self.minimum is None else f"{what} of at least {self.minimum:g}"

    def parse(self, text: str) -> Any:
        """The value of a text. Raises PluginError naming option, text and what was expected."""
        try:
            value = BOOLEANS[text.strip().lower()] if self.type is bool else self.type(text)
        except (ValueError, TypeError, KeyError):
            raise self._wrong(text) from None
        if isinstance(value, float) and not math.isfinite(value):
            raise self._wrong(text)
        if isinstance(value, int) and abs(value) > N_LARGEST:
            raise self._wrong(text)
        if self.minimum is not None and value < self.minimum:
            raise self._wrong(text)
        if self.choices and text not in self.choices:
            raise self._wrong(text)
        return value

    def _wrong(self, text: str) -> PluginError:
        return PluginError(f"option {self.name} of plugin {self.plugin}: {text!r} is not {self.expected}")


class Options:
    """What `register_options` gets: collects the options of one plugin."""

    def __init__(self, plugin: str) -> None:
        self.plugin = plugin
        self.declared: dict[str, PluginOption] = {}

    def add(
        self,
        name: str,
        *,
        type: Callable[[str], Any] = str,
        default: Any = None,
        help: str,
        aliases: tuple[str, ...] = (),
        env: tuple[str, ...] = (),
        minimum: float | None = None,
        choices: tuple[str, ...] = (),
    ) -> None:
        """Declare `name` (kebab-case), a keyword of the constructor. Raises ValueError on a bad or repeated name."""
        if not NAME.fullmatch(name):
            raise ValueError(f"plugin {self.plugin}: option name {name!r}: use lower-case words joined by '-'")
        if name in self.declared:
            raise ValueError(f"plugin {self.plugin}: option {name!r} is declared twice")
        if not help:
            raise ValueError(f"plugin {self.plugin}: option {name!r} needs a help text")
        self.declared[name] = PluginOption(self.plugin, name, type, default, help, aliases, env, minimum, choices)

    def values(self, given: Mapping[str, str]) -> dict[str, Any]:
        """Constructor keywords: given texts parsed, defaults for the rest. Raises PluginError for an unknown option."""
        for name in given:
            if name not in self.declared:
                known = ", ".join(sorted(self.declared)) or "none"
                raise PluginError(f"plugin {self.plugin} has no option {name!r}; its options are: {known}")
        values = {name: option.default for name, option in self.declared.items()}
        values.update((name, self.declared[name].parse(str(text))) for name, text in given.items())
        return {name.replace("-", "_"): value for name, value in values.items()}
