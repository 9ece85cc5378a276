"""What one option of `llamamg serve` is: its names, where its value goes, what is said when it cannot be had."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum


class OptionError(ValueError):
    """A command line, environment or config file that cannot be used. The text is one sentence for the user."""


class Combine(Enum):
    """How several values for one field go together."""

    REPLACE = "the last one counts"
    EXTEND = "values add up"
    UPDATE = "keys are merged"


class Status(Enum):
    """What happens to an option that was given."""

    SUPPORTED = "supported"
    NOTED = "accepted, has no effect"  # says why on stderr
    UNSUPPORTED = "stops the start"  # says what to do instead


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """One option. The last long name is the one shown and the key in a config file.

    `target` is a field of Config ("context.n_ctx"), "plugin:NAME.OPTION", "toggle:PLUGIN", "switch:NAME", or "local.WHAT"
    (used while Config is made).
    """

    names: tuple[str, ...]
    help: str
    group: str
    target: str = ""
    parse: Callable[[str], object] | None = None  # None: takes no value
    metavar: str = ""
    negatives: tuple[str, ...] = ()
    const: object = True  # the value when none is taken; negatives give False
    env: str = ""
    combine: Combine = Combine.REPLACE
    default: str = ""  # shown when the field's own default does not say it
    status: Status = Status.SUPPORTED
    reason: str = ""  # a sentence: why it has no effect or stops the start
    neutral: tuple[object, ...] = ()  # values that ask for what happens anyway: never stop the start
    example: str = ""  # one accepted value, shown in the docs and used by the tests

    @property
    def key(self) -> str:
        """The name in a config file: the first long name, without dashes."""
        return next((name for name in self.names if name.startswith("--")), self.names[0]).lstrip("-")

    @property
    def flag(self) -> str:
        """The name used in messages."""
        return f"--{self.key}" if f"--{self.key}" in self.names else self.names[0]

    @property
    def negative_env(self) -> str:
        """The variable that switches a toggle off, empty when there is none."""
        return self.env.replace("LLAMA_ARG_", "LLAMA_ARG_NO_") if self.negatives and "LLAMA_ARG_" in self.env else ""

    @property
    def plugin(self) -> str:
        """Name of the plugin the option belongs to, empty for the core."""
        return self.target.removeprefix("plugin:").split(".")[0] if self.target.startswith("plugin:") else ""
