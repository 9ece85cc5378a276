"""A real HTTP server on a free port around an engine, and a reader of server-sent events."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from typing import Any

import httpx
import uvicorn
from fake_engine import FakeEngine, fake_config, fake_context

from llamamg.config import Config
from llamamg.server.app import App, build_app
from llamamg.server.run import bind

BUILD_INFO = {"llama.cpp": "7e4c0a9ff", "flags": ["-DLLAMA_BUILD_NUMBER=1"]}


class QuietServer(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield


@dataclass
class Running:
    """A server that answers at `client`."""

    app: App
    engine: Any  # a FakeEngine, or a real one
    loop: asyncio.AbstractEventLoop
    client: httpx.Client
    port: int
    uvicorn: uvicorn.Server

    def post(self, path: str, body: Any, **more: Any) -> httpx.Response:
        return self.client.post(path, json=body, **more)

    def events(self, path: str, body: Any) -> list[Any]:
        """All events of a stream, parsed; "[DONE]" stays text."""
        with self.client.stream("POST", path, json={**body, "stream": True}) as response:
            assert response.status_code == 200, response.read()
            return list(read_events(response))


def read_events(response: httpx.Response) -> Iterator[Any]:
    for line in response.iter_lines():
        if line.startswith("data: "):
            data = line.removeprefix("data: ")
            yield data if data == "[DONE]" else json.loads(data)


@contextlib.contextmanager
def running(
    engine: Any = None,
    config: Config | None = None,
    attach: bool = True,
    context: Any = None,
    make_context: Any = None,
) -> Iterator[Running]:
    """Serve until the block ends."""
    engine, config = engine or FakeEngine(), config or fake_config(port=0)
    app = build_app(config)
    (sock,) = bind(config.server)
    options = uvicorn.Config(
        app, http="httptools", lifespan="off", log_config=None, access_log=False, server_header=False, date_header=False
    )
    server = QuietServer(options)
    loop = asyncio.new_event_loop()

    async def main() -> None:
        if attach:
            made = context
            if made is None and isinstance(engine, FakeEngine):
                made = fake_context(engine.n_ctx_slot, engine.n_slots, config.generation)
            app.service.attach(engine, BUILD_INFO, make_context, made)
            engine.start()
        await server.serve([sock])
        app.service.close()

    thread = threading.Thread(target=loop.run_until_complete, args=(main(),), daemon=True)
    thread.start()
    port = sock.getsockname()[1]
    with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=20.0) as client:
        yield Running(app, engine, loop, client, port, server)
    server.should_exit = server.force_exit = True
    thread.join(5.0)
    if attach:
        engine.stop()
