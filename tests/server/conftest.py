"""A server around a fake engine."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

# The modules beside the tests are imported by name, here and in the parse process that a test starts.
sys.path.insert(0, str(Path(__file__).parent))

from harness import Running, running


@pytest.fixture
def server() -> Iterator[Running]:
    """Two slots of 512 tokens that say "hello"."""
    with running() as found:
        yield found
