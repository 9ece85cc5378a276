"""Workers, and a copier by cupy over its stand-in."""

from __future__ import annotations

from typing import Any

import pytest

from llamamg.transfer import Workers
from llamamg.transfer.cuda import CudaCopier

from .cuda_doubles import DeviceCells, FakeCupy


@pytest.fixture
def workers() -> Any:
    made = Workers(2, pause_save=0.0, pause_load=0.0)
    yield made
    made.stop()


@pytest.fixture
def device() -> tuple[DeviceCells, FakeCupy, CudaCopier]:
    cells, cupy = DeviceCells(), FakeCupy()
    return cells, cupy, CudaCopier(cells, cupy)
