"""Plugins made on the spot."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import pytest

from llamamg.plugins import testing

if TYPE_CHECKING:
    from cache_folder import Folder
    from cache_server import Server

sys.path.insert(0, str(Path(__file__).parent))  # modules beside the tests


@pytest.fixture
def make() -> ModuleType:
    """Short ways to make plugin classes and sets of them: `make.on(make.plugin("a", {"idle": function}))`."""
    return testing


@pytest.fixture
def serve() -> Iterator[Callable[..., Server]]:
    """Servers with async-cache over a stand-in model, stopped at the end."""
    from cache_server import Server

    made: list[Server] = []

    def make(*args: Any, **options: Any) -> Server:
        made.append(Server(*args, **options))
        return made[-1]

    yield make
    for server in made:
        server.stop()


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Folder]:
    """The disk tier of async-cache in tmp_path/disk, without an engine."""
    from cache_folder import Folder

    made = Folder(tmp_path / "disk")
    yield made
    made.disk.stop()
