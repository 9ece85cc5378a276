"""`llamamg plugins`: without a server, with one, and with what is not one."""

from __future__ import annotations

import argparse
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest

from llamamg import plugin_cli
from llamamg.plugins import PluginView


def run(*argv: str) -> int:
    parser = argparse.ArgumentParser()
    plugin_cli.add_arguments(parser)
    return plugin_cli.run(parser.parse_args(argv))


class Server(HTTPServer):
    """Answers every GET with `status` and `body`, and keeps what was asked."""

    status = 200
    body = b""
    path = ""
    key: str | None = None


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        self.server.path, self.server.key = self.path, self.headers.get("Authorization")
        self.send_response(self.server.status)
        self.end_headers()
        self.wfile.write(self.server.body)

    def log_message(self, *args: Any) -> None: ...


@pytest.fixture
def server() -> Iterator[Server]:
    with Server(("127.0.0.1", 0), Handler) as found:
        thread = threading.Thread(target=found.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield found
        found.shutdown()
        thread.join()


def url(server: Server) -> str:
    return f"http://127.0.0.1:{server.server_port}/"


RUNNING = PluginView(
    "a",
    summary="does a",
    enabled=True,
    toggle="step",
    helps="this",
    hurts="that",
    guard="exact",
    effect=12,
    effect_unit="moves",
    hook_ms=3.25,
    options={"depth": 3},
    decided=True,
)


def test_without_a_server_it_lists_what_is_installed(capsys: pytest.CaptureFixture[str]) -> None:
    assert run() == 0
    out = capsys.readouterr().out
    header = out.splitlines()[0].split()
    assert header == ["NAME", "STATE", "TOGGLE", "GUARD", "EFFECT", "TIME"]
    for word in ("prefill-gate", "seq-compact", "auto", "same-tokens", "helps: ", "hurts: ", "max-partial=1"):
        assert word in out
    assert "LLAMAMG_TRACE_HOOKS=1" in out


def test_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--json") == 0
    by_name = {entry["name"]: entry for entry in json.loads(capsys.readouterr().out)}
    gate = by_name["prefill-gate"]
    assert (gate["state"], gate["toggle"], gate["guard"], gate["effect"]) == ("auto", "step", "same-tokens", 0)


@pytest.mark.parametrize("wrapped", [False, True])
def test_a_running_servers_plugins(server: Server, capsys: pytest.CaptureFixture[str], wrapped: bool) -> None:
    entry = {**RUNNING.json(), "field_of_a_later_version": 1}
    server.body = json.dumps({"plugins": [entry]} if wrapped else [entry]).encode()
    assert run("--url", url(server), "--api-key", "k") == 0
    assert (server.path, server.key) == ("/plugins", "Bearer k")
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].split() == ["a", "on", "step", "exact", "12", "moves", "3.2", "ms"]
    assert [line.strip() for line in lines[2:]] == [
        "does a",
        "helps: this",
        "hurts: that",
        "options (--a-OPTION VALUE): depth=3",
    ]


def test_why_a_plugin_is_off(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    views = [
        PluginView("a", available=False, reason="one GPU", decided=True),
        PluginView("b", quarantined="idle: boom", decided=True),
        PluginView("c", auto=True, decided=True),
    ]
    server.body = json.dumps([view.json() for view in views]).encode()
    assert run("--url", url(server)) == 0
    out = capsys.readouterr().out
    for line in ("off because: one GPU", "switched off by an error: idle: boom"):
        assert line in out
    assert [line.split()[1] for line in out.splitlines() if line[:1] in "abc"] == ["unavailable", "quarantined", "off"]


@pytest.mark.parametrize(
    ("status", "body", "sentence"),
    [
        (401, b"{}", "answered 401 Unauthorized; give its key with --api-key"),
        (404, b"{}", "answered 404 Not Found"),
        (200, b"<html>", "did not answer with JSON; is it a llamamg server?"),
        (200, b'{"models": []}', "did not answer with a list of plugins; is it a llamamg server?"),
        (200, b'[{"summary": "nameless"}]', "did not answer with a list of plugins"),
        (200, b"3", "did not answer with a list of plugins"),
    ],
)
def test_what_is_not_a_plugin_list(
    server: Server, capsys: pytest.CaptureFixture[str], status: int, body: bytes, sentence: str
) -> None:
    server.status, server.body = status, body
    assert run("--url", url(server)) == 1
    assert sentence in capsys.readouterr().err


@pytest.mark.parametrize(
    ("address", "sentence"),
    [("127.0.0.1:8080", "must begin with http://"), ("http://127.0.0.1:9", "no server answers")],
)
def test_no_server(capsys: pytest.CaptureFixture[str], address: str, sentence: str) -> None:
    assert run("--url", address) == 1
    assert sentence in capsys.readouterr().err
