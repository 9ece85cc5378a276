"""One HTTP request whose answer is being generated, and the table that brings the engine's events to it."""

from __future__ import annotations

import asyncio
import dataclasses
from collections import deque
from collections.abc import Sequence

import orjson

from llamamg.request import RANDOM_SEED, Delta, Event, Failed, Finished, Progress, Request
from llamamg.server.answer import Dialect, Part
from llamamg.server.contract import EngineLike
from llamamg.server.errors import ApiError
from llamamg.server.prepare import Prepared
from llamamg.server.writer import Writer

Headers = list[tuple[bytes, bytes]]
PING = b":\n\n"
SSE_HEADERS = [(b"content-type", b"text/event-stream"), (b"x-accel-buffering", b"no")]


def parts_of(prepared: Prepared) -> list[Part]:
    """One part per prompt and completion; each further completion raises a fixed seed by one, as llama-server does."""
    parts: list[Part] = []
    for prompt in prepared.prompts:
        for i in range(prepared.n_cmpl):
            sampling = prepared.sampling
            if i and sampling.seed != RANDOM_SEED:
                sampling = dataclasses.replace(sampling, seed=(sampling.seed + i) & RANDOM_SEED)
            parts.append(Part(len(parts), prompt, sampling))
    return parts


class Exchange:
    """The parts of one answer, and where they are sent. All methods run on the event loop."""

    def __init__(self, dialect: Dialect, parts: Sequence[Part], writer: Writer, headers: Headers) -> None:
        self.dialect, self.parts = dialect, parts
        self.writer = writer if dialect.prepared.stream else None
        self.done: asyncio.Future[ApiError | None] = asyncio.get_running_loop().create_future()
        self.started = False
        self._headers = headers
        self._n_open = len(parts)

    def feed(self, part: Part, event: Event) -> None:
        """Take an event of one part; what it means for the client is written, not yet flushed."""
        writer = self.writer
        kind = type(event)
        if kind is Delta:
            if writer is not None:
                writer.write(self.dialect.delta(part, event))  # type: ignore[arg-type]
        elif kind is Finished:
            self._finish(part, event)  # type: ignore[arg-type]
        elif isinstance(event, Failed):
            part.ended = True
            self.fail(ApiError(event.code, event.message, event.type, event.extra))
        elif writer is not None:
            self._start(writer)
            if isinstance(event, Progress):
                writer.write(self.dialect.progress(part, event))

    def _start(self, writer: Writer) -> None:
        if not self.started:
            self.started = True
            writer.start(200, self._headers + SSE_HEADERS)

    def _finish(self, part: Part, event: Finished) -> None:
        part.finished, part.ended = event, True
        self._n_open -= 1
        if self.writer is not None:
            self._start(self.writer)
            self.writer.write(self.dialect.last(part, event))
            if self._n_open == 0:
                self.writer.write(self.dialect.end(self.parts))
        if self._n_open == 0:
            self._settle(None)

    def fail(self, error: ApiError) -> None:
        """End the answer with an error: its own response if nothing was sent yet, else an event in the stream."""
        if self.done.done():
            return
        if self.started and self.writer is not None:
            self.writer.write(b"data: " + orjson.dumps({"error": error.object()}) + b"\n\n")
        self._settle(error)

    def abandon(self) -> None:
        """The client is gone."""
        self._settle(None)

    def _settle(self, error: ApiError | None) -> None:
        if self.done.done():
            return
        if self.started and self.writer is not None:
            self.writer.close()
        self.done.set_result(error)


class Exchanges:
    """All running exchanges by request id. `deliver` is called by the engine thread, everything else by the event loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._by_id: dict[int, tuple[Exchange, Part]] = {}
        self._pending: deque[list[tuple[int, Event]]] = deque()
        self._scheduled = False

    def __len__(self) -> int:
        return len({id(exchange) for exchange, _ in self._by_id.values()})

    def add(self, exchange: Exchange, part: Part, request: Request) -> None:
        """Expect events for `request`."""
        part.request_id = request.id
        self._by_id[request.id] = (exchange, part)

    def remove(self, exchange: Exchange, engine: EngineLike) -> None:
        """Forget an exchange; parts that have not ended are cancelled in the engine."""
        for part in exchange.parts:
            if self._by_id.pop(part.request_id, None) is not None and not part.ended:
                engine.cancel(part.request_id)

    def deliver(self, pairs: list[tuple[int, Event]]) -> None:
        """Hand over the events of one engine step: one wake-up of the event loop however many there are."""
        self._pending.append(pairs)
        if not self._scheduled:
            self._scheduled = True
            self._loop.call_soon_threadsafe(self._dispatch)

    def _dispatch(self) -> None:
        # Cleared first: a step that ends while we are at it either is seen below or schedules the next call.
        self._scheduled = False
        touched: dict[Exchange, None] = {}
        by_id = self._by_id
        while self._pending:
            for request_id, event in self._pending.popleft():
                found = by_id.get(request_id)
                if found is not None:
                    exchange, part = found
                    exchange.feed(part, event)
                    touched[exchange] = None
        now = self._loop.time()
        for exchange in touched:
            writer = exchange.writer
            if writer is not None:
                writer.flush()
                writer.last_write = now

    def each(self) -> list[Exchange]:
        """The running exchanges."""
        return list({id(e): e for e, _ in self._by_id.values()}.values())

    def ping(self) -> None:
        """Send a comment on every stream that has been silent for its interval."""
        now = self._loop.time()
        for exchange in self.each():
            writer, interval = exchange.writer, exchange.dialect.prepared.ping_interval_s
            if writer is not None and exchange.started and 0 < interval <= now - writer.last_write:
                writer.write(PING)
                writer.flush()
                writer.last_write = now
