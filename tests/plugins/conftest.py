"""Plugins made on the spot."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType

import pytest

from llamamg.plugins import testing

sys.path.insert(0, str(Path(__file__).parent))  # modules beside the tests


@pytest.fixture
def make() -> ModuleType:
    """Short ways to make plugin classes and sets of them: `make.on(make.plugin("a", {"idle": function}))`."""
    return testing
