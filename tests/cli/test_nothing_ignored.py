"""Every field that an option sets is read by the engine or the server: an option that is parsed and forgotten is a bug."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import llamamg
from llamamg.options.table import CORE

ROOT = Path(llamamg.__file__).parent
READERS = [
    path
    for path in sorted(ROOT.rglob("*.py"))
    if path.parent.name != "options" and path.name not in ("config.py", "memory.py")
]
SOURCE = "\n".join(path.read_text(encoding="utf-8") for path in READERS)
FIELDS = sorted({option.target for option in CORE if option.target and not option.target.startswith("local.")})


@pytest.mark.parametrize("target", FIELDS)
def test_field_is_read(target: str) -> None:
    name = target.rpartition(".")[2]
    assert re.search(rf"\.{name}\b", SOURCE), f"nothing reads {target}"
