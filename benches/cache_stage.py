"""An engine with the plugin async-cache in which sessions decode while another one is saved and restored."""

from __future__ import annotations

import itertools
import time
from typing import Any

import numpy as np

from llamamg.engine import Engine
from llamamg.request import Delta, Event, Failed, Finished, Request, SamplingParams, Started
from llamamg.slot import Slot

from .errors import BenchError

STUCK_S = 600.0
FOREVER = 1 << 20


class CacheStage:
    """The engine is stepped by this thread. Slots 0 to n - 1 decode; the session is in slot n."""

    def __init__(self, engine: Engine, n_decoders: int, depth: int, n_tokens: int) -> None:
        engine.plugins.start(engine)
        if "async-cache" not in engine.plugins.enabled():
            raise BenchError("the plugin async-cache is off: " + _why(engine))
        self.engine, self._n_decoders, self._depth, self._n_tokens = engine, n_decoders, depth, n_tokens
        self.cache: Any = engine.plugins._members["async-cache"].instance
        if not self.cache.is_copying:
            raise BenchError(f"async-cache {self.cache.note}")
        self._events: dict[int, list[tuple[float, Event]]] = {}
        self._prompts: dict[tuple[int, int, int], Any] = {}
        engine.deliver = self._deliver

    @property
    def way(self) -> str:
        """How copies are made."""
        return str(self.cache.way)

    @property
    def slot(self) -> Slot:
        """The session's."""
        return self.engine.slots[self._n_decoders]

    def _deliver(self, pairs: list[tuple[int, Event]]) -> None:
        now = time.perf_counter()
        for id_, event in pairs:
            if isinstance(event, Failed):
                raise BenchError(f"a request failed: {event.message}")
            self._events.setdefault(id_, []).append((now, event))

    def session(self) -> Request:
        """The long prompt, for one token."""
        return self._request(self._n_tokens, 1, seed=1, n_predict=1, id_slot=self._n_decoders)

    def _request(self, n: int, n_min: int, *, seed: int, n_predict: int, id_slot: int) -> Request:
        top = min(5000, self.engine.vocab.n_vocab)
        key = (n, n_min, seed)
        if key not in self._prompts:  # made once, since a client would not make it on this thread
            self._prompts[key] = np.random.default_rng(seed).integers(n_min, top, n, dtype=np.int32)
        prompt = self._prompts[key]
        sampling = SamplingParams(temperature=0.0, ignore_eos=True)
        return Request(prompt, sampling, n_predict=n_predict, id_slot=id_slot, stream=True)

    def _until(self, condition: Any) -> None:
        until = time.perf_counter() + STUCK_S
        while not condition():
            if time.perf_counter() > until:
                raise BenchError("the engine does not get on")
            if not self.engine.step():
                time.sleep(0.0005)

    def _is_over(self, request: Request) -> bool:
        return any(isinstance(event, Finished) for _, event in self._events.get(request.id, ()))

    def _idle(self) -> bool:
        copying = self.slot.copying
        return copying is None or copying.is_over

    # -- with nobody there

    def first_token(self, request: Request) -> dict[str, Any]:
        """Time to the answer of one token, and how many tokens were not computed."""
        started = time.perf_counter()
        self.engine.submit(request)
        self._until(lambda: self._is_over(request))
        took = next(t for t, event in self._events[request.id] if isinstance(event, Finished)) - started
        n_cached = next(event.n_cached for _, event in self._events[request.id] if isinstance(event, Started))
        self._until(self._idle)
        return {"ttft_s": took, "n_cached": n_cached}

    def wait_for_disk(self) -> None:
        """Until the session is written."""
        self._until(lambda: self.cache.settled())

    def n_session_bytes(self) -> int:
        """Rows of the session, and its state."""
        rows = len(self.slot.tokens) * self.engine.cells.layout.n_row_bytes  # type: ignore[union-attr]
        state = self.engine.kv.size(self.slot.seq_id, 1) if self.engine.kv.needs_checkpoints else 0
        return int(rows + state)

    def save_alone(self) -> float:
        """Seconds until all of the session, its state too, is in host memory."""
        self._until(lambda: self.cache.settled())
        self.cache.forget()
        started = time.perf_counter()
        self.cache.save(self.slot)
        while not self.cache.settled():
            if time.perf_counter() - started > STUCK_S:
                raise BenchError("the session was not saved")
            time.sleep(0.0001)
        took = time.perf_counter() - started
        if self.cache.n_bytes < len(self.slot.tokens) * self.engine.cells.layout.n_row_bytes:  # type: ignore[union-attr]
            raise BenchError("the session was not saved")
        return took

    def restore_alone(self) -> float:
        """Seconds from the request to its first batch, of the few tokens that are left to be computed."""
        self.empty_slot()
        request = self.session()
        self.engine.submit(request)
        self._until(lambda: self._is_over(request))
        self._check(request)
        self._until(self._idle)
        return self._waited(request)

    def empty_slot(self) -> None:
        """The session's slot holds nothing."""
        self._until(lambda: self.cache.settled())
        self.engine.scheduler.clear(self.slot)

    def _waited(self, request: Request) -> float:
        """Seconds from the making of a request that is over to its first batch."""
        finished = next(event for _, event in self._events[request.id] if isinstance(event, Finished))
        return finished.timings.queue_ms / 1e3

    def _check(self, request: Request) -> None:
        n_cached = next(event.n_cached for _, event in self._events[request.id] if isinstance(event, Started))
        if n_cached < self._n_tokens - 600:
            raise BenchError(f"only {n_cached} of {self._n_tokens} tokens were restored")

    # -- beside decoders

    def begin_decoding(self) -> None:
        """From here on the other slots generate without end."""
        requests = [
            self._request(self._depth, 1, seed=10 + i, n_predict=FOREVER, id_slot=i) for i in range(self._n_decoders)
        ]
        for request in requests:
            self.engine.submit(request)
        self._decoder = requests[0]
        self._until(lambda: all(any(isinstance(e, Delta) for _, e in self._events.get(r.id, ())) for r in requests))
        self.steps(8)

    def _stamps(self) -> list[float]:
        return [t for t, event in self._events[self._decoder.id] if isinstance(event, Delta)]

    def steps(self, n: int) -> list[float]:
        """Gaps of `n` tokens of a decoder, in seconds."""
        begin = len(self._stamps())
        self._until(lambda: len(self._stamps()) >= begin + n)
        return self._gaps(begin)

    def _gaps(self, begin: int) -> list[float]:
        stamps = self._stamps()[max(0, begin - 1) :]
        return [b - a for a, b in itertools.pairwise(stamps)]

    def quiet(self) -> None:
        """Until nothing is copied, written or taken into the cache, and two steps more."""
        self._until(lambda: self.cache.settled())
        self.steps(2)

    def save_beside(self) -> tuple[list[float], float]:
        """Gaps of a decoder until all of the session is in the cache, and how long it was copied."""
        self.cache.forget()
        self.steps(1)
        begin, started = len(self._stamps()), time.perf_counter()
        self.cache.save(self.slot)
        self._until(lambda: self.cache.is_settled)
        took = time.perf_counter() - started
        self.steps(2)
        return self._gaps(begin), took

    def restore_beside(self) -> tuple[list[float], float]:
        """Gaps while it is restored, without the step that computes the session's own token.

        Its slot holds as many tokens of another one, which have to go.
        """
        others = self.slot.tokens.view() + 1
        self.slot.tokens.keep(0)
        self.slot.tokens.extend(others)
        self.slot.checkpoints = []
        request = self.session()
        self.engine.submit(request)
        begin = len(self._stamps())
        self._until(lambda: self._is_over(request))
        self._check(request)
        began = next(t for t, event in self._events[request.id] if isinstance(event, Started))
        stamps = [t for t in self._stamps()[max(0, begin - 1) :] if t < began]
        self._until(self._idle)
        return [b - a for a, b in itertools.pairwise(stamps)], self._waited(request)

    # -- as libllama does it, on the loop

    def own_save(self) -> list[float]:
        """The gap in which the whole state is read."""
        begin = len(self._stamps())
        self._state = self.engine.kv.save(self.slot.seq_id, 0)
        self.steps(1)
        return self._gaps(begin)

    def own_restore(self) -> list[float]:
        """The gap in which it is written."""
        begin = len(self._stamps())
        if self._state is None or not self.engine.kv.restore(self.slot.seq_id, self._state, 0):
            raise BenchError("libllama refuses its own state")
        self.steps(1)
        return self._gaps(begin)


def _why(engine: Engine) -> str:
    view = next(view for view in engine.plugins.views() if view.name == "async-cache")
    return str(view.reason or view.quarantined or "not enabled")


def cuda_device(engine: Engine) -> int:
    """The CUDA device of the first plane; -1 for main memory."""
    assert engine.cells is not None
    name = engine.cells.planes(0)[0].device
    return int(name.removeprefix("CUDA")) if name.startswith("CUDA") else -1


def copy_floor(device: int, n_bytes: int) -> dict[str, Any]:
    """GB/s of one copy of so many bytes (at most 1 GiB): pinned memory to the device, or within main memory."""
    n = min(n_bytes, 1 << 30)
    times = []
    if device < 0:
        a, b = np.ones(n, np.uint8), np.zeros(n, np.uint8)
        for _ in range(5):
            started = time.perf_counter()
            np.copyto(b, a)
            times.append(time.perf_counter() - started)
        return {"copy": "copy within main memory", "copy_gb_s": n / min(times) / 1e9}
    try:
        import cupy
    except ImportError:
        return {}
    runtime = cupy.cuda.runtime
    with cupy.cuda.Device(device):
        stream, target = cupy.cuda.Stream(non_blocking=True), cupy.cuda.alloc(n)
        source = cupy.cuda.alloc_pinned_memory(n)
        for _ in range(5):
            started = time.perf_counter()
            runtime.memcpyAsync(target.ptr, source.ptr, n, 1, stream.ptr)
            stream.synchronize()
            times.append(time.perf_counter() - started)
    return {"copy": "copy from pinned memory", "copy_gb_s": n / min(times) / 1e9}
