"""The options in words: `llamamg serve --help`, and the shown default of an option."""

from __future__ import annotations

import shutil
import textwrap
from pathlib import Path

from llamamg.config import Config, ModelConfig
from llamamg.options.option import Option, Status
from llamamg.options.table import Table
from llamamg.options.unsupported import GROUP as UNSUPPORTED_GROUP

INTRO = """Usage: llamamg serve -m MODEL.gguf [OPTION…]

Serve a GGUF model with llama-server's options and HTTP API. An option is taken from the command line, else from its
environment variable, else from the file given by --config. `--a_b` is `--a-b`, `--option=value` works too."""

_DEFAULTS = Config(ModelConfig(Path()))


def grouped(table: Table) -> dict[str, list[Option]]:
    """The options by group, in the order of the table."""
    groups: dict[str, list[Option]] = {}
    for option in table:
        groups.setdefault(option.group, []).append(option)
    return groups


def shown_default(option: Option) -> str:
    """The default in words, empty where there is nothing to say."""
    if option.default or not option.target or option.target.partition(".")[0] not in Config.__dataclass_fields__:
        return option.default
    value: object = _DEFAULTS
    for name in option.target.split("."):
        value = getattr(value, name)
    if option.parse is None:
        return ("on" if value else "off") if option.negatives else ""
    if isinstance(value, tuple):
        return ";".join(str(item) for item in value)
    if value is None or value == "" or value == {} or isinstance(value, Path):
        return ""
    return f"{value:g}" if isinstance(value, float) else str(value)


def signature(option: Option) -> str:
    """All names, and the value."""
    names = ", ".join((*option.names, *option.negatives)) or f"(only {option.env})"
    return f"{names} {option.metavar}".rstrip() if option.names else names


def help_text(table: Table, width: int | None = None) -> str:
    """The text of --help: every option with its help, default and variable."""
    width = width or max(72, min(shutil.get_terminal_size().columns, 110))
    lines = [INTRO]
    groups = grouped(table)
    for group in sorted(groups, key=lambda name: name == UNSUPPORTED_GROUP):
        lines.append(f"\n{group}:")
        for option in groups[group]:
            lines += _entry(option, width)
    return "\n".join(lines) + "\n"


def _entry(option: Option, width: int) -> list[str]:
    notes = []
    if (default := shown_default(option)) and option.status is Status.SUPPORTED:
        notes.append(f"default: {default}")
    if option.env and option.names:
        notes.append(f"env: {option.env}")
    text = option.help + (f" ({'; '.join(notes)})" if notes else "")
    return [f"  {signature(option)}", *textwrap.wrap(text, width, initial_indent=" " * 8, subsequent_indent=" " * 8)]
