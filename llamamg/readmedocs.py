"""The parts of README.md that come from the code: `python -m llamamg.readmedocs` writes them, `--check` says if they are stale."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path

from llamamg.plugins import discover

PAGE = Path(__file__).resolve().parent.parent / "README.md"


def plugin_table() -> str:
    """The shipped plugins with what they help and hurt."""
    lines = ["| plugin | what it does | helps | hurts |", "| --- | --- | --- | --- |"]
    for name, entry in sorted(discover().items()):
        declaration = entry.declaration
        if entry.shipped and declaration is not None:
            link = f"[`{name}`](docs/plugins/{name}.md)"
            lines.append(f"| {link} | {declaration.summary} | {declaration.helps} | {declaration.hurts} |")
    return "\n".join(lines)


def results_table() -> str:
    """What was measured, from the files in benches/results."""
    return str(import_module("llamamg_benches.results_table").results_table())


PARTS: dict[str, Callable[[], str]] = {"plugins": plugin_table, "results": results_table}


def render(page: str) -> str:
    """The page with its generated parts made anew. Raises ValueError when a marker is missing."""
    for name, make in PARTS.items():
        pattern = re.compile(rf"(<!-- {name} -->\n).*?(<!-- /{name} -->)", re.DOTALL)
        if not pattern.search(page):
            raise ValueError(f"README.md has no <!-- {name} --> … <!-- /{name} --> markers")
        text = make()
        page = pattern.sub(lambda m, text=text: f"{m[1]}{text}\n{m[2]}", page)  # type: ignore[misc]
    return page


def main() -> int:
    """Write or check the page; 1 if it is stale."""
    parser = argparse.ArgumentParser(
        prog="python -m llamamg.readmedocs", description="write the generated parts of README.md"
    )
    parser.add_argument("--check", action="store_true", help="only say whether the page is up to date")
    arguments = parser.parse_args()
    page = PAGE.read_text(encoding="utf-8")
    if not arguments.check:
        PAGE.write_text(render(page), encoding="utf-8")
        return 0
    if render(page) != page:
        print("README.md is stale: run `python -m llamamg.readmedocs`", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
