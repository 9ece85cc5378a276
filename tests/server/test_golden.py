"""Field names and types of every endpoint's answer equal those captured from llama-server."""

from __future__ import annotations

import json
from typing import Any

import pytest
from fake_engine import FakeEngine, fake_config, refuse
from golden_capture import capture, form
from harness import Running, running

from llamamg.request import Failed

HI = [{"role": "user", "content": "Say hi"}]
CAPITAL = "The capital of France is"
SCHEMA = {"type": "object", "properties": {"a": {"const": 1}}, "required": ["a"], "additionalProperties": False}

GET = {"health": "/health", "models": "/v1/models", "props": "/props", "slots_idle": "/slots", "err_404": "/nope"}
POST: dict[str, tuple[str, Any]] = {
    "tokenize": ("/tokenize", {"content": "Hello <|im_end|> a", "with_pieces": True}),
    "tokenize_plain": ("/tokenize", {"content": "Hello world"}),
    "detokenize": ("/detokenize", {"tokens": [72, 101]}),
    "apply_template": ("/apply-template", {"messages": [{"role": "user", "content": "hi"}]}),
    "completion": ("/completion", {"prompt": CAPITAL, "n_predict": 6, "return_tokens": True}),
    "completion_nprobs": ("/completion", {"prompt": CAPITAL, "n_predict": 2, "n_probs": 2}),
    "completion_n0": ("/completion", {"prompt": CAPITAL, "n_predict": 0}),
    "completion_multi": ("/completion", {"prompt": ["a", "b"], "n_predict": 1}),
    "completion_fields": (
        "/completion",
        {
            "prompt": "a",
            "n_predict": 1,
            "response_fields": ["content", "generation_settings/n_predict", "timings/prompt_n"],
        },
    ),
    "v1_completions": ("/v1/completions", {"prompt": CAPITAL, "max_tokens": 4}),
    "chat": ("/v1/chat/completions", {"messages": HI, "max_tokens": 6}),
    "err_ctx": ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a b " * 900}]}),
    "err_nomsg": ("/v1/chat/completions", {}),
}
STREAM: dict[str, tuple[str, Any]] = {
    "completion_stream": (
        "/completion",
        {"prompt": CAPITAL, "n_predict": 4, "return_progress": True, "timings_per_token": True},
    ),
    "v1_completions_stream": (
        "/v1/completions",
        {"prompt": CAPITAL, "max_tokens": 3, "stream_options": {"include_usage": True}},
    ),
    "chat_stream": (
        "/v1/chat/completions",
        {"messages": HI, "max_tokens": 4, "stream_options": {"include_usage": True}},
    ),
    "chat_stream_progress": ("/v1/chat/completions", {"messages": HI, "max_tokens": 2, "return_progress": True}),
}


def same_form(ours: Any, theirs: Any) -> None:
    """Equal paths and types; an empty list on either side says nothing about its elements."""
    a, b = form(ours), form(theirs)
    for path in [p for p in a.keys() ^ b.keys() if "[]" in p]:
        parent = path[: path.index("[]")]
        if not _at(ours, parent) or not _at(theirs, parent):
            a.pop(path, None)
            b.pop(path, None)
    assert a == b


def _at(value: Any, path: str) -> Any:
    for name in path.strip(".").split("."):
        value = value.get(name) if name and isinstance(value, dict) else value
    return value


@pytest.mark.parametrize("name", GET)
def test_get(server: Running, name: str) -> None:
    ours, theirs = server.client.get(GET[name]), capture(name)
    assert ours.status_code == theirs.status
    assert ours.headers["content-type"] == theirs.content_type
    same_form(ours.json(), theirs.json())


@pytest.mark.parametrize("name", POST)
def test_post(server: Running, name: str) -> None:
    ours, theirs = server.post(*POST[name]), capture(name)
    assert ours.status_code == theirs.status
    assert ours.headers["content-type"] == theirs.content_type
    same_form(ours.json(), theirs.json())


@pytest.mark.parametrize("name", STREAM)
def test_stream(server: Running, name: str) -> None:
    path, body = STREAM[name]
    ours, theirs = server.events(path, body), capture(name).events()
    assert [type(event) for event in ours] == [type(event) for event in theirs]
    for mine, golden in zip(ours, theirs, strict=True):
        same_form(mine, golden)


def test_stream_headers(server: Running) -> None:
    path, body = STREAM["chat_stream"]
    response = server.post(path, {**body, "stream": True})
    theirs = capture("chat_stream")
    for name in ("Content-Type", "X-Accel-Buffering", "Transfer-Encoding", "Access-Control-Allow-Origin"):
        assert response.headers[name] == theirs.headers[name]


def test_json_schema_answer_has_the_form_of_a_chat(server: Running, library: object) -> None:
    body = {
        "messages": HI,
        "max_tokens": 20,
        "response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}},
    }
    ours = server.post("/v1/chat/completions", body)
    same_form(ours.json(), capture("chat_json_schema").json())
    assert "root ::=" in server.engine.requests[0].sampling.grammar


def test_slots_after_use(server: Running) -> None:
    for _ in range(2):
        server.post("/v1/chat/completions", {"messages": HI, "max_tokens": 3})
    same_form(server.client.get("/slots").json(), capture("slots_after").json())


def test_grammar_error() -> None:
    engine = FakeEngine()
    engine.script = refuse(
        Failed(400, "invalid_request_error", "Failed to initialize samplers: failed to parse grammar")
    )
    with running(engine) as server:
        ours, theirs = server.post("/completion", {"prompt": "a", "grammar": "root ::= (x"}), capture("err_grammar")
    assert ours.status_code == theirs.status
    assert ours.json() == theirs.json()


def test_bad_json_deviates_on_purpose(server: Running) -> None:
    ours = server.client.post("/completion", content=b"{")
    theirs = capture("err_badjson")
    same_form(ours.json(), theirs.json())
    assert (theirs.status, ours.status_code) == (500, 400)
    assert ours.json()["error"]["type"] == "invalid_request_error"


def test_messages_of_errors_are_llama_servers(server: Running) -> None:
    for name in ("err_nomsg", "err_ctx"):
        ours, theirs = server.post(*POST[name]).json()["error"], capture(name).json()["error"]
        numbers = str.maketrans("", "", "0123456789")
        assert ours["message"].translate(numbers) == theirs["message"].translate(numbers)
        assert ours["type"] == theirs["type"]
    assert server.client.get("/nope").json() == capture("err_404").json()


def test_metrics_have_llama_servers_names_and_kinds() -> None:
    with running(config=fake_config(port=0, endpoint_metrics=True)) as server:
        server.engine.stats.accepted_per_pos = [2, 1]
        server.engine.stats.itl.observe(0.02)
        response = server.client.get("/metrics")
    theirs = capture("metrics")
    assert response.headers["content-type"] == theirs.content_type
    assert response.headers["process-start-time-unix"].isdigit()
    assert _kinds(theirs.text).items() <= _kinds(response.text).items()
    samples = dict(line.rsplit(" ", 1) for line in response.text.splitlines() if not line.startswith("#"))
    assert {line.split()[0] for line in theirs.text.splitlines() if line[:1] not in "#"} <= samples.keys()
    assert samples['llamacpp:spec_decode_num_accepted_tokens_per_pos_total{position="1"}'] == "1.0"
    assert samples['llamamg:inter_token_latency_seconds_bucket{le="0.015"}'] == "0.0"
    assert samples['llamamg:inter_token_latency_seconds_bucket{le="0.02"}'] == "1.0"
    assert samples["llamamg:inter_token_latency_seconds_count"] == "1.0"
    assert samples["llamamg:time_to_first_token_seconds_count"] == "0.0"
    assert samples["llamamg:queue_seconds_count"] == samples["llamamg:prefill_seconds_count"] == "0.0"
    assert samples['llamamg:plugin_effect_total{plugin="gate"}'] == "3.0"
    assert samples['llamamg:plugin_enabled{plugin="gate"}'] == "1.0"


def _kinds(text: str) -> dict[str, str]:
    return {
        name: kind for _, _, name, kind in (line.split() for line in text.splitlines() if line.startswith("# TYPE"))
    }


def test_options() -> None:
    with running() as server:
        ours = server.client.options("/v1/chat/completions", headers={"Origin": "http://x.y"})
    theirs = capture("options")
    assert (ours.status_code, ours.text) == (theirs.status, "")
    for name, value in theirs.headers.items():
        if name not in ("Server", "Keep-Alive"):
            assert ours.headers[name] == value


def test_prompt_is_echoed_and_settings_are_the_requests(server: Running) -> None:
    answer = server.post("/completion", {"prompt": 'say "ä"', "n_predict": 3, "temperature": 0, "stop": "x"}).json()
    assert answer["prompt"] == 'say "ä"'
    assert answer["generation_settings"]["n_predict"] == 3
    assert answer["generation_settings"]["temperature"] == 0.0
    assert answer["generation_settings"]["stop"] == ["x"]
    assert answer["model"] == "smol"
    assert json.loads(json.dumps(answer)) == answer
