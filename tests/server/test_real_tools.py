"""Tool calls of a real model: a grammar makes it call, and what it calls is read."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from harness import Running, running
from test_tool_answers import assembled, plain, whole
from tool_texts import FUNCTIONS_TEMPLATE, HERMES_TEMPLATE

from llamamg import loading
from llamamg.config import Config, ContextConfig, GenerationConfig, ModelConfig, PluginsConfig, ServerConfig
from llamamg.plugins import PluginSet

# Nothing of any length: a small model does not find an end by itself.
SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Oslo", "Paris", "Rome"]}, "days": {"type": "integer"}},
    "required": ["city"],
}
TOOL = {"type": "function", "function": {"name": "weather", "description": "tells the weather", "parameters": SCHEMA}}
PATH = "/v1/chat/completions"
ASK = {
    "messages": [{"role": "user", "content": "What is the weather in Paris?"}],
    "tools": [TOOL],
    "tool_choice": "required",
    "parallel_tool_calls": False,
    "temperature": 0,
    "max_tokens": 120,
}


@pytest.fixture(scope="module", params=[HERMES_TEMPLATE, FUNCTIONS_TEMPLATE], ids=["json", "tagged"])
def server(library: object, smol_model: Path, request: pytest.FixtureRequest) -> Iterator[Running]:
    config = Config(
        ModelConfig(smol_model),
        context=ContextConfig(n_ctx=2048, n_parallel=2, n_batch=128, n_ubatch=64, n_threads=1, n_threads_batch=1),
        generation=GenerationConfig(chat_template=request.param),
        server=ServerConfig(port=0, alias=("smol",)),
        plugins=PluginsConfig(none=True),
    )
    engine = loading.load(config, PluginSet.discover(config.plugins))
    with running(engine, engine.config) as found:
        yield found


def test_required_call_comes_parsed(server: Running) -> None:
    message, reason = plain(whole(server, ASK))
    (call,) = message["tool_calls"]
    assert (message["content"], call["name"], reason) == ("", "weather", "tool_calls")
    arguments = json.loads(call["arguments"])
    assert arguments.pop("city") in ("Oslo", "Paris", "Rome")
    assert all(key == "days" and type(value) is int for key, value in arguments.items())
    assert assembled(server.events(PATH, ASK)) == (message, reason)


def test_stop_word_inside_a_call_cuts_it(server: Running) -> None:
    body: dict[str, Any] = {**ASK, "stop": ["weather"]}
    message, reason = plain(whole(server, body))
    assert message["content"].startswith("<tool_call>\n")
    assert ("tool_calls" in message, "weather" in message["content"], reason) == (False, False, "stop")
    assert assembled(server.events(PATH, body)) == (message, reason)


def test_call_can_be_answered(server: Running) -> None:
    """What clients send back is rendered, and its arguments are what the template wants."""
    call = {"id": "x", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Paris"}'}}
    messages = [
        *ASK["messages"],  # type: ignore[misc]
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "x", "content": "rain"},
    ]
    text = server.post("/apply-template", {**ASK, "messages": messages}).json()["prompt"]
    assert "<tool_call>" in text.split("What is the weather")[1]
    answer = whole(server, {**ASK, "messages": messages, "tool_choice": "auto", "max_tokens": 8})
    assert answer["choices"][0]["finish_reason"] in ("length", "stop", "tool_calls")
