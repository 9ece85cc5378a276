"""What clients get wrong: a clear error that names the field, and a server that goes on answering."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from harness import Running, running

HI = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def shared() -> Iterator[Running]:
    with running() as found:
        yield found


@pytest.fixture
def server(shared: Running) -> Running:
    """One server for all: whatever a client sends, the next one is served."""
    shared.engine.requests.clear()
    return shared


def error(server: Running, path: str, body: Any, status: int = 400) -> str:
    """The error's message; the shape and the server's health are checked on the way."""
    response = server.post(path, body)
    assert response.status_code == status, response.text
    found = response.json()["error"]
    assert found["code"] == status
    assert found["message"]
    assert server.post("/completion", {"prompt": "a", "n_predict": 1}).status_code == 200
    return str(found["message"])


BODIES = {
    "not JSON": b"{",
    "empty": b"",
    "no object": b"[1, 2]",
    "a word": b'"text"',
    "NaN": b'{"prompt": "a", "temperature": NaN}',
    "Infinity": b'{"prompt": "a", "temperature": Infinity}',
    "too large for a double": b'{"prompt": "a", "temperature": 1e999}',
    "no UTF-8": b'{"prompt": "\xff\xfe"}',
    "half a surrogate": b'{"prompt": "\\ud800"}',
    "too deep": b'{"prompt": ' + b"[" * 5000 + b"]" * 5000 + b"}",
}


@pytest.mark.parametrize("name", BODIES)
@pytest.mark.parametrize("path", ["/completion", "/v1/chat/completions", "/tokenize", "/apply-template"])
def test_body_that_is_no_json_object(server: Running, name: str, path: str) -> None:
    response = server.client.post(path, content=BODIES[name])
    assert response.status_code == 400
    assert response.json()["error"]["type"] == "invalid_request_error"
    assert "JSON" in response.json()["error"]["message"]
    assert server.client.get("/health").status_code == 200


WRONG_TYPES: dict[str, Any] = {
    "temperature": "warm",
    "top_k": [40],
    "n_predict": "many",
    "max_tokens": {},
    "stream": "yes",
    "stop": 7,
    "seed": "x",
    "logit_bias": 3,
    "samplers": 3,
    "cache_prompt": 1,
    "grammar": 5,
    "json_schema": "x",
    "response_fields": "content",
    "dry_sequence_breakers": "x",
    "preserved_tokens": 4,
    "stream_options": [],
    "id_slot": "0",
    "n_probs": True,
    "return_tokens": 0,
}


@pytest.mark.parametrize("name", WRONG_TYPES)
def test_wrong_type_names_the_field(server: Running, name: str) -> None:
    assert f"'{name}'" in error(server, "/completion", {"prompt": "a", name: WRONG_TYPES[name]})


@pytest.mark.parametrize("name", sorted(WRONG_TYPES))
def test_null_is_absent(server: Running, name: str) -> None:
    assert server.post("/completion", {"prompt": "a", "n_predict": 1, name: None}).status_code == 200


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("n_predict", -2),
        ("max_tokens", -5),
        ("n_predict", 2**31),
        ("max_tokens", 10**30),
        ("repeat_last_n", -1),
        ("n_keep", -2),
        ("min_keep", -1),
        ("adaptive_decay", 1.5),
        ("n", 3),
        ("n_cmpl", 0),
    ],
)
def test_hard_limit(server: Running, name: str, value: Any) -> None:
    message = error(server, "/completion", {"prompt": "a", name: value})
    assert message.startswith(f"Field '{name}': Value must be between ")
    assert "but got" in message


@pytest.mark.parametrize(
    ("name", "value", "kept"),
    [
        ("temperature", -3, 0.0),
        ("top_p", 7, 1.0),
        ("min_p", -1, 0.0),
        ("top_k", -1, 0),
        ("top_k", 10**12, 2**31 - 1),
        ("mirostat", 9, 2),
        ("n_probs", -4, 0),
        ("n_probs", 10**9, 258),
        ("seed", -1, 2**32 - 1),
        ("dry_base", 0.5, 1.75),
        ("top_k", 3.0, 3),
    ],
)
def test_soft_limit_clamps(server: Running, name: str, value: Any, kept: Any) -> None:
    answer = server.post("/completion", {"prompt": "a", "n_predict": 1, name: value}).json()
    assert answer["generation_settings"][name] == kept


@pytest.mark.parametrize(("n_predict", "n"), [(0, 1), (1, 1), (3, 3), (-1, 5), (2**31 - 1, 5)])
def test_number_of_tokens(server: Running, n_predict: int, n: int) -> None:
    assert server.post("/completion", {"prompt": "a", "n_predict": n_predict}).json()["tokens_predicted"] == n


def test_aliases_in_order(server: Running) -> None:
    body = {"prompt": "a", "max_tokens": 4, "max_completion_tokens": 3, "n_predict": None}
    assert server.post("/completion", body).json()["tokens_predicted"] == 3
    assert server.post("/completion", {**body, "n_predict": 2}).json()["tokens_predicted"] == 2


@pytest.mark.parametrize("prompt", ["", [], [""], [[]], {"prompt_string": ""}, None])
@pytest.mark.parametrize("stream", [False, True])
def test_empty_prompt(server: Running, prompt: Any, stream: bool) -> None:
    assert "prompt" in error(server, "/completion", {"prompt": prompt, "stream": stream})


def test_missing_prompt(server: Running) -> None:
    assert "prompt" in error(server, "/completion", {})
    assert "prompt" in error(server, "/v1/completions", {})


@pytest.mark.parametrize("prompt", [[1, -1], [258], [1.5, 2], [True, 1], 7, [1, None], [[1], 2], ["a", {}]])
def test_wrong_prompt(server: Running, prompt: Any) -> None:
    assert "prompt" in error(server, "/completion", {"prompt": prompt})


MESSAGES: dict[str, tuple[Any, str]] = {
    "none": (None, "'messages' is required"),
    "empty": ([], "'messages' must not be empty"),
    "text": ("hi", "Expected 'messages' to be an array"),
    "element": (["hi"], "Every element of 'messages' must be an object"),
    "no role": ([{"content": "a"}], "Every message must have a 'role' that is a string"),
    "no content": ([{"role": "user"}], "All non-assistant messages must contain 'content'"),
    "empty assistant": (
        [{"role": "user", "content": "a"}, {"role": "assistant"}],
        "Assistant message must contain either 'content' or 'tool_calls'!",
    ),
    "number": ([{"role": "user", "content": 5}], "Expected 'content' to be a string or an array"),
    "part": ([{"role": "user", "content": [{"type": "blob"}]}], "unsupported content[].type"),
    "two assistants": (
        [*HI, {"role": "assistant", "content": "a"}, {"role": "assistant", "content": "b"}],
        "Cannot have 2 or more assistant messages at the end of the list.",
    ),
}


@pytest.mark.parametrize("name", MESSAGES)
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/apply-template"])
def test_wrong_messages(server: Running, name: str, path: str) -> None:
    messages, expected = MESSAGES[name]
    assert error(server, path, {"messages": messages}) == expected


def test_image_is_refused_as_llama_server_does(server: Running) -> None:
    messages = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]
    assert "image input is not supported" in error(server, "/v1/chat/completions", {"messages": messages}, 500)


@pytest.mark.parametrize(
    ("body", "status", "part"),
    [
        ({"tool_choice": "required", "tools": [{"type": "function", "function": {"name": "f"}}]}, 501, "required"),
        ({"tool_choice": "sometimes", "tools": []}, 400, "tool_choice"),
        ({"tool_choice": "sometimes"}, 400, "tool_choice"),
        ({"tools": [1]}, 400, "tools"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}], "grammar": "root ::= x"}, 400, "grammar"),
        ({"response_format": {"type": "yaml"}}, 400, "yaml"),
        ({"response_format": "json"}, 400, "response_format"),
        ({"top_logprobs": 3}, 400, "top_logprobs"),
        ({"reasoning_format": "deepseek"}, 501, "reasoning_format"),
        ({"add_generation_prompt": True, "continue_final_message": True}, 400, "continue_final_message"),
        ({"chat_template_kwargs": {"enable_thinking": "yes"}}, 400, "enable_thinking"),
        ({"chat_template_kwargs": {"messages": []}}, 400, "chat_template_kwargs"),
    ],
)
def test_wrong_chat_option(server: Running, body: dict[str, Any], status: int, part: str) -> None:
    assert part in error(server, "/v1/chat/completions", {"messages": HI, **body}, status)


@pytest.mark.parametrize("tools", [None, []])
def test_nothing_to_choose_from_needs_no_parsing(server: Running, tools: Any) -> None:
    body = {"messages": HI, "tools": tools, "tool_choice": "required"}
    assert server.post("/v1/chat/completions", body).status_code == 200


@pytest.mark.parametrize(
    ("body", "status"),
    [
        ({"lora": [{"id": 0, "scale": 1}]}, 501),
        ({"grammar_lazy": True}, 501),
        ({"reasoning_budget_tokens": 10}, 501),
        ({"samplers": ["top_k", "magic"]}, 400),
        ({"samplers": "kQ"}, 400),
        ({"grammar": "root ::= x", "json_schema": {}}, 400),
    ],
)
def test_what_cannot_be_done_is_said(server: Running, body: dict[str, Any], status: int) -> None:
    error(server, "/completion", {"prompt": "a", **body}, status)


@pytest.mark.parametrize("body", [{"echo": True}, {"best_of": 2}, {"suffix": "x"}])
def test_openai_completion_options_that_are_not_there(server: Running, body: dict[str, Any]) -> None:
    error(server, "/v1/completions", {"prompt": "a", **body})


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ["/completion", "/v1/completions", "/v1/chat/completions"])
def test_too_long_prompt_before_any_header(server: Running, path: str, stream: bool) -> None:
    body = {"messages": [{"role": "user", "content": "x" * 600}], "prompt": "x" * 600, "stream": stream}
    response = server.post(path, body)
    assert response.status_code == 400
    assert response.headers["content-type"].startswith("application/json")
    found = response.json()["error"]
    assert found["type"] == "exceed_context_size_error"
    assert found["n_ctx"] == 512
    assert found["n_prompt_tokens"] >= 600
    assert server.engine.requests == []


def test_unknown_fields_are_ignored(server: Running) -> None:
    assert server.post("/completion", {"prompt": "a", "no_such_field": {"x": 1}}).status_code == 200


@pytest.mark.parametrize(
    ("path", "status"),
    [
        ("/nope", 404),
        ("/v1/nope", 404),
        ("/infill", 501),
        ("/v1/embeddings", 501),
        ("/v1/messages", 501),
        ("/slots/0", 501),
    ],
)
def test_unknown_or_missing_path(server: Running, path: str, status: int) -> None:
    error(server, path, {}, status)


def test_unknown_method(server: Running) -> None:
    assert server.client.get("/completion").status_code == 404
    assert server.client.delete("/health").json()["error"]["type"] == "not_found_error"


@pytest.mark.parametrize(("path", "part"), [("/metrics", "--metrics"), ("/props", "--props")])
def test_endpoint_that_is_off_says_which_option(server: Running, path: str, part: str) -> None:
    response = server.client.get(path) if path == "/metrics" else server.post(path, {})
    assert response.status_code == 501
    assert part in response.json()["error"]["message"]


def test_tokenize_edge_cases(server: Running) -> None:
    assert server.post("/tokenize", {}).json() == {"tokens": []}
    assert server.post("/detokenize", {}).json() == {"content": ""}
    assert server.post("/tokenize", {"content": ["a", 98, "<|im_end|>"]}).json() == {"tokens": [97, 98, 257]}
    assert server.post("/tokenize", {"content": "é", "with_pieces": True}).json()["tokens"][0] == {
        "id": 195,
        "piece": [195],
    }
    assert server.post("/tokenize", {"content": "<|im_end|>", "parse_special": False}).json()["tokens"][0] == 60
    assert "tokens" in error(server, "/detokenize", {"tokens": [1, 9999]})
    assert "content" in error(server, "/tokenize", {"content": 5})
