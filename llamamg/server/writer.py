"""Writing to one ASGI response from plain callbacks: no task is woken for a chunk unless the client is slow."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine, Generator, MutableMapping
from typing import Any

Message = MutableMapping[str, Any]
Send = Callable[[Message], Coroutine[Any, Any, None]]


class _Rest:
    """The rest of a coroutine that was stepped by hand and now waits for `waiting`."""

    def __init__(self, coroutine: Coroutine[Any, Any, None], waiting: Any) -> None:
        self._coroutine, self._waiting = coroutine, waiting

    def __await__(self) -> Generator[Any, Any, None]:
        waiting = self._waiting
        try:
            while True:
                try:
                    value = yield waiting
                except BaseException as error:
                    waiting = self._coroutine.throw(error)
                else:
                    waiting = self._coroutine.send(value)
        except StopIteration:
            return


class Writer:
    """One response. `write` collects, `flush` sends what was collected as one message, `close` ends the response.

    Server sends complete without waiting as long as the socket takes the bytes, so stepping the coroutine once by hand
    does the whole job. When it has to wait, a task sees it through and everything written meanwhile goes out as one.
    """

    __slots__ = ("_buffer", "_closing", "_dead", "_messages", "_on_broken", "_send", "_task", "last_write")

    def __init__(self, send: Send, on_broken: Callable[[], None]) -> None:
        self._send = send
        self._on_broken = on_broken  # called once if the connection fails while sending
        self._buffer: list[bytes] = []
        self._messages: deque[Message] = deque()
        self._task: asyncio.Future[None] | None = None
        self._closing = False
        self._dead = False
        self.last_write = 0.0  # set by whoever flushes, on the loop's clock

    def start(self, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        """Send the status line and headers."""
        self._messages.append({"type": "http.response.start", "status": status, "headers": headers})
        self._pump()

    def write(self, data: bytes) -> None:
        """Add bytes to the next chunk."""
        if not self._dead:
            self._buffer.append(data)

    def flush(self) -> None:
        """Send what was written, if anything."""
        if self._task is None and (self._buffer or self._messages):
            self._pump()

    def close(self) -> None:
        """Send what was written and end the response."""
        self._closing = not self._dead
        if self._task is None:
            self._pump()

    async def drained(self, timeout_s: float) -> None:
        """Wait until nothing is left to send, or the client has taken nothing for `timeout_s`."""
        while (task := self._task) is not None:
            done, _ = await asyncio.wait([task], timeout=timeout_s)
            if not done:
                task.cancel()
                return
            await asyncio.sleep(0)  # `_resume` runs as the task's callback

    def _next(self) -> Message | None:
        if self._messages:
            return self._messages.popleft()
        if not self._buffer and not self._closing:
            return None
        body = self._buffer[0] if len(self._buffer) == 1 else b"".join(self._buffer)
        self._buffer.clear()
        more = not self._closing
        self._closing = False
        return {"type": "http.response.body", "body": body, "more_body": more}

    def _pump(self) -> None:
        while (message := self._next()) is not None:
            coroutine = self._send(message)
            try:
                waiting = coroutine.send(None)
            except StopIteration:
                continue
            except Exception:  # what a dead connection raises differs between servers
                self._broken()
                return
            self._task = asyncio.ensure_future(_see_through(coroutine, waiting))
            self._task.add_done_callback(self._resume)
            return

    def _resume(self, task: asyncio.Future[None]) -> None:
        self._task = None
        if task.cancelled() or task.exception() is not None:
            self._broken()
        else:
            self._pump()

    def _broken(self) -> None:
        self._dead = True
        self._buffer.clear()
        self._messages.clear()
        self._closing = False
        self._on_broken()


async def _see_through(coroutine: Coroutine[Any, Any, None], waiting: Any) -> None:
    await _Rest(coroutine, waiting)
