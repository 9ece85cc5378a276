"""The response writer against a connection that takes bytes now, later, or not at all."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from llamamg.server.writer import Message, Writer


class Connection:
    """An ASGI `send` that waits whenever `blocked` is set."""

    def __init__(self) -> None:
        self.open = asyncio.Event()
        self.open.set()
        self.messages: list[Message] = []
        self.error: Exception | None = None

    async def send(self, message: Message) -> None:
        while not self.open.is_set():
            await self.open.wait()
        if self.error is not None:
            raise self.error
        self.messages.append(message)

    @property
    def bodies(self) -> list[bytes]:
        return [m["body"] for m in self.messages if m["type"] == "http.response.body"]


def run(test: Callable[[Connection, Writer, list[str]], Coroutine[Any, Any, None]]) -> None:
    async def main() -> None:
        connection, broken = Connection(), []
        await test(connection, Writer(connection.send, lambda: broken.append("broken")), broken)

    asyncio.run(main())


def test_open_connection_is_written_to_without_yielding() -> None:
    async def test(connection: Connection, writer: Writer, broken: list[str]) -> None:
        writer.start(200, [])
        writer.write(b"a")
        writer.write(b"b")
        writer.flush()
        writer.flush()
        writer.write(b"c")
        writer.close()
        assert connection.bodies == [b"ab", b"c"]
        assert [m.get("more_body") for m in connection.messages] == [None, True, False]

    run(test)


def test_blocked_connection_gets_everything_in_order_and_at_once() -> None:
    async def test(connection: Connection, writer: Writer, broken: list[str]) -> None:
        connection.open.clear()
        writer.start(200, [])
        for piece in (b"a", b"b", b"c"):
            writer.write(piece)
            writer.flush()
        writer.close()
        await asyncio.sleep(0)
        assert connection.messages == []
        connection.open.set()
        await writer.drained(5.0)
        assert [m["type"] for m in connection.messages] == ["http.response.start", "http.response.body"]
        assert connection.bodies == [b"abc"]
        assert connection.messages[-1]["more_body"] is False
        assert broken == []

    run(test)


def test_end_alone_is_sent() -> None:
    async def test(connection: Connection, writer: Writer, broken: list[str]) -> None:
        writer.start(200, [])
        writer.close()
        assert connection.messages[-1] == {"type": "http.response.body", "body": b"", "more_body": False}

    run(test)


@pytest.mark.parametrize("blocked", [False, True])
def test_connection_that_fails_is_told_once(blocked: bool) -> None:
    async def test(connection: Connection, writer: Writer, broken: list[str]) -> None:
        connection.error = OSError("gone")
        if blocked:
            connection.open.clear()
        writer.start(200, [])
        writer.write(b"a")
        writer.flush()
        connection.open.set()
        await writer.drained(5.0)
        assert broken == ["broken"]

    run(test)


def test_client_that_takes_nothing_is_given_up() -> None:
    async def test(connection: Connection, writer: Writer, broken: list[str]) -> None:
        connection.open.clear()
        writer.start(200, [])
        await writer.drained(0.01)
        await asyncio.sleep(0.01)
        assert broken == ["broken"]
        assert connection.messages == []

    run(test)
