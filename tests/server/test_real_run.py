"""`serve` as a program: binding, loading, signals, and sentences instead of tracebacks."""

from __future__ import annotations

import contextlib
import json
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from llamamg import paths

COMMON = ["-t", "1", "-c", "512", "-np", "2"]
FOREVER = {"prompt": "Once upon a time", "n_predict": 100000, "ignore_eos": True, "stream": True}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Program:
    """`llamamg serve` with a model, on a free port."""

    def __init__(self, model: Path, *arguments: str, port: int | None = None, enable: str = "none") -> None:
        self.port = port or free_port()
        command = [
            sys.executable,
            "-m",
            "llamamg",
            "serve",
            "-m",
            str(model),
            "--port",
            str(self.port),
            *COMMON,
            "--enable",
            enable,
            *arguments,
        ]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    def get(self, path: str) -> tuple[int, Any]:
        """Status and JSON; -1 while nothing listens."""
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port}{path}", timeout=20) as response:
                return response.status, json.load(response)
        except urllib.error.HTTPError as error:
            return error.code, json.load(error)
        except (urllib.error.URLError, ConnectionError):
            return -1, None

    def statuses(self) -> Iterator[int]:
        """/health until it says 200 or the program ends."""
        for _ in range(3000):
            status, _ = self.get("/health")
            yield status
            if status == 200 or self.process.poll() is not None:
                return
            time.sleep(0.01)

    def ready(self) -> Program:
        assert list(self.statuses())[-1] == 200
        return self

    def stream(self) -> Any:
        """A stream that would go on for long, after its first line."""
        request = urllib.request.Request(f"http://127.0.0.1:{self.port}/completion", json.dumps(FOREVER).encode())
        response = urllib.request.urlopen(request, timeout=20)
        assert response.readline().startswith(b"data: ")
        return response

    def end(self) -> tuple[int, str, str]:
        """Exit status and output."""
        out, err = self.process.communicate(timeout=20)
        return self.process.returncode, out, err


@pytest.fixture
def programs() -> Iterator[list[Program]]:
    started: list[Program] = []
    yield started
    for program in started:
        if program.process.poll() is None:
            program.process.kill()
            program.process.communicate()


def test_loads_behind_an_open_port_and_stops_on_sigterm(
    library: object, smol_model: Path, programs: list[Program]
) -> None:
    program = Program(smol_model, "-np", "1", "-c", "8192")
    programs.append(program)
    seen = list(program.statuses())
    assert seen[-1] == 200
    assert set(seen) <= {-1, 503, 200}
    assert 503 in seen
    stream = program.stream()
    program.process.send_signal(signal.SIGTERM)
    rest = stream.read().decode()
    status, out, err = program.end()
    assert status == 0
    assert "shutting down" in rest.split("data: ")[-1]
    assert f"http://127.0.0.1:{program.port}" in out
    assert "curl -N" in out
    assert "Traceback" not in err


def test_second_interrupt_ends_at_once(library: object, smol_model: Path, programs: list[Program]) -> None:
    program = Program(smol_model)
    programs.append(program)
    stream = program.ready().stream()
    program.process.send_signal(signal.SIGINT)
    assert stream.readline() is not None
    time.sleep(0.2)
    assert program.process.poll() is None
    program.process.send_signal(signal.SIGINT)
    status, _, err = program.end()
    assert status == 130
    assert "Traceback" not in err
    stream.close()


def test_idle_server_ends_on_one_interrupt(library: object, smol_model: Path, programs: list[Program]) -> None:
    program = Program(smol_model)
    programs.append(program)
    program.ready().process.send_signal(signal.SIGINT)
    status, _, err = program.end()
    assert status == 0
    assert "Traceback" not in err


def test_port_in_use(library: object, smol_model: Path, programs: list[Program]) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        program = Program(smol_model, port=other.getsockname()[1])
        programs.append(program)
        status, _, err = program.end()
    assert status == 1
    assert "--port" in err
    assert "Traceback" not in err


def test_interrupt_while_loading(library: object, smol_model: Path, programs: list[Program]) -> None:
    program = Program(smol_model)
    programs.append(program)
    assert 503 in (status for status in program.statuses())
    program.process.send_signal(signal.SIGINT)
    status, _, err = program.end()
    assert status in (130, 0)  # 0 if loading was done by then
    assert "Traceback" not in err


@pytest.mark.parametrize("damage", ["missing", "no gguf", "cut"])
def test_model_that_cannot_be_loaded(
    library: object, smol_model: Path, tmp_path: Path, programs: list[Program], damage: str
) -> None:
    model = tmp_path / "model.gguf"
    if damage == "no gguf":
        model.write_bytes(b"no model" * 1000)
    elif damage == "cut":
        model.write_bytes(smol_model.read_bytes()[: 40 << 20])
    program = Program(model)
    programs.append(program)
    status, _, err = program.end()
    assert status == 1
    assert str(model) in err
    assert "Traceback" not in err


@pytest.fixture
def rpc_server() -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    """A stock rpc-server and its address; whatever a test did to it, it ends."""
    binary = paths.build("upstream") / "bin" / "ggml-rpc-server"
    if not binary.is_file():
        pytest.fail("there is no rpc-server: run `llamamg build --upstream --server`")
    port = free_port()
    server = subprocess.Popen(
        [binary, "-p", str(port), "-t", "1"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        for _ in range(200):
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
                break
            time.sleep(0.05)
        yield server, f"127.0.0.1:{port}"
    finally:
        server.kill()
        server.wait()


def test_an_rpc_server_that_dies_is_said_in_a_sentence(
    library: object, smol_model: Path, programs: list[Program], rpc_server: tuple[Any, str]
) -> None:
    server, address = rpc_server
    program = Program(smol_model, "--rpc", address)
    programs.append(program)
    with program.ready().stream():
        server.kill()
        _, err = program.process.communicate(timeout=120)
    assert program.process.returncode == 1
    assert "an rpc-server has ended" in err
    assert "ptrace" not in err, "no debugger is asked"


def test_an_rpc_server_that_is_silent_does_not_keep_the_program(
    library: object, smol_model: Path, programs: list[Program], rpc_server: tuple[Any, str]
) -> None:
    server, address = rpc_server
    program = Program(smol_model, "--rpc", address)
    programs.append(program)
    with program.ready().stream():
        server.send_signal(signal.SIGSTOP)
        program.process.send_signal(signal.SIGTERM)
        _, err = program.process.communicate(timeout=120)
    assert program.process.returncode == 0
    assert "still computes and is not waited for" in err


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        (["--cache-disk", "DISK"], "nothing can be kept as --cache-disk asks for: .*; leave that out"),
        (["--cache-ram", "100"], "nothing can be kept as --cache-ram asks for: .*; leave that out"),
        ([], "async-cache cannot be enabled here: .*; start without --enable async-cache"),
    ],
)
def test_what_a_plugin_cannot_do_with_this_model_is_said_and_ends_the_program(
    library: object, micro_model: Path, tmp_path: Path, programs: list[Program], asked: list[str], words: str
) -> None:
    asked = [str(tmp_path) if word == "DISK" else word for word in asked]
    program = Program(
        micro_model, "--qsa-drop-raw-keys", "on", "--no-kv-unified", *asked, enable="only:qsa,async-cache"
    )
    programs.append(program)
    status, out, err = program.end()
    assert status == 1
    assert re.search(f"llamamg: error: {words}", err)
    assert "ready" not in out
    assert "Traceback" not in err
