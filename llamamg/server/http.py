"""One HTTP request as the endpoints see it, and plain answers to it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any
from urllib.parse import parse_qs

from llamamg.server.errors import ApiError

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Headers = list[tuple[bytes, bytes]]
BODY_BYTES_MAX = 1 << 30
JSON = b"application/json; charset=utf-8"


class ClientGone(Exception):
    """The connection was closed before the answer."""


class _Patience:
    """Ends the task's waiting with a 408 when `renew` was not called for `timeout_s`. One timer, however many pieces come."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._loop = asyncio.get_running_loop()
        self._task = asyncio.current_task()
        self._last = self._loop.time()
        self._expired = False
        self._timer = self._loop.call_later(timeout_s, self._look)

    def renew(self) -> None:
        """Something came."""
        self._last = self._loop.time()

    def _look(self) -> None:
        left = self._last + self._timeout_s - self._loop.time()
        if left > 0:
            self._timer = self._loop.call_later(left, self._look)
        elif self._task is not None:
            self._expired = True
            self._task.cancel()

    def __enter__(self) -> _Patience:
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        self._timer.cancel()
        if self._expired and kind is asyncio.CancelledError:
            raise ApiError(408, f"The request's body did not arrive within {self._timeout_s:g} s") from None


class Call:
    """A request and the way to answer it. `headers` go with every answer (CORS)."""

    __slots__ = ("headers", "receive", "scope", "send")

    def __init__(self, scope: Scope, receive: Receive, send: Any, headers: Headers) -> None:
        self.scope, self.receive, self.send, self.headers = scope, receive, send, headers

    def header(self, name: bytes) -> str:
        """A request header, "" if absent."""
        for key, value in self.scope["headers"]:
            if key == name:
                return str(value.decode("latin-1"))
        return ""

    def query(self, name: str) -> str:
        """A query parameter, "" if absent."""
        values = parse_qs(self.scope.get("query_string", b"").decode("latin-1"), keep_blank_values=True).get(name)
        return values[-1] if values else ""

    async def body(self, timeout_s: float, n_bytes_max: int = BODY_BYTES_MAX) -> list[bytes]:
        """The request's body as it arrived; `timeout_s` is for each piece of it. Raises ClientGone and ApiError."""
        chunks: list[bytes] = []
        n_bytes = 0
        with _Patience(timeout_s) as patience:
            while True:
                message = await self.receive()
                if message["type"] == "http.disconnect":
                    raise ClientGone
                if data := message.get("body"):
                    patience.renew()
                    chunks.append(data)
                    n_bytes += len(data)
                    if n_bytes > n_bytes_max:
                        raise ApiError(413, f"The request's body is larger than {n_bytes_max} bytes")
                if not message.get("more_body"):
                    return chunks

    async def disconnected(self) -> None:
        """Return when the client closes the connection; only after `body`."""
        while (await self.receive())["type"] != "http.disconnect":
            pass

    async def answer(
        self, body: bytes, status: int = 200, content_type: bytes = JSON, headers: Headers | None = None
    ) -> None:
        """Send a whole response."""
        length = (b"content-length", str(len(body)).encode())
        fields = [*self.headers, *(headers or []), (b"content-type", content_type), length]
        await self.send({"type": "http.response.start", "status": status, "headers": fields})
        await self.send({"type": "http.response.body", "body": body})

    async def error(self, error: ApiError) -> None:
        """Send an error answer."""
        await self.answer(error.body(), error.code)
