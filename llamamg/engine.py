"""The loop. One thread owns the context and everything that changes it; the rest of the process talks to it by messages."""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

from llamamg.admission import Waiting
from llamamg.batch import Batch
from llamamg.blocks import Cells
from llamamg.config import Config
from llamamg.errors import BatchError, KVFull
from llamamg.hookcalls import HookCalls
from llamamg.kvcache import KVCache
from llamamg.model import ModelInfo
from llamamg.plugins import PluginError, PluginSet
from llamamg.recovery import Recovery
from llamamg.request import Event, Failed, Request
from llamamg.runner import Done, Runner
from llamamg.runner_pool import Stalled
from llamamg.sampler import Sampler, SamplerError
from llamamg.scheduler import Scheduler
from llamamg.shadow import Shadow
from llamamg.slot import Slot, SlotView
from llamamg.stats import Stats
from llamamg.vocab import Vocabulary

T = TypeVar("T")
Deliver = Callable[[list[tuple[int, Event]]], None]
IDLE_WAIT_S = 5.0
DEFERRED_WAIT_S = 0.002  # nothing runs and a plugin holds a request or a prompt back: how soon it is asked again
ONLY = (0,)
STOPPING = Failed(503, "unavailable_error", "the server is shutting down")


class Engine:
    """Serves requests with a model. Make one with `llamamg.loading.load`; set `deliver` before `start`.

    `submit`, `cancel`, `call`, `slot_views` and the read-only attributes may be used from any thread.
    """

    def __init__(
        self,
        config: Config,
        *,
        scheduler: Scheduler,
        runner: Runner,
        vocab: Vocabulary,
        model: ModelInfo,
        calls: HookCalls,
        plugins: PluginSet,
        n_ctx_slot: int,
        new_sampler: Callable[[Request], Sampler],
        view: Callable[[Slot], SlotView],
        close: Callable[[], None] = lambda: None,
    ) -> None:
        self.config, self.vocab, self.model, self.plugins = config, vocab, model, plugins
        self.scheduler, self.runner, self.calls = scheduler, runner, calls
        self.n_ctx_slot = n_ctx_slot
        self.slots: list[Slot] = scheduler.slots
        self.stats: Stats = scheduler.stats
        self.deliver: Deliver = lambda pairs: None
        self.shadow: Shadow | None = None  # replays requests while nothing runs
        self.cells: Cells | None = None  # what sequences keep in memory, for copies beside decodes
        self.error: BaseException | None = None  # what ended the loop, if it did not end by `stop`
        self._new_sampler, self._view, self._close = new_sampler, view, close
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._pending: deque[Batch] = deque()  # batches of a plan, or of a retry, that are not submitted yet
        self._n_flights_max = 1
        self._recovery = Recovery(scheduler, calls, self._pending)
        self._thread = threading.Thread(target=self._run, name="llamamg-engine", daemon=True)
        self._stop_at: float | None = None
        self._ended = False
        self._post_lock = threading.Lock()  # nothing gets into the inbox once nobody will look there

    # -- from any thread

    def start(self) -> None:
        """Start the loop."""
        self._thread.start()

    def stop(self, timeout_s: float = 5.0) -> None:
        """Turn queued requests away, let running ones end or cut them after `timeout_s`, and free the context."""
        if self._thread.ident is None:
            self._end()
            return
        self._post(lambda: self._begin_stop(time.monotonic() + timeout_s))
        self._thread.join(timeout_s + 0.2)
        if self._thread.is_alive():
            self.runner.abort()  # a decode that takes longer than the time given
            self._thread.join(5.0)

    def submit(self, request: Request) -> None:
        """Queue a request; its events come through `deliver`. The sampler is built here, on the caller's thread.

        Once the engine has ended, the request fails at once: that event is delivered on the caller's thread.
        """
        failed = self._refuse(request)
        if failed is None:
            try:
                waiting = Waiting(request, self._new_sampler(request))
                if not self._post(lambda: self._arrive(waiting)):
                    waiting.sampler.close()
                    self.deliver([(request.id, STOPPING)])
                return
            except SamplerError as error:
                failed = Failed(400, "invalid_request_error", str(error))
        refusal = failed
        if not self._post(lambda: self.scheduler.outbox.append((request.id, refusal))):
            self.deliver([(request.id, refusal)])

    def cancel(self, request_id: int) -> None:
        """Forget a request, queued or running; no event of it follows the next step."""
        self._post(lambda: self.scheduler.cancel(request_id))

    def call(self, function: Callable[[Engine], T]) -> Future[T]:
        """Run `function` on the engine thread between two steps."""
        future: Future[T] = Future()

        def run() -> None:
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(function(self))
                except BaseException as error:
                    future.set_exception(error)

        if not self._post(run):
            future.set_exception(RuntimeError("the engine has stopped"))
        return future

    def slot_views(self) -> list[SlotView]:
        """The slots as /slots shows them: a look without a lock, each field is right at some moment."""
        return [self._view(slot) for slot in self.slots]

    @property
    def kv(self) -> KVCache:
        """The sequence memory; only on the engine thread."""
        return self.scheduler.kv

    @property
    def n_slots(self) -> int:
        """Slots."""
        return len(self.slots)

    def queue_len(self) -> int:
        """Requests waiting for a slot."""
        return self.scheduler.n_waiting

    @property
    def alive(self) -> bool:
        """Whether the loop runs."""
        return self._thread.is_alive()

    def _post(self, message: Callable[[], None]) -> bool:
        with self._post_lock:
            if not self._ended:
                self._inbox.put(message)
                self.runner.wake()
            return not self._ended

    def _refuse(self, request: Request) -> Failed | None:
        n = len(request.prompt)
        if n >= self.n_ctx_slot:
            message = (
                f"request ({n} tokens) exceeds the available context size ({self.n_ctx_slot} tokens), try increasing it"
            )
            extra = {"n_prompt_tokens": n, "n_ctx": self.n_ctx_slot}
            return Failed(400, "exceed_context_size_error", message, extra)
        if n and (int(request.prompt.min()) < 0 or int(request.prompt.max()) >= self.vocab.n_vocab):
            return Failed(400, "invalid_request_error", "Prompt contains invalid tokens")
        return None

    # -- on the engine thread

    def step(self) -> bool:
        """Admit, plan, keep the pipeline full, collect one batch, emit its tokens. False when there was nothing to do.

        With several contexts its tokens are emitted by the next step, once that has submitted what follows them.
        """
        self._drain()
        if free := self._free():
            self._pending.extend(self.scheduler.plan(free).batches)
        worked = bool(self._pending)
        self._fill()
        self.scheduler.make_room()
        self.runner.start()
        worked = worked or self.runner.n_in_flight > 0
        # A context's own thread needs the interpreter's lock to begin, and so does whoever writes answers: it goes first.
        is_late = self.runner.n_contexts > 1
        emitted = is_late and self._emit()
        done = self.runner.collect()
        if done is not None:
            worked = True
            self._take(done)
        if not is_late:
            emitted = self._emit()
        return emitted or worked

    def _free(self) -> tuple[int, ...]:
        """The contexts to plan for: nothing of them is in flight, pending or about to move."""
        if self.runner.n_contexts == 1:
            return () if self._pending else ONLY
        self._n_flights_max = self._limit() if self.calls.hooks.batches_in_flight else 1
        if self._n_flights_max == 1 and (self._pending or self.runner.n_in_flight):
            return ()
        pending = {batch.group for batch in self._pending}
        free = [i for i in range(self.runner.n_contexts) if i not in pending and self.runner.is_free(i)]
        return self.scheduler.moves.start(free)

    def _limit(self) -> int:
        return int(self.calls.first("batches_in_flight", self.scheduler.state, check=_not_a_count) or 1)

    def _fill(self) -> None:
        """Submit what may be in flight."""
        waiting: list[Batch] = []
        while self._pending and self.runner.n_in_flight < self._n_flights_max:
            batch = self._pending.popleft()
            if self.runner.is_free(batch.group):
                self._submit(batch)
            else:
                waiting.append(batch)
        self._pending.extendleft(reversed(waiting))

    def _take(self, done: Done) -> None:
        """A batch came back."""
        if done.error is not None:
            self.scheduler.returned(done.batch)
            self._recovery.recover(done.batch, done.error)
            return
        self._recovery.succeeded(done.batch)
        self.scheduler.commit(done)
        if self.calls.hooks.batch_done:
            self.calls.each("batch_done", done.batch, done.elapsed_s)

    def _submit(self, batch: Batch) -> None:
        rows = self._recovery.alive(batch)
        if not rows:
            return
        try:
            self.runner.submit(batch)
        except BatchError as error:
            if self.scheduler.make_room() and isinstance(error, KVFull):
                self._pending.appendleft(batch)  # in a unified cache that was the room it lacked
            else:
                self._recovery.recover(batch, error)
            return
        if not self._pending or self.runner.n_in_flight >= self._n_flights_max:
            self.runner.start()  # what is done now, the device computes meanwhile
        self.scheduler.make_room()
        if self.calls.hooks.batch_submitted:
            self.calls.each("batch_submitted", batch)

    def _drain(self) -> None:
        while not self._inbox.empty():
            self._inbox.get()()

    def _emit(self) -> bool:
        outbox = self.scheduler.outbox
        if not outbox:
            return False
        pairs = outbox.copy()
        outbox.clear()
        self.deliver(pairs)
        return True

    def _wait_s(self) -> float:
        soon = self.scheduler.n_waiting or self.scheduler.running or self._stop_at is not None
        return DEFERRED_WAIT_S if soon else IDLE_WAIT_S

    def _idle(self) -> None:
        """Nothing runs: let plugins tidy up, replay what is to be replayed, then sleep until somebody wants something."""
        if self.calls.hooks.idle and any(self.calls.each("idle", self.scheduler.state)):
            return
        is_free = not self.scheduler.n_waiting and not self.scheduler.running
        if self.shadow is not None and is_free and self.shadow.step():
            return
        try:
            self._inbox.get(timeout=self._wait_s())()
        except queue.Empty:
            return

    def _run(self) -> None:
        try:
            self.plugins.start(self)
            while not self._is_over():
                if not self.step():
                    self._idle()
        except BaseException as error:
            self.error = error
            self._fail_all(Failed(500, "server_error", f"the engine stopped: {error!r}"))
            if not isinstance(error, PluginError):  # a sentence for whoever started it, no bug
                raise
        finally:
            self.plugins.stop()
            self._end()

    def _end(self) -> None:
        with self._post_lock:
            first, self._ended = not self._ended, True
        if first:
            self._fail_all(STOPPING)  # what came in after the last step
            self.runner.close()
            self.scheduler.close()
            self._close()

    def _arrive(self, waiting: Waiting) -> None:
        if self._stop_at is None and not self._ended:
            self.scheduler.submit(waiting)
        else:
            waiting.sampler.close()
            self.scheduler.outbox.append((waiting.request.id, STOPPING))

    def _begin_stop(self, deadline: float) -> None:
        self._stop_at = deadline
        self.scheduler.fail_waiting(STOPPING)

    def _is_over(self) -> bool:
        if self._stop_at is None:
            return False
        if self.scheduler.running and time.monotonic() < self._stop_at:
            return False
        self._fail_all(STOPPING)
        return True

    def _fail_all(self, failed: Failed) -> None:
        self._drain()
        self.scheduler.fail_waiting(failed)
        for sequence in self.scheduler.running:
            with contextlib.suppress(Stalled):  # what cannot be cleared will never be used again
                self.scheduler.fail(sequence, failed)
        self._emit()


def _not_a_count(limit: int) -> str | None:
    return None if isinstance(limit, int) and limit > 0 else f"{limit!r} is not a number of batches"
