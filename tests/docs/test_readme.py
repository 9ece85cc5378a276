"""README's generated parts, and the files it links to."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from llamamg import cli, readmedocs

ROOT = Path(__file__).resolve().parents[2]


def test_generated_parts_are_fresh() -> None:
    page = readmedocs.PAGE.read_text(encoding="utf-8")
    assert readmedocs.render(page) == page, "run `python -m llamamg.readmedocs`"


def test_every_command_is_named() -> None:
    page = readmedocs.PAGE.read_text(encoding="utf-8")
    assert [name for name in (cli.SERVE[0], *cli.COMMANDS) if f"| `llamamg {name}" not in page] == []


def test_a_page_without_markers_is_refused() -> None:
    with pytest.raises(ValueError, match="markers"):
        readmedocs.render("# nothing here\n")


@pytest.mark.parametrize("page", ["README.md", *(str(p.relative_to(ROOT)) for p in (ROOT / "docs").rglob("*.md"))])
def test_links_lead_somewhere(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    for target in re.findall(r"\]\(([^)#:]+)\)", text):
        assert ((ROOT / page).parent / target).exists(), f"{page} links to {target}"
