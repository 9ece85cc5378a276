"""A full run of Python's collector over everything that is imported takes longer than a decode step: it has nothing to look at."""

from __future__ import annotations

import gc
from types import SimpleNamespace
from typing import Any

import pytest

from llamamg import library, loading
from llamamg.server.run import Runner


@pytest.fixture(autouse=True)
def _thaw() -> Any:
    yield
    gc.unfreeze()


def test_what_exists_is_not_looked_at_again() -> None:
    n_before = len(gc.get_objects())
    loading.spare_collector()
    assert len(gc.get_objects()) < 0.05 * n_before


def test_the_server_spares_the_collector_once_the_model_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    attached: list[Any] = []
    frozen_at_load: list[int] = []

    def load(*_: Any) -> str:
        frozen_at_load.append(gc.get_freeze_count())
        return "engine"

    monkeypatch.setattr(loading, "load", load)
    monkeypatch.setattr(library, "load", lambda build: SimpleNamespace(build_info={}))
    runner: Any = Runner.__new__(Runner)
    runner.config, runner.plugins = SimpleNamespace(build=None), None
    runner._load(SimpleNamespace(call_soon_threadsafe=lambda *call: attached.append((call, gc.get_freeze_count()))))
    assert frozen_at_load == [0]
    ((call, n_frozen),) = attached
    assert call[1:] == ("engine", {})
    assert n_frozen > 1000
