"""The server over the real engine and the demo model: what other servers get wrong, end to end."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from harness import Running, read_events, running
from test_streams import raw_post, until

from llamamg import loading
from llamamg.config import Config, ContextConfig, ModelConfig, PluginsConfig, ServerConfig
from llamamg.plugins import PluginSet

HI = [{"role": "user", "content": "Say hi"}]
FOREVER = {"prompt": "Once upon a time", "n_predict": 400, "ignore_eos": True, "temperature": 0, "stream": True}


def serve(model: Path, **context: Any) -> Any:
    """A running server over `model`, one thread."""
    values = {
        "n_ctx": 1024,
        "n_parallel": 2,
        "n_batch": 128,
        "n_ubatch": 64,
        "n_threads": 1,
        "n_threads_batch": 1,
        **context,
    }
    server = ServerConfig(port=0, alias=("smol",))
    config = Config(
        ModelConfig(model), context=ContextConfig(**values), server=server, plugins=PluginsConfig(none=True)
    )
    engine = loading.load(config, PluginSet.discover(config.plugins))
    return running(engine, engine.config)


@pytest.fixture(scope="module")
def server(library: object, smol_model: Path) -> Iterator[Running]:
    with serve(smol_model) as found:
        yield found


def said(text: str) -> dict[str, Any]:
    """A request whose answer can only be `text`."""
    return {
        "prompt": "Say it:",
        "grammar": f"root ::= {json.dumps(text, ensure_ascii=False)}",
        "temperature": 0,
        "n_predict": 60,
    }


def streamed(server: Running, body: dict[str, Any]) -> list[str]:
    return [event["content"] for event in server.events("/completion", body)]


def idle(server: Running) -> bool:
    return not any(slot["is_processing"] for slot in server.client.get("/slots").json())


def test_stop_string_is_cut_and_never_leaks(server: Running) -> None:
    body = {**said("The quick brown fox"), "stop": ["own fox"]}
    chunks = streamed(server, body)
    assert "".join(chunks) == "The quick br"
    assert server.post("/completion", body).json()["content"] == "The quick br"
    final = server.events("/completion", body)[-1]
    assert (final["stop_type"], final["stopping_word"]) == ("word", "own fox")


def test_text_held_back_is_flushed_when_no_stop_follows(server: Running) -> None:
    assert "".join(streamed(server, {**said("The quick brown f"), "stop": ["own fox"]})) == "The quick brown f"


@pytest.mark.parametrize("text", ["😀 ok", "naïve 👩‍👩‍👧 日本語", "👍🏽"])
def test_characters_of_several_tokens_stay_whole(server: Running, text: str) -> None:
    events = server.events("/completion", said(text))
    assert all("\ufffd" not in event["content"] for event in events)
    assert "".join(event["content"] for event in events) == text
    assert server.post("/completion", said(text)).json()["content"] == text
    assert events[-1]["tokens_predicted"] > len(text.split())


@pytest.mark.parametrize("path", ["/completion", "/v1/completions", "/v1/chat/completions"])
def test_stream_equals_the_whole(server: Running, path: str) -> None:
    body = {"prompt": "The capital of France is", "messages": HI, "max_tokens": 12, "temperature": 0}
    whole = server.post(path, body).json()
    events = [e for e in server.events(path, body) if e != "[DONE]"]
    if path == "/completion":
        assert "".join(e["content"] for e in events) == whole["content"] != ""
    elif path == "/v1/completions":
        assert "".join(e["choices"][0]["text"] for e in events) == whole["choices"][0]["text"] != ""
    else:
        text = "".join(e["choices"][0]["delta"].get("content") or "" for e in events)
        assert text == whole["choices"][0]["message"]["content"] != ""


def test_schema_and_json_object_give_json(server: Running) -> None:
    schema = {"type": "object", "properties": {"a": {"const": 1}}, "required": ["a"], "additionalProperties": False}
    body = {"messages": HI, "max_tokens": 60, "temperature": 0}
    for response_format in (
        {"type": "json_schema", "json_schema": {"schema": schema}},
        {"type": "json_object", "schema": schema},
    ):
        answer = server.post("/v1/chat/completions", {**body, "response_format": response_format}).json()
        assert json.loads(answer["choices"][0]["message"]["content"]) == {"a": 1}
    answer = server.post("/completion", {"prompt": "x", "n_predict": 60, "json_schema": schema}).json()
    assert json.loads(answer["content"]) == {"a": 1}


def test_template_is_the_models(server: Running) -> None:
    text = server.post("/apply-template", {"messages": [{"role": "user", "content": "hi"}]}).json()["prompt"]
    assert text.endswith("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n")
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    text = server.post("/apply-template", {"messages": [{"role": "user", "content": parts}]}).json()["prompt"]
    assert "user\na\nb<|im_end|>" in text
    prefilled = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "Sure,"}]
    assert server.post("/apply-template", {"messages": prefilled}).json()["prompt"].endswith("assistant\nSure,")


def test_tokenize_as_llama_server_does(server: Running) -> None:
    assert server.post("/tokenize", {"content": "Hello world"}).json() == {"tokens": [19556, 905]}
    assert server.post("/detokenize", {"tokens": [19556, 905]}).json() == {"content": "Hello world"}
    assert server.post("/tokenize", {"content": "Hello <|im_end|> á", "with_pieces": True}).json()["tokens"][-1] == {
        "id": 5415,
        "piece": "á",
    }


def test_grammar_that_is_none(server: Running) -> None:
    response = server.post("/completion", {"prompt": "a", "grammar": "root ::= (x", "stream": True})
    assert response.status_code == 400
    assert "grammar" in response.json()["error"]["message"]
    assert idle(server)


def test_client_that_closes_after_three_chunks_frees_the_slot(server: Running) -> None:
    engine, n_decode_at_cancel = server.engine, []
    cancel = engine.cancel
    engine.cancel = lambda request_id: (n_decode_at_cancel.append(engine.stats.n_decode), cancel(request_id))
    try:
        connection = raw_post(server.port, "/completion", FOREVER)
        data = b""
        while data.count(b'"stop":false') < 3:
            data += connection.recv(65536)
        connection.close()
        assert until(lambda: len(n_decode_at_cancel) == 1)
        assert until(lambda: idle(server))
    finally:
        del engine.cancel
    # One step may be in flight and one may be planned when the cancel arrives; hundreds were asked for.
    assert engine.stats.n_decode - n_decode_at_cancel[0] <= 2


def test_client_that_leaves_while_its_prompt_is_computed(server: Running) -> None:
    n_before = server.engine.stats.n_prompt_tokens
    connection = raw_post(server.port, "/completion", {**FOREVER, "prompt": [100 + i for i in range(450)]})
    assert until(lambda: server.engine.stats.n_prompt_tokens > n_before)
    connection.close()
    assert until(lambda: idle(server))
    assert server.post("/completion", {"prompt": "a", "n_predict": 1}).status_code == 200


def test_cancelled_neighbour_in_the_queue_changes_nothing(library: object, smol_model: Path) -> None:
    with serve(smol_model, n_parallel=1, n_ctx=512) as alone:
        body = {**FOREVER, "n_predict": 60}
        expected = streamed(alone, body)
        with alone.client.stream("POST", "/completion", json=body) as response:
            events = read_events(response)
            got = [next(events)["content"]]
            n_requests = alone.engine.stats.n_predicted
            b = raw_post(alone.port, "/completion", {"prompt": "other", "stream": True})
            got.append(next(events)["content"])
            b.close()
            got += [event["content"] for event in events]
        assert "".join(got) == "".join(expected)
        assert until(lambda: idle(alone))
        assert alone.engine.stats.n_predicted - n_requests <= 60


def test_same_prompt_twice_on_a_hybrid_model(library: object, micro_model: Path) -> None:
    body = {"prompt": "the same words again and again", "n_predict": 3, "temperature": 0, "return_tokens": True}
    with serve(micro_model) as hybrid:
        assert hybrid.engine.model.is_hybrid or hybrid.engine.model.is_recurrent
        first, second = (hybrid.post("/completion", body) for _ in range(2))
    assert (first.status_code, second.status_code) == (200, 200)
    assert first.json()["tokens"] == second.json()["tokens"]


def test_context_ends_where_the_training_did(
    library: object, synth_model: Callable[..., Path], capfd: pytest.CaptureFixture[str]
) -> None:
    """And not where a stretched model's does."""
    model = synth_model(ctx=256)
    body = {"prompt": "x " * 200, "n_predict": 1000, "ignore_eos": True, "temperature": 0}
    with serve(model, n_parallel=1) as short:
        assert short.client.get("/props").json()["default_generation_settings"]["n_ctx"] == 256
        answer = short.post("/completion", body).json()
        assert answer["truncated"]
        assert answer["tokens_evaluated"] + answer["tokens_predicted"] <= 256 + 1
        assert short.post("/completion", {"prompt": "x " * 300}).json()["error"]["n_ctx"] == 256
    assert "trained with 256" in capfd.readouterr().err
    with serve(model, n_parallel=1, rope_scaling="linear", rope_scale=4.0) as stretched:
        assert stretched.client.get("/props").json()["default_generation_settings"]["n_ctx"] == 1024


def test_long_body_goes_through_the_parse_process(server: Running) -> None:
    body = {"prompt": "short", "n_predict": 4, "temperature": 0, "padding": "x" * 100_000}
    small = server.post("/completion", {**body, "padding": ""}).json()
    large = server.post("/completion", body).json()
    assert large["content"] == small["content"]
    assert server.app.service._parser is not None
    assert server.app.service._parser.pid is not None
    response = server.post("/v1/chat/completions", {"messages": [{"role": "user", "content": "a b " * 30_000}]})
    assert response.json()["error"]["type"] == "exceed_context_size_error"


def test_last_user_message_is_found(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    submitted: list[Any] = []
    submit: Callable[[Any], None] = server.engine.submit
    monkeypatch.setattr(server.engine, "submit", lambda request: (submitted.append(request), submit(request)))
    messages = [
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": "two"},
        {"role": "user", "content": "three"},
    ]
    server.post("/v1/chat/completions", {"messages": messages, "max_tokens": 1})
    (request,) = submitted
    (start,) = request.user_starts
    assert server.engine.vocab.detokenize(request.prompt[start:]).startswith("<|im_start|>user\nthree")
