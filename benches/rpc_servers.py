"""Stock rpc-servers on this machine, in place of several devices. They end with the `with` block."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Iterator
from pathlib import Path

from llamamg import paths

from .record import free_port
from .sides import Process, SideError

START_S = 20.0


def program() -> Path | None:
    """Where `llamamg build --upstream --server` puts it; None where that was not built."""
    found = paths.build("upstream") / "bin" / "ggml-rpc-server"
    return found if found.is_file() else None


@contextlib.contextmanager
def rpc_servers(n: int, n_threads: int = 1, file: Path | None = None) -> Iterator[list[str]]:
    """Their host:port; `file` is another program than the built one. Raises SideError."""
    binary = file or program()
    if binary is None or not binary.is_file():
        raise SideError(f"there is no rpc-server{f' {file}' if file else ''}: run `llamamg build --upstream --server`")
    with contextlib.ExitStack() as stack:
        endpoints = []
        for i in range(n):
            port = free_port()
            argv = [str(binary), "-p", str(port), "-t", str(n_threads)]
            server = Process(f"rpc-server {i}", argv, {"LD_LIBRARY_PATH": str(binary.parent)})
            server.start()
            stack.callback(server.stop)
            _wait(server, port)
            endpoints.append(f"127.0.0.1:{port}")
        yield endpoints


def _wait(server: Process, port: int) -> None:
    deadline = time.monotonic() + START_S
    while server.alive() and time.monotonic() < deadline:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
            return
        time.sleep(0.1)
    raise SideError(f"{server.name} does not listen:\n{server.log_tail()}")
