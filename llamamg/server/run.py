"""Run the server: bind, answer 503 while the model loads, serve, and stop when told to."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Generator
from typing import Any

import uvicorn

from llamamg.config import Config, ServerConfig
from llamamg.errors import LoadError
from llamamg.plugins import PluginError
from llamamg.server.app import App, build_app

GRACE_S = 4.0  # running answers get this long after the first signal; with what follows it stays within 5 s
SWITCH_INTERVAL_S = 0.0005  # how long Python work on the event loop may keep the engine thread from the interpreter


def serve(config: Config, plugins: Any) -> int:
    """Serve `config` until SIGINT or SIGTERM. The exit status: 0 stopped, 1 could not start (said in a sentence)."""
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    try:
        sockets = bind(config.server)
    except OSError as error:
        address = f"{config.server.host}:{config.server.port}"
        print(
            f"llamamg: error: cannot listen on {address}: {error.strerror or error}. "
            "Stop the program that uses the port, or choose another one with --port.",
            file=sys.stderr,
        )
        return 1
    runner = Runner(config, plugins, sockets)
    uvloop_run(runner)
    if runner.is_stuck:
        # Native code cannot be interrupted, and tearing its library down meanwhile waits for it or crashes.
        print("llamamg: a context still computes and is not waited for", file=sys.stderr, flush=True)
        sys.stdout.flush()
        os._exit(runner.status)
    return runner.status


def uvloop_run(runner: Runner) -> None:
    """Run on uvloop where there is one."""
    try:
        import uvloop
    except ImportError:
        asyncio.run(runner.main())
    else:
        uvloop.run(runner.main())


def bind(server: ServerConfig) -> list[socket.socket]:
    """Listening sockets for every host of the comma list; a name ending in .sock is a Unix socket. Raises OSError."""
    sockets: list[socket.socket] = []
    try:
        for host in server.host.split(","):
            sockets.append(_bind(host.strip(), server.port))
    except OSError:
        for bound in sockets:
            bound.close()
        raise
    return sockets


def _bind(host: str, port: int) -> socket.socket:
    if host.endswith(".sock"):
        with contextlib.suppress(FileNotFoundError):
            os.unlink(host)
        bound = socket.socket(socket.AF_UNIX)
        bound.bind(host)
    else:
        family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        bound = socket.socket(family, kind)
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
    bound.listen(512)
    return bound


class _Uvicorn(uvicorn.Server):
    """uvicorn without its signal handlers: ours know the engine."""

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield


class Runner:
    """One run of the server."""

    def __init__(self, config: Config, plugins: Any, sockets: list[socket.socket]) -> None:
        self.config, self.plugins, self.sockets = config, plugins, sockets
        self.app: App = build_app(config)
        self.status = 0
        self.is_stuck = False  # the engine did not end: a device or an rpc-server does not answer
        self._engine: Any = None
        self._stop_requested = False
        self._url = ""
        self._draining: asyncio.Future[None] | None = None
        self._server = _Uvicorn(
            uvicorn.Config(
                self.app,
                http="httptools",
                ws="none",
                lifespan="off",
                log_config=None,
                log_level="critical",
                access_log=False,
                server_header=False,
                date_header=False,
                backlog=512,
                timeout_graceful_shutdown=1,
                ssl_keyfile=config.server.ssl_key_file,
                ssl_certfile=config.server.ssl_cert_file,
            )
        )

    async def main(self) -> None:
        """Listen, load, serve, stop."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._on_signal, number)
        self._url = _url(self.config.server, self.sockets[0])
        print(f"llamamg: listening on {self._url}, loading {self.config.model.path}", file=sys.stderr, flush=True)
        serving = asyncio.ensure_future(self._server.serve(self.sockets))
        threading.Thread(target=self._load, args=(loop,), name="llamamg-load", daemon=True).start()
        await serving
        if self._engine is not None:
            # Everything that runs was finished or cut by now; a decode in flight is waited for, a second.
            await asyncio.get_running_loop().run_in_executor(None, self._engine.stop, 0.0)
            self.is_stuck = self._engine.alive
        self.app.service.close()

    # -- loading, on a thread of its own

    def _load(self, loop: asyncio.AbstractEventLoop) -> None:
        from llamamg import library, loading

        try:
            engine = loading.load(self.config, self.plugins, _Progress())
            info = library.load(self.config.build).build_info
            loading.spare_collector()
        except (LoadError, MemoryError) as error:
            self._say_and_stop(loop, str(error) or "there is not enough memory to load the model")
        except BaseException as error:
            self._say_and_stop(loop, f"loading failed: {error!r}")
            raise
        else:
            loop.call_soon_threadsafe(self._attach, engine, info)

    def _say_and_stop(self, loop: asyncio.AbstractEventLoop, sentence: str) -> None:
        print(f"llamamg: error: {sentence}", file=sys.stderr, flush=True)
        self.status = 1
        loop.call_soon_threadsafe(self._exit)

    def _exit(self) -> None:
        self._server.should_exit = True

    def _attach(self, engine: Any, info: dict[str, Any]) -> None:
        self._engine = engine
        self.app.service.attach(engine, info)
        engine.start()
        self.app.service.warm_parser()
        loop = asyncio.get_running_loop()
        engine.call(lambda _: None).add_done_callback(lambda _: loop.call_soon_threadsafe(self._started, loop))

    def _started(self, loop: asyncio.AbstractEventLoop) -> None:
        """The engine has begun, or a plugin has refused to."""
        error = self._engine.error
        if error is not None:
            self._say_and_stop(loop, str(error) if isinstance(error, PluginError) else f"the engine stopped: {error!r}")
            return
        prefix = self.config.server.api_prefix.rstrip("/")
        body = '{"messages":[{"role":"user","content":"Hello!"}],"stream":true}'
        key = " -H 'Authorization: Bearer YOUR_KEY'" if self.config.server.api_keys else ""
        print(
            f"llamamg: ready on {self._url}{prefix}\n"
            f"  curl -N {self._url}{prefix}/v1/chat/completions{key} -H 'Content-Type: application/json' -d '{body}'",
            flush=True,
        )

    # -- stopping

    def _on_signal(self, number: int) -> None:
        if self._stop_requested or self._engine is None:
            if number == signal.SIGINT or self._engine is None:
                # Native code cannot be interrupted and must not be torn down under a running decode or load.
                print("llamamg: stopped at once", file=sys.stderr, flush=True)
                os._exit(128 + number)
            return
        self._stop_requested = True
        print(
            "llamamg: stopping; running answers get a few seconds (Ctrl-C again: at once)", file=sys.stderr, flush=True
        )
        self._draining = asyncio.ensure_future(self._drain())

    async def _drain(self) -> None:
        service = self.app.service
        service.stopping = True
        for listener in self._server.servers:
            listener.close()
        deadline = time.monotonic() + GRACE_S
        while len(service.exchanges) and time.monotonic() < deadline:
            await asyncio.sleep(0.05)
        service.cut()
        self._exit()


class _Progress:
    """Loading progress on stderr: a line that moves on a terminal, every tenth elsewhere."""

    def __init__(self) -> None:
        self._shown = -1

    def __call__(self, fraction: float) -> None:
        tenth = int(fraction * 10)
        if tenth == self._shown:
            return
        self._shown = tenth
        end = "\n" if not sys.stderr.isatty() or tenth == 10 else "\r"
        print(f"llamamg: loading the model: {tenth * 10:3d} %", end=end, file=sys.stderr, flush=True)


def _url(server: ServerConfig, bound: socket.socket) -> str:
    name = bound.getsockname()
    if not isinstance(name, tuple):
        return f"unix:{name}"
    host = f"[{name[0]}]" if ":" in name[0] else name[0]
    host = "127.0.0.1" if host == "0.0.0.0" else host
    return f"{'https' if server.ssl_key_file else 'http'}://{host}:{name[1]}"
