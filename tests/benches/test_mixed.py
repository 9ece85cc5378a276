"""`llamamg bench mixed` against a stand-in server whose times are known."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benches import mixed, sides
from benches.client import Answer
from benches.errors import BenchError
from benches.mixed_cell import Decoder, figures
from benches.program import run_module
from benches.record import free_port

STALL_S = 0.15


class Server(ThreadingHTTPServer):
    """Decoders get a token every few milliseconds, and none while a prompt is computed."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.n_params, self.n_slots, self.n_ctx, self.n_busy = 1000, 8, 4096, 0
        self.stall = threading.Lock()
        self.n_predict_max, self.n_posts = 10**9, 0
        self.health = 200, b'{"status": "ok"}'
        threading.Thread(target=self.serve_forever, daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class Handler(BaseHTTPRequestHandler):
    server: Server
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        pass

    def do_GET(self) -> None:
        answers: dict[str, Any] = {
            "/props": {"total_slots": self.server.n_slots, "default_generation_settings": {"n_ctx": self.server.n_ctx}},
            "/v1/models": {"data": [{"meta": {"n_vocab": 1000, "n_params": self.server.n_params}}]},
            "/slots": [{"is_processing": self.server.n_busy > 0}],
        }
        health, data = self.server.health
        if self.path != "/health":
            data = json.dumps(answers[self.path]).encode()
        self.send_response(health if self.path == "/health" else 200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def do_POST(self) -> None:
        self.server.n_posts += 1
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        self.server.n_busy += 1
        try:
            self._answer(len(body["prompt"]), min(body["n_predict"], self.server.n_predict_max))
        except OSError:
            pass  # the client left
        finally:
            self.server.n_busy -= 1

    def _answer(self, n_prompt: int, n_predict: int) -> None:
        if n_predict == 1:
            with self.server.stall:
                time.sleep(STALL_S)
        for _ in range(n_predict):
            with self.server.stall:
                self._event({"content": "a", "stop": False})
            time.sleep(0.003)
        self._event({"content": "", "stop": True, "timings": {"prompt_n": n_prompt}})
        self._chunk(b"")

    def _event(self, value: dict[str, Any]) -> None:
        self._chunk(b"data: " + json.dumps(value).encode() + b"\n\n")

    def _chunk(self, data: bytes) -> None:
        self.wfile.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")
        self.wfile.flush()


@pytest.fixture
def server() -> Iterator[Server]:
    made = Server()
    yield made
    made.shutdown()
    made.server_close()


SMALL = ["--decoders", "1,2", "--prompts", "0,1", "--prompt", "64", "--depth", "8", "--repeats", "2", "--alone", "0.2"]


def run(tmp_path: Path, capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, dict[str, Any] | None, str]:
    root = tmp_path / "results"
    status = run_module(mixed, [*SMALL, "--results", str(root), *words], "bench mixed")
    kept = list(root.glob("*/*/result.json"))
    assert bool(kept) == bool(list(root.glob("*/*"))), "half a result"
    out = capsys.readouterr()
    return status, json.loads(kept[0].read_text()) if kept else None, out.out + out.err


def test_a_prompt_shows_as_the_largest_gap(server: Server, tmp_path: Path, capsys: Any) -> None:
    status, result, said = run(tmp_path, capsys, "--side", f"a={server.url}")
    assert status == 0
    assert result is not None
    rows = {(row["n_decoders"], row["n_prompts"]): row["median"] for row in result["rows"]}
    assert set(rows) == {(1, 0), (1, 1), (2, 0), (2, 1)}
    for n in (1, 2):
        assert rows[n, 1]["itl_max_ms"] >= 1e3 * STALL_S * 0.9
        assert 0 < rows[n, 1]["prefill_tps"] <= 64 / STALL_S
        assert rows[n, 0]["prefill_tps"] == 0.0
    assert all(row["runs"][0]["n_prompt"] == [64] * row["n_prompts"] for row in result["rows"])
    assert mixed.table(result) in said
    curves = mixed.plot(result)["curves"]
    assert [[point["n_prompts"] for point in curve["points"]] for curve in curves] == [[0, 1], [0, 1]]
    assert server.url not in json.dumps(result["sides"])


def test_nobody_there(tmp_path: Path, capsys: Any) -> None:
    status, result, said = run(tmp_path, capsys, "--side", f"a=http://127.0.0.1:{free_port()}")
    assert (status, result) == (1, None)
    assert "is the server running there?" in said


@pytest.mark.parametrize(
    ("status", "body", "sentence"),
    [
        (200, b"<html>", "/health gave no JSON: '<html>'"),
        (503, b'{"error": "Loading model"}', "gave 503"),
        (200, b"[]", "it answers []"),
    ],
)
def test_somebody_else_is_there(
    server: Server,
    tmp_path: Path,
    capsys: Any,
    monkeypatch: pytest.MonkeyPatch,
    status: int,
    body: bytes,
    sentence: str,
) -> None:
    monkeypatch.setattr(sides, "EXTERNAL_S", 0.3)
    server.health = status, body
    code, result, said = run(tmp_path, capsys, "--side", f"a={server.url}")
    assert (code, result) == (1, None)
    assert sentence in said
    assert "is no llama-server that is ready" in said
    assert "Traceback" not in said


def test_two_models(server: Server, tmp_path: Path, capsys: Any) -> None:
    other = Server()
    other.n_params = 2000
    try:
        status, result, said = run(tmp_path, capsys, "--side", f"a={server.url}", "--side", f"b={other.url}")
    finally:
        other.shutdown()
        other.server_close()
    assert (status, result) == (1, None)
    assert "the sides serve different models (n_params: a 1000, b 2000)" in said
    assert server.n_posts == 0, "it was measured first"


@pytest.mark.parametrize(
    ("field", "value", "sentence"),
    [
        ("n_slots", 2, "start it with -np 3"),
        ("n_ctx", 100, "100 tokens of context"),
        ("n_predict_max", 7, "give a larger --n-predict"),
    ],
)
def test_a_server_that_is_too_small(
    server: Server, tmp_path: Path, capsys: Any, field: str, value: int, sentence: str
) -> None:
    setattr(server, field, value)
    status, result, said = run(tmp_path, capsys, "--side", f"a={server.url}")
    assert (status, result) == (1, None)
    assert sentence in said
    assert "Traceback" not in said


@pytest.mark.parametrize("words", [["--prompts", "-1"], ["--prompts", "x"], ["--decoders", "0"], ["--repeats", "0"]])
def test_numbers_that_cannot_be(tmp_path: Path, capsys: Any, words: list[str]) -> None:
    status, result, said = run(tmp_path, capsys, *words)
    assert (status, result) == (1, None)
    assert words[0] in said


def test_ctrl_c_keeps_nothing(server: Server, tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = iter(range(3))

    def measure(*arguments: Any) -> Any:
        if next(calls) == 2:
            raise KeyboardInterrupt
        return plain(*arguments)

    plain = mixed.measure
    monkeypatch.setattr(mixed, "measure", measure)
    status, result, said = run(tmp_path, capsys, "--side", f"a={server.url}")
    assert (status, result) == (130, None)
    assert "interrupted" in said


def test_figures_count_what_is_inside_the_window() -> None:
    answer = Answer(10.0, np.array([11.0]), 11.0, {"timings": {"prompt_n": 50}})
    values = figures([Decoder([9.0, 9.9, 10.1, 10.9, 11.5])], [answer], 10.0, 11.0)
    assert values["decode_tps"] == pytest.approx(2.0), "10.1 and 10.9"
    assert values["itl_ms"]["max"] == pytest.approx(800.0)
    assert values["prefill_tps"] == pytest.approx(50.0)


def test_a_session_that_stalls_through_the_window_is_one_large_gap() -> None:
    answer = Answer(10.0, np.array([11.0]), 11.0, {"timings": {"prompt_n": 50}})
    assert figures([Decoder([9.0, 9.9])], [answer], 10.0, 11.0)["itl_ms"]["max"] == pytest.approx(1100.0)


def test_nothing_to_watch() -> None:
    with pytest.raises(BenchError, match="--alone"):
        figures([Decoder([9.0, 9.9])], [], 10.0, 10.01)
