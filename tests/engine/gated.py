"""A stand-in for the runner of one context, whose decodes end when the test says so."""

from __future__ import annotations

import threading
from typing import Any

from llamamg.batch import Batch
from llamamg.runner import Done


class Gated:
    """A context whose decode ends when the test says so."""

    n_batch, n_ubatch = 64, 16

    def __init__(self, index: int) -> None:
        self.context, self.gate, self.error = index, threading.Event(), None
        self.closed = self.aborted = False
        self.device, self.waited_on = threading.Event(), None
        self._batch: Any = None
        self.begun_on: threading.Thread | None = None

    def submit(self, batch: Any) -> None:
        self._batch = batch
        assert self.gate.wait(20)
        if self.error is not None:
            raise self.error

    def collect(self) -> Any:
        return Done(self._batch, [], 0.1)

    def synchronize(self) -> None:
        self.waited_on = threading.current_thread()
        assert self.device.wait(20)

    def abort(self) -> None:
        self.aborted = True

    def close(self) -> None:
        self.closed = True


def batch_of(group: int) -> Batch:
    return Batch([], group)
