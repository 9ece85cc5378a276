"""Command lines parsed as `llamamg serve` does, without starting anything."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from llamamg.config import Config
from llamamg.options.declared import declared_options
from llamamg.options.resolve import parse
from llamamg.options.table import Table
from llamamg.plugins import Found, discover

Start = Callable[..., Config]


@pytest.fixture(scope="session")
def plugins() -> Mapping[str, Found]:
    """The shipped plugins."""
    return {name: entry for name, entry in discover().items() if entry.shipped}


@pytest.fixture(scope="session")
def table(plugins: Mapping[str, Found]) -> Table:
    """All options of a start."""
    return Table(declared_options(plugins))


@pytest.fixture
def start(table: Table, plugins: Mapping[str, Found], tmp_path: Path) -> Start:
    """`start("-c", "8", env={…}, file="[serve]…")`: the Config of a command line, with a model already named."""

    def run(
        *arguments: str, env: Mapping[str, str] | None = None, file: str | None = None, model: bool = True
    ) -> Config:
        words = list(arguments)
        if model and not {"-m", "--model"} & set(words):
            words = ["-m", "some.gguf", *words]
        if file is not None:
            path = tmp_path / "llamamg.toml"
            path.write_text(file, encoding="utf-8")
            words = ["--config", str(path), *words]
        parsed = parse(words, env or {}, table, plugins)
        assert parsed.config is not None
        run.notes, run.json_schema = parsed.notes, parsed.json_schema  # type: ignore[attr-defined]
        return parsed.config

    return run
