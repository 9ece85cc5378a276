"""Several contexts of one model, each with a thread of its own, so that their batches are in flight together.

libllama's calls give the interpreter lock back, so the threads compute at the same time: on a layer split one context
keeps the first device busy while another is at the second one.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Any

from llamamg.batch import Batch
from llamamg.errors import BatchError
from llamamg.runner import Done, ModelRunner, Runner

log = logging.getLogger(__name__)
Task = Callable[[], Any]
N_TOKENS_ALONE = 64  # a longer batch has a thread also when it is alone: who comes meanwhile need not wait for it


class Stalled(RuntimeError):
    """Batches were in flight and nothing ended for a long time."""


@dataclass(slots=True)
class _JobDone:
    contexts: tuple[int, ...]
    finished: Callable[[Any, Any], None]
    result: Any = None
    error: BaseException | None = None


class _Worker:
    """The thread of one context. `idle` is set while nothing of it computes, also when the result is not collected yet."""

    def __init__(self, index: int, results: SimpleQueue[Any]) -> None:
        self.idle = threading.Event()
        self.idle.set()
        self._tasks: SimpleQueue[Task | None] = SimpleQueue()
        self._results = results
        self.doing = ""
        self.since = 0.0
        self.thread = threading.Thread(target=self._work, name=f"llamamg-context-{index}", daemon=True)
        self.thread.start()

    def start(self, task: Task, doing: str) -> None:
        """Hand over a task; it must not raise."""
        self.doing, self.since = doing, time.monotonic()
        self.idle.clear()
        self._tasks.put(task)

    def stop(self) -> None:
        """Let the thread end after its task."""
        self._tasks.put(None)

    def _work(self) -> None:
        while (task := self._tasks.get()) is not None:
            result = task()
            self.idle.set()
            self._results.put(result)


class ContextPool(Runner):
    """Hands each batch to the thread of its context and collects what ends first.

    A sequence has one batch in flight at most, so what ends first is in order for every sequence. `stall_s`: when nothing
    ends for so long, `collect` raises Stalled. `is_async`: llama_decode returns before the devices are done, so a short batch
    with no other one in flight needs no thread; waking one costs it the interpreter's lock twice in every step.
    """

    def __init__(self, runners: Seq[ModelRunner], stall_s: float = 0.0, is_async: bool = False) -> None:
        self.runners = tuple(runners)
        self.n_contexts = len(runners)
        self.n_batch = min(runner.n_batch for runner in runners)
        self.n_ubatch = max(runner.n_ubatch for runner in runners)
        self._stall_s = stall_s
        self._results: SimpleQueue[Any] = SimpleQueue()
        self._workers = [_Worker(i, self._results) for i in range(self.n_contexts)]
        self._busy: list[_Worker | None] = [None] * self.n_contexts  # who computes with a context
        self._woken = False
        self._n_in_flight = 0
        self._is_stuck = False
        self._is_async = is_async
        self._held: Batch | None = None  # alone so far, and not begun
        self._alone: Batch | None = None  # begun on this thread
        self.n_alone = 0  # such batches so far

    @property
    def context(self) -> Any:
        """The first context: spare sequences are there."""
        return self.runners[0].context

    @property
    def n_in_flight(self) -> int:
        return self._n_in_flight

    def is_free(self, context: int) -> bool:
        return self._busy[context] is None

    def submit(self, batch: Batch) -> None:
        self._begin_held()
        if self._is_async and not self._n_in_flight and batch.n_tokens <= N_TOKENS_ALONE:
            self._reserve((batch.group,))
            self._held = batch
        else:
            self._take((batch.group,), *self._task(batch))

    def start(self) -> None:
        if self._held is None:
            return
        batch, self._held = self._held, None
        try:
            self.runners[batch.group].submit(batch)
        except Exception as error:
            self._results.put((batch, error))
        else:
            self._alone = batch
            self.n_alone += 1

    def _begin_held(self) -> None:
        """On its own thread after all: it is not alone, or somebody waits for its end."""
        if self._held is not None:
            batch, self._held = self._held, None
            self._workers[batch.group].start(*self._task(batch))

    def _task(self, batch: Batch) -> tuple[Task, str]:
        runner = self.runners[batch.group]
        return lambda: _compute(runner, batch), f"a batch of {batch.n_tokens} tokens"

    def run(self, contexts: tuple[int, ...], job: Task, finished: Callable[[Any, Any], None]) -> None:
        self._begin_held()
        done = _JobDone(contexts, finished)

        def task() -> _JobDone:
            try:
                done.result = job()
            except Exception as error:
                done.error = error
            return done

        self._take(contexts, task, "a move")

    def _take(self, contexts: tuple[int, ...], task: Task, doing: str) -> None:
        self._reserve(contexts).start(task, doing)

    def _reserve(self, contexts: tuple[int, ...]) -> _Worker:
        worker = self._workers[contexts[-1]]
        for context in contexts:
            if self._busy[context] is not None:
                raise RuntimeError(f"context {context} is busy: nothing may be submitted to it")
        for context in contexts:
            self._busy[context] = worker
        self._n_in_flight += 1
        return worker

    def collect(self) -> Done | None:
        if not self._n_in_flight:
            return None
        item = self._next()
        if item is None:
            self._woken = False
            return None
        self._n_in_flight -= 1
        if isinstance(item, _JobDone):
            for context in item.contexts:
                self._busy[context] = None
            item.finished(item.result, item.error)
            return None
        batch, result = item
        self._busy[batch.group] = None
        if isinstance(result, BatchError):
            return Done(batch, [], 0.0, result)
        if isinstance(result, BaseException):
            raise result
        done: Done = result
        return done

    def _next(self) -> Any:
        self.start()
        if self._alone is not None:
            batch, self._alone = self._alone, None
            return _finish(self.runners[batch.group], batch)
        if not self._stall_s:
            return self._results.get()
        try:
            return self._results.get(timeout=self._stall_s)
        except Empty:
            self._is_stuck = True
            self.abort()
            raise Stalled(self._report()) from None

    def _report(self) -> str:
        now = time.monotonic()
        stuck = [
            f"context {i}: {worker.doing} for {now - worker.since:.0f} s"
            for i, worker in enumerate(self._workers)
            if not worker.idle.is_set()
        ]
        return f"nothing ended for {self._stall_s:g} s ({'; '.join(stuck) or 'no thread computes'})"

    def settle(self) -> None:
        for context in range(self.n_contexts):
            self.settle_one(context)

    def settle_one(self, context: int) -> None:
        """Wait until one context does not compute; batches that are through stay to be collected."""
        if self._held is not None and self._held.group == context:
            self._begin_held()
        worker = self._busy[context]
        if self._alone is not None and self._alone.group == context:
            self.runners[context].synchronize()
        elif worker is not None and not worker.idle.is_set():
            if self._is_stuck:
                raise Stalled(f"context {context} still computes, so its memory cannot be changed")
            worker.idle.wait()

    def wake(self) -> None:
        if not self._woken:
            self._woken = True
            self._results.put(None)

    def abort(self) -> None:
        self.runners[0].abort()

    def close(self) -> None:
        for worker in self._workers:
            worker.stop()
        for worker in self._workers:
            worker.thread.join(1.0 if self._is_stuck else None)
        for worker, runner in zip(self._workers, self.runners, strict=True):
            if worker.thread.is_alive():
                log.error("a context still computes and is not freed")
            else:
                runner.close()


def _compute(runner: ModelRunner, batch: Batch) -> tuple[Batch, Any]:
    """On the context's thread: the batch and its result, which may be an exception."""
    try:
        runner.submit(batch)
    except Exception as error:
        return batch, error
    return _finish(runner, batch)


def _finish(runner: ModelRunner, batch: Batch) -> tuple[Batch, Any]:
    """Wait for a submitted batch: it and its result."""
    try:
        done = runner.collect()
        if batch.waits:
            # Else the engine's thread would wait for it, and with it everybody who decodes in another context.
            runner.synchronize()
        return batch, done
    except Exception as error:
        return batch, error
