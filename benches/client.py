"""A streaming client that costs little: it shares the cores with the server it measures, so it only stamps and cuts.

The same code talks to every side. One connection per request; events are counted as they arrive and only the last one
is parsed.
"""

from __future__ import annotations

import asyncio
import json
import time
from array import array
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, cast
from urllib.parse import urlsplit

import numpy as np
from numpy.typing import NDArray


class ServerError(RuntimeError):
    """The server refused, broke off or sent what is no answer; the text says what came."""


@dataclass(frozen=True, slots=True)
class Answer:
    """One streamed answer. Times are perf_counter seconds; the final event is not among the stamps."""

    t_sent: float  # the whole request was handed to the socket
    stamps: NDArray[np.float64]  # arrival of each event
    t_end: float  # arrival of the final event
    final: dict[str, Any]
    text_events: tuple[bytes, ...] = ()  # the events themselves, when they were asked for

    @property
    def ttft_s(self) -> float:
        """From sending to the first event."""
        return float(self.stamps[0]) - self.t_sent

    @property
    def gaps_s(self) -> NDArray[np.float64]:
        """Between consecutive events."""
        gaps: NDArray[np.float64] = np.diff(self.stamps)
        return gaps


class EventCutter:
    """Cuts an SSE byte stream into events. HTTP chunk framing passes through: it never holds an empty line."""

    __slots__ = ("_rest", "last")

    def __init__(self) -> None:
        self._rest = b""
        self.last = b""  # the payload of the last data event

    def feed(self, data: bytes) -> list[bytes]:
        """The payloads of the data events that are complete now; comments are dropped."""
        data = self._rest + data if self._rest else data
        if data.endswith(b"\n\n"):
            events, self._rest = data.split(b"\n\n"), b""
        else:
            *events, self._rest = data.split(b"\n\n")
        payloads = []
        for event in events:
            at = event.find(b"data: ")
            if at >= 0:
                payloads.append(event[at + 6 :])
        if payloads:
            self.last = payloads[-1]
        return payloads


class _Stream(asyncio.Protocol):
    """One request on one connection."""

    def __init__(
        self, request: bytes, on_event: Callable[[bytes, float], None] | None, done: asyncio.Future[float]
    ) -> None:
        self._request, self._on_event, self.done = request, on_event, done
        self._head: bytes | None = b""
        self._chunked = False
        self.cutter = EventCutter()
        self.stamps = array("d")
        self.t_sent = 0.0
        self.body = b""  # of an answer that is no event stream
        self._streaming = False
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is none by inheritance
        self.t_sent = time.perf_counter()
        self._transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        now = time.perf_counter()
        if self._head is not None:
            self._head += data
            head, found, data = self._head.partition(b"\r\n\r\n")
            if not found:
                return
            self._head = None
            self._streaming = b" 200 " in head[:16] and b"text/event-stream" in head.lower()
            if not self._streaming:
                self.body = head + b"\r\n\r\n"
            elif not data:
                return
        if not self._streaming:
            self.body += data
            return
        for payload in self.cutter.feed(data):
            self.stamps.append(now)
            if self._on_event is not None:
                self._on_event(payload, now)
        if data.endswith(b"0\r\n\r\n") and not self.done.done():  # the last chunk
            self.done.set_result(now)

    def connection_lost(self, error: Exception | None) -> None:
        if self.done.done():
            return
        if error is not None:
            self.done.set_exception(ServerError(f"the connection broke: {error}"))
        else:
            self.done.set_result(time.perf_counter())

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()


def encode(url: str, path: str, body: bytes) -> bytes:
    """A whole POST request."""
    host = urlsplit(url).netloc
    head = (
        f"POST {path} HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\nConnection: close\r\n"
        f"Content-Length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


async def stream(
    url: str,
    path: str,
    body: dict[str, Any] | bytes,
    on_event: Callable[[bytes, float], None] | None = None,
) -> Answer:
    """POST and read the event stream to its end. Raises ServerError, or ConnectionError when nobody listens."""
    return await Post(url, path, body, on_event).run()


class Post:
    """A request whose bytes are made when it is created, so that sending costs the measurement nothing more."""

    def __init__(
        self,
        url: str,
        path: str,
        body: dict[str, Any] | bytes,
        on_event: Callable[[bytes, float], None] | None = None,
    ) -> None:
        parts = urlsplit(url)
        self._host, self._port = parts.hostname or "127.0.0.1", parts.port or 80
        self._request = encode(url, path, body if isinstance(body, bytes) else json.dumps(body).encode())
        self._on_event = on_event

    async def run(self) -> Answer:
        """Send it and read the answer."""
        loop = asyncio.get_running_loop()
        done: asyncio.Future[float] = loop.create_future()
        try:
            _, protocol = await loop.create_connection(
                lambda: _Stream(self._request, self._on_event, done), self._host, self._port
            )
        except OSError as error:  # of several addresses a plain one
            raise ConnectionError(f"nobody answers at {self._host}:{self._port}: {error}") from error
        try:
            t_end = await done
        finally:
            protocol.close()
        if protocol.body or not protocol.stamps:
            raise ServerError(f"no event stream came back: {protocol.body[:500].decode('utf-8', 'replace')!r}")
        last = protocol.cutter.last
        stamps = np.frombuffer(protocol.stamps.tobytes(), np.float64)
        if last == b"[DONE]":
            return Answer(protocol.t_sent, stamps[:-1], t_end, {})
        final = json.loads(last)
        if "error" in final:
            raise ServerError(f"the server ended the stream with an error: {final['error']}")
        return Answer(protocol.t_sent, stamps[:-1], float(stamps[-1]), final)


async def together(posts: Iterable[Post]) -> list[Answer]:
    """Send all at once; their answers. The first failure is raised."""
    return list(await asyncio.gather(*(post.run() for post in posts)))


def run_loop(main: Callable[[], Any]) -> Any:
    """asyncio.run on the faster loop where it is installed; `main` makes the coroutine."""
    try:
        import uvloop
    except ImportError:
        return asyncio.run(main())
    return uvloop.run(main())
