"""Plugins made on the spot."""

from __future__ import annotations

from types import ModuleType

import pytest

from llamamg.plugins import testing


@pytest.fixture
def make() -> ModuleType:
    """Short ways to make plugin classes and sets of them: `make.on(make.plugin("a", {"idle": function}))`."""
    return testing
