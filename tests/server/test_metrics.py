"""What /metrics says of the states that slots keep."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np

from llamamg.kept import KeptState
from llamamg.server.metrics import EngineCollector
from llamamg.slot import Checkpoint


def test_only_what_is_in_main_memory_takes_main_memory() -> None:
    class Unsettled:
        is_over = False

        def wait(self) -> None:
            raise AssertionError("a scrape does not wait for a copy")

    device: Any = object()
    copied, copying, on_device = (
        KeptState(10, device, np.zeros(10, np.uint8)),
        KeptState(20, device),
        KeptState(40, device),
    )
    copying.copying = Unsettled()  # type: ignore[assignment]
    held = [np.zeros(100, np.uint8), copied, copying, on_device]
    checkpoints = [Checkpoint(1, 0, 0, 0, data) for data in held]
    engine: Any = SimpleNamespace(slots=[SimpleNamespace(checkpoints=checkpoints), SimpleNamespace(checkpoints=[])])
    found = {metric.name: metric.samples[0].value for metric in EngineCollector(engine)._checkpoints()}
    assert found == {"llamamg:checkpoints": 4, "llamamg:checkpoint_bytes": 110, "llamamg:checkpoint_largest_bytes": 100}
