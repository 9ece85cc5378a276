"""The thread of the disk tier that changes the folder, so that no step of the engine waits for a disk."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable

log = logging.getLogger(__name__)
END_S = 0.6  # what is written by then when the server ends is kept
STOP_S = 0.3  # for what was stopped in the middle to notice

Job = Callable[[], None]
Then = Callable[[Exception | None], None]


class DiskThread:
    """Does one job after the other. `ended` is called when it will touch the folder no more, perhaps after `stop`."""

    def __init__(self, ended: Callable[[], None]) -> None:
        self._ended = ended
        self._jobs: queue.SimpleQueue[tuple[Job, Then] | None] = queue.SimpleQueue()
        self._done: queue.SimpleQueue[Job] = queue.SimpleQueue()
        self.n_pending = 0  # jobs whose end was not taken note of
        self.is_stopping = False  # long jobs are to end
        self._thread = threading.Thread(target=self._run, name="llamamg-disk", daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def queue(self, job: Job, then: Then = lambda error: None) -> None:
        """Do `job` on the thread, and `then` in a `drain` after that, with what went wrong."""
        self.n_pending += 1
        self._jobs.put((job, then))

    def drain(self) -> None:
        """Take note of what was done, on the caller's thread."""
        while True:
            try:
                end = self._done.get_nowait()
            except queue.Empty:
                return
            self.n_pending -= 1
            end()

    def stop(self) -> None:
        """Do what is queued for a moment longer, then nothing that takes long. The thread may outlive this."""
        if self._thread.ident is None:
            self._ended()
            return
        self._jobs.put(None)
        self._thread.join(END_S)
        self.is_stopping = True
        self._thread.join(STOP_S)
        self.drain()

    def join(self, timeout_s: float) -> bool:
        """Whether it has ended by then."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            while (work := self._jobs.get()) is not None:
                job, then = work
                self._done.put(_end(then, _error_of(job)))
        finally:
            self._ended()


def _error_of(job: Job) -> Exception | None:
    try:
        job()
    except Exception as error:
        return error
    return None


def _end(then: Then, error: Exception | None) -> Job:
    return lambda: then(error)
