"""A server around a fake engine."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from harness import Running, running


@pytest.fixture
def server() -> Iterator[Running]:
    """Two slots of 512 tokens that say "hello"."""
    with running() as found:
        yield found
