"""One HTTP request as the endpoints see it, and plain answers to it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any
from urllib.parse import parse_qs

from llamamg.server.errors import ApiError

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Headers = list[tuple[bytes, bytes]]
JSON = b"application/json; charset=utf-8"


class ClientGone(Exception):
    """The connection was closed before the answer."""


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

    async def body(self) -> list[bytes]:
        """The request's body as it arrived. Raises ClientGone."""
        chunks: list[bytes] = []
        while True:
            message = await self.receive()
            if message["type"] == "http.disconnect":
                raise ClientGone
            if data := message.get("body"):
                chunks.append(data)
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
