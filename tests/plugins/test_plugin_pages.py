"""Every shipped plugin has a page under its own name that knows all its options."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from llamamg.plugins import PluginOption, discover, plugin_options

PAGES = Path(__file__).resolve().parents[2] / "docs" / "plugins"
SHIPPED = sorted(name for name, found in discover().items() if found.shipped)


def test_there_are_no_pages_of_other_plugins() -> None:
    assert sorted(page.stem for page in PAGES.glob("*.md")) == SHIPPED


@pytest.mark.parametrize("name", SHIPPED)
def test_the_page_matches_the_declaration(name: str) -> None:
    page = (PAGES / f"{name}.md").read_text(encoding="utf-8")
    declaration = discover()[name].declaration
    assert declaration is not None
    assert page.startswith(f"# {name}\n")
    assert re.search(rf"## Effect counter\n\n`{declaration.effect}`", page)
    assert re.search(rf"## Guard\n\n`{re.escape(str(declaration.guard))}`", page)
    for flag in (*(declaration.cli_switches or ()), *((declaration.cli_env,) if declaration.cli_env else ())):
        assert flag in page


OPTIONS = [option for option in plugin_options() if option.plugin in SHIPPED]


@pytest.mark.parametrize("option", OPTIONS, ids=lambda option: option.flag)
def test_the_page_has_each_option_with_its_default_and_other_names(option: PluginOption) -> None:
    page = (PAGES / f"{option.plugin}.md").read_text(encoding="utf-8")
    (row,) = [line for line in page.splitlines() if line.startswith(f"| `{option.name}` |")]
    cells = [cell.strip() for cell in row.strip("|").split("|")]
    others = ", ".join(f"`{name}`" for name in (*option.aliases, *option.env))
    assert cells[1] == others
    assert cells[2] == str(option.default)


def test_files_are_named_after_their_plugins() -> None:
    for name in SHIPPED:
        cls = discover()[name].cls
        assert cls is not None
        assert cls.__module__ == f"llamamg_plugins.{name.replace('-', '_')}"
