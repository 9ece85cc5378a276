"""docs/hooks.md, made from the hookspecs: `python -m llamamg.hookdocs` writes it, `--check` says if it is stale."""

from __future__ import annotations

import argparse
import inspect
import sys
from pathlib import Path

from llamamg import hookspecs
from llamamg.hooks import FAULT_HOOKS, ONCE, REQUEST_HOOKS, STEP_HOOKS

PAGE = Path(__file__).resolve().parent.parent / "docs" / "hooks.md"
SECTIONS = (
    ("Once", "Called through pluggy, one plugin after the other.", ONCE),
    ("Per request", "Compiled to plain function calls.", REQUEST_HOOKS),
    ("Per step", "Compiled to plain function calls; without implementations, a test of an empty tuple.", STEP_HOOKS),
    ("Faults", "Compiled to plain function calls.", FAULT_HOOKS),
)
LABELS = ("When", "Thread", "Result", "May change", "Must not", "Raise")


def render() -> str:
    """The page."""
    intro = inspect.getdoc(hookspecs) or ""
    parts = [
        "<!-- Made by `python -m llamamg.hookdocs` from llamamg/hookspecs.py; edit that. -->",
        "# Hooks",
        intro,
        "How to write a plugin: [write-a-plugin.md](write-a-plugin.md).",
    ]
    for title, note, names in SECTIONS:
        parts += [f"## {title}", note]
        for name in names:
            parts += [f"### `{signature(name)}`", _contract(inspect.getdoc(getattr(hookspecs, name)) or "")]
    return "\n\n".join(parts) + "\n"


def signature(name: str) -> str:
    """A hook's signature as written in the source, without the module prefixes of types."""
    return f"{name}{inspect.signature(getattr(hookspecs, name))}".replace("'", "")


def _contract(text: str) -> str:
    """The labelled paragraphs of a docstring as a list."""
    lines: list[str] = []
    indent = ""
    for line in text.splitlines():
        label, _, rest = line.partition(":")
        if label in LABELS:
            indent = "  "  # the lines that follow belong to this item
            lines.append(f"* **{label}:**{rest}")
        else:
            lines.append((indent + line).rstrip())
    return "\n".join(lines)


def main() -> int:
    """Write or check the page; 1 if it is stale."""
    parser = argparse.ArgumentParser(prog="python -m llamamg.hookdocs", description="write docs/hooks.md")
    parser.add_argument("--check", action="store_true", help="only say whether the page is up to date")
    if not parser.parse_args().check:
        PAGE.write_text(render(), encoding="utf-8")
        return 0
    if not PAGE.exists() or PAGE.read_text(encoding="utf-8") != render():
        print(f"{PAGE.name} is stale: run `python -m llamamg.hookdocs`", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
