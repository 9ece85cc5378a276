"""What is decided before any endpoint: loading, keys, CORS, prefix; and the plugin switches."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from fake_engine import FakeEngine, Step, fake_config, finished
from harness import Running, running
from test_streams import held, raw_post, read_until, until

from llamamg.request import Delta, Request, Started


@pytest.mark.parametrize("path", ["/health", "/v1/models", "/props", "/nope"])
def test_loading_is_503_everywhere(path: str) -> None:
    with running(attach=False) as server:
        response = server.client.get(path)
    assert response.status_code == 503
    assert response.json() == {"error": {"message": "Loading model", "type": "unavailable_error", "code": 503}}


@pytest.mark.parametrize(
    ("path", "status"), [("/health", 200), ("/v1/models", 200), ("/completion", 404), ("/nope", 404)]
)
def test_head_is_get_without_its_body(server: Running, path: str, status: int) -> None:
    """Load balancers ask for /health so; and the connection goes on after it."""
    for _ in range(2):
        response = server.client.head(path)
        assert (response.status_code, response.content) == (status, b"")
    assert server.client.get("/health").json() == {"status": "ok"}


def test_dead_engine_is_said_by_every_endpoint(server: Running) -> None:
    server.engine.stop()
    for path in ("/health", "/slots"):
        response = server.client.get(path)
        assert response.status_code == 503
        assert "engine has stopped" in response.json()["error"]["message"]


def test_body_that_never_comes_ends_with_408() -> None:
    with running(config=fake_config(port=0, timeout_s=0.2)) as server:
        connection = socket.create_connection(("127.0.0.1", server.port), 10)
        connection.sendall(b'POST /completion HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{"prompt"')
        assert read_until(connection, b"}}").startswith(b"HTTP/1.1 408")
        connection.close()


def test_client_that_never_reads_is_given_up() -> None:
    def script(request: Request) -> Iterator[Step]:
        yield [Started(0, 0)]
        yield [Delta("x" * 20_000_000, (97,), 1)]
        yield [finished(request, "x")]

    engine = FakeEngine()
    engine.script = script
    with running(engine, fake_config(port=0, timeout_s=0.2)) as server:
        connection = raw_post(server.port, "/completion", {"prompt": "a", "stream": True})
        assert until(lambda: len(engine.begun) == 1)
        assert until(lambda: not server.uvicorn.server_state.tasks)
        connection.close()


def test_keys() -> None:
    with running(config=fake_config(port=0, api_keys=("secret", "other"))) as server:
        get = server.client.get
        assert get("/health").status_code == get("/v1/health").status_code == 200
        refused = get("/props")
        assert refused.status_code == 401
        assert refused.json() == {"error": {"message": "Invalid API Key", "type": "authentication_error", "code": 401}}
        assert get("/props", headers={"Authorization": "Bearer wrong"}).status_code == 401
        assert get("/nope").status_code == 401
        for headers in ({"Authorization": "Bearer secret"}, {"X-Api-Key": "other"}, {"Authorization": "other"}):
            assert get("/props", headers=headers).status_code == 200
        assert server.client.options("/props").status_code == 200


def test_every_answer_has_cors_and_server_headers(server: Running) -> None:
    for path in ("/health", "/nope", "/metrics"):
        response = server.client.get(path, headers={"Origin": "http://a.b"})
        assert response.headers["access-control-allow-origin"] == "http://a.b"
        assert response.headers["server"] == "llamamg"


@pytest.mark.parametrize(
    ("origins", "credentials", "origin", "expected"),
    [
        ("*", True, "http://a.b", "http://a.b"),
        ("*", True, None, ""),
        ("*", False, "http://a.b", "*"),
        ("http://a.b", True, "http://c.d", "http://a.b"),
        ("localhost", True, "http://localhost:3000", "http://localhost:3000"),
        ("localhost", True, "http://localhost.evil.com", None),
        ("localhost", True, "http://[::1]:80", "http://[::1]:80"),
    ],
)
def test_allowed_origin(origins: str, credentials: bool, origin: str | None, expected: str | None) -> None:
    with running(config=fake_config(port=0, cors_origins=origins, cors_credentials=credentials)) as server:
        response = server.client.get("/health", headers={"Origin": origin} if origin else {})
    assert response.headers.get("access-control-allow-origin") == expected


def test_prefix() -> None:
    with running(config=fake_config(port=0, api_prefix="/llm/", api_keys=("k",))) as server:
        assert server.client.get("/llm/health").status_code == 200
        assert server.client.get("/health", headers={"X-Api-Key": "k"}).status_code == 404


def test_static_files(tmp_path: Path) -> None:
    (tmp_path / "index.html").write_text("<p>hi</p>")
    with running(config=fake_config(port=0, static_path=tmp_path)) as server:
        assert server.client.get("/").text == "<p>hi</p>"
        assert server.client.get("/health").json() == {"status": "ok"}
        assert server.client.get("/none.html").status_code == 404


def test_props_can_be_posted_when_allowed() -> None:
    with running(config=fake_config(port=0, endpoint_props=True)) as server:
        assert server.post("/props", {}).json() == {"success": True}


def test_fail_on_no_slot() -> None:
    gate, engine = threading.Event(), FakeEngine(n_slots=1)
    engine.script = held(gate)
    with running(engine) as server:
        assert server.client.get("/slots?fail_on_no_slot=1").status_code == 200
        thread = threading.Thread(target=server.post, args=("/completion", {"prompt": "a"}))
        thread.start()
        assert until(lambda: len(engine.begun) == 1)
        response = server.client.get("/slots?fail_on_no_slot=1")
        gate.set()
        thread.join(10)
    assert response.status_code == 503
    assert response.json()["error"]["message"] == "no slot available"


def test_plugins_are_listed_and_switched_on_the_engine_thread(server: Running) -> None:
    assert {p["name"]: p["enabled"] for p in server.client.get("/plugins").json()} == {"gate": True, "fixed": True}
    response = server.client.patch("/plugins/gate", json={"enabled": False})
    assert (response.status_code, response.json()["enabled"]) == (200, False)
    assert {p["name"]: p["enabled"] for p in server.client.get("/plugins").json()} == {"gate": False, "fixed": True}
    assert server.engine.plugins.toggled_on == {"fake-engine"}


@pytest.mark.parametrize(
    ("name", "body", "status", "part"),
    [
        ("none", {"enabled": True}, 404, "gate"),
        ("fixed", {"enabled": False}, 409, "restart"),
        ("gate", {}, 400, "enabled"),
        ("gate", {"enabled": "yes"}, 400, "enabled"),
        ("gate", [], 400, "object"),
        ("gate", {"enabled": False, "options": {"chunk": 1}}, 400, "options: options are set at the start"),
    ],
)
def test_plugin_switch_that_cannot_be_done(server: Running, name: str, body: object, status: int, part: str) -> None:
    response = server.client.patch(f"/plugins/{name}", json=body)
    assert response.status_code == status
    assert part in response.json()["error"]["message"]


def test_stopping_server_takes_no_more_requests(server: Running) -> None:
    server.app.service.stopping = True
    response = server.post("/completion", {"prompt": "a"})
    assert response.status_code == 503
    assert "shutting down" in response.json()["error"]["message"]


def test_drafts_of_a_plugin_that_names_no_kind() -> None:
    engine = FakeEngine()
    engine.plugins.hooks.draft = (lambda sequence, limit: None,)
    with running(engine) as server:
        params = server.client.get("/props").json()["default_generation_settings"]["params"]
        assert params["speculative.types"] == "none,unknown"
        engine.plugins.hooks.draft = ()
        params = server.client.get("/props").json()["default_generation_settings"]["params"]
        assert params["speculative.types"] == "none"
