"""The threads that copy. What comes back goes before what is put away, since a client waits for it."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Sequence as Seq

from llamamg.transfer.job import Transfer, Work

log = logging.getLogger(__name__)
PAUSE = 1.0  # of the time a chunk took: memory bandwidth left to the decoders between two chunks


class Workers:
    """`n_threads` threads over two queues. `pause_save` and `pause_load` are parts of a chunk's time to rest after it."""

    def __init__(self, n_threads: int, *, pause_save: float = PAUSE, pause_load: float = PAUSE / 2) -> None:
        self._pause = {True: pause_save, False: pause_load}
        self._queues: dict[bool, deque[tuple[Transfer, Work]]] = {True: deque(), False: deque()}
        self._wake = threading.Condition()
        self._stopped = False
        self._threads = [
            threading.Thread(target=self._run, name=f"llamamg-copy-{i}", daemon=True) for i in range(max(1, n_threads))
        ]
        for thread in self._threads:
            thread.start()

    def add(self, transfer: Transfer, works: Seq[Work]) -> None:
        """Queue works of a transfer, in this order."""
        if not works:
            return
        transfer.opened(works)
        with self._wake:
            self._queues[transfer.to_host].extend((transfer, work) for work in works)
            self._wake.notify(len(works))

    def stop(self) -> None:
        """End the threads after the chunks they copy; what is queued is dropped."""
        with self._wake:
            self._stopped = True
            dropped = [pair for queue in self._queues.values() for pair in queue]
            for queue in self._queues.values():
                queue.clear()
            self._wake.notify_all()
        for transfer, work in dropped:
            transfer.closed(work, 0, RuntimeError("the engine stops"))
        for thread in self._threads:
            thread.join(1.0)

    def _next(self) -> tuple[Transfer, Work] | None:
        with self._wake:
            self._wake.wait_for(lambda: self._stopped or any(self._queues.values()))
            if self._stopped:
                return None
            return (self._queues[False] or self._queues[True]).popleft()

    def _run(self) -> None:
        while (pair := self._next()) is not None:
            transfer, work = pair
            try:
                transfer.closed(work, self._copy(transfer, work))
            except Exception as error:
                log.error("a copy of sequence %d failed: %s", transfer.seq_id, error)
                transfer.closed(work, 0, error)

    def _copy(self, transfer: Transfer, work: Work) -> int:
        """Copy one work; the bytes copied, 0 when it was cut away."""
        pause, limit = self._pause[transfer.to_host], work.end
        transfer.await_rows()
        for chunk in range(work.n_chunks):
            allowed = transfer.enter(work)
            if allowed <= 0:
                return 0
            started = time.perf_counter()
            try:
                work.copy(chunk, allowed)
            finally:
                transfer.leave(allowed)
            limit = min(limit, allowed)
            if pause:
                time.sleep((time.perf_counter() - started) * pause)
        work.finish(limit)
        return work.n_bytes
