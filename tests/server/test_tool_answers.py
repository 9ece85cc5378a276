"""Tool calls over HTTP: what clients get, whole and streamed, when the model's text has calls in it."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fake_engine import FakeChat, FakeEngine, FakeVocab, Script, Step, fake_config, fake_context
from fake_engine import finished as finished_event
from harness import Running, running
from test_streams import raw_post, read_until, until
from tool_texts import TOOLS, json_call, tagged_call

from llamamg.request import Delta, FinishReason, Request, Started, Timings, TokenProb
from llamamg.server.prepare import PrepareContext, prepare

PATH = "/v1/chat/completions"
CALL = {"json": json_call, "tagged": tagged_call}
ARGUMENTS = {"path": "a.py", "text": 'print("<hi>")\n\n# <tool_call>', "mode": 3}
BODY = {"messages": [{"role": "user", "content": "hi"}], "tools": TOOLS}


class ToolChat(FakeChat):
    """The fake template, said to write calls in one syntax."""

    def __init__(self, syntax: str) -> None:
        self.tool_syntax = syntax


class ThinkingChat(ToolChat):
    """One that opens a think block."""

    def render(self, messages: Any, tools: Any = None, add_generation_prompt: bool = True, kwargs: Any = None) -> str:
        return super().render(messages, tools, add_generation_prompt, kwargs) + "<think>\n" * add_generation_prompt


def tool_context(syntax: str = "json", chat: type[ToolChat] = ToolChat) -> PrepareContext:
    return dataclasses.replace(fake_context(100_000), chat=chat(syntax))  # type: ignore[arg-type]


@pytest.fixture(params=sorted(CALL))
def syntax(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def server(syntax: str) -> Iterator[Running]:
    with running(FakeEngine(n_ctx_slot=100_000), context=tool_context(syntax)) as found:
        yield found


def tell(*texts: str, reason: FinishReason = FinishReason.EOS, n_piece: int = 3, n_tail: int = 0) -> Script:
    """Each request the next text, in pieces; the last `n_tail` characters come with the end."""
    left = list(texts)

    def script(request: Request) -> Iterator[Step]:
        text = left.pop(0) if len(left) > 1 else left[0]
        yield [Started(0, 0)]
        n = len(text) - n_tail
        if request.stream:
            for i in range(0, n, n_piece):
                piece = text[i : min(i + n_piece, n)]
                probs = (TokenProb(65, -0.5, ()),) if request.sampling.n_probs else ()
                timings = Timings(predicted_n=i + 1) if request.timings_per_token else None
                yield [Delta(piece, tuple(piece.encode()), i + 1, probs, timings)]
        yield [finished_event(request, text, reason=reason, tail=text[n:] if request.stream else "")]

    return script


def whole(server: Running, body: dict[str, Any]) -> dict[str, Any]:
    response = server.post(PATH, body)
    assert response.status_code == 200, response.text
    found: dict[str, Any] = response.json()
    return found


def assembled(events: list[Any], index: int = 0) -> tuple[dict[str, Any], str]:
    """The message a client puts together from a stream, and the finish reason. Ids are checked and left out."""
    message: dict[str, Any] = {"content": ""}
    reason = ""
    calls: list[dict[str, Any]] = []
    ids: set[str] = set()
    for event in events:
        for choice in event["choices"] if event != "[DONE]" else ():
            if choice["index"] != index:
                continue
            delta = choice["delta"]
            reason = choice["finish_reason"] or reason
            message["role"] = delta.get("role", message.get("role"))
            message["content"] += delta.get("content") or ""
            for piece in delta.get("tool_calls", ()):
                if piece["index"] == len(calls):
                    assert piece["type"] == "function"
                    assert len(piece["id"]) == 32
                    assert piece["id"] not in ids
                    ids.add(piece["id"])
                    calls.append({"name": piece["function"]["name"], "arguments": ""})
                else:
                    assert piece.keys() == {"index", "function"}
                    assert piece["function"].keys() == {"arguments"}
                calls[piece["index"]]["arguments"] += piece["function"]["arguments"]
    if calls:
        message["tool_calls"] = calls
    return message, reason


def plain(answer: dict[str, Any], index: int = 0) -> tuple[dict[str, Any], str]:
    """The same of an answer that is not streamed."""
    choice = answer["choices"][index]
    message = dict(choice["message"])
    if "tool_calls" in message:
        assert all(list(call) == ["type", "function", "id"] for call in message["tool_calls"])
        assert all(len(call["id"]) == 32 for call in message["tool_calls"])
        message["tool_calls"] = [call["function"] for call in message["tool_calls"]]
    return message, choice["finish_reason"]


@pytest.mark.parametrize("n_tail", [0, 5])
def test_call_is_told_as_one(server: Running, syntax: str, n_tail: int) -> None:
    server.engine.script = tell("Writing.\n" + CALL[syntax]("write", ARGUMENTS), n_tail=n_tail)
    message, reason = plain(whole(server, BODY))
    assert (message["role"], message["content"], reason) == ("assistant", "Writing.", "tool_calls")
    (call,) = message["tool_calls"]
    assert (call["name"], json.loads(call["arguments"])) == ("write", ARGUMENTS)
    assert assembled(server.events(PATH, BODY)) == (message, reason)


def test_stream_in_its_order(server: Running, syntax: str) -> None:
    text = "Hm. " + CALL[syntax]("weather", {"city": "Paris"})
    server.engine.script = tell(text, n_piece=len(text))
    *events, done = server.events(PATH, {**BODY, "stream_options": {"include_usage": True}})
    assert done == "[DONE]"
    assert events.pop()["choices"] == []
    deltas = [event["choices"][0]["delta"] for event in events]
    (piece,) = deltas[2].pop("tool_calls")
    assert deltas == [{"role": "assistant", "content": None}, {"content": "Hm."}, {}, {}]
    assert list(piece) == ["index", "id", "type", "function"]
    assert piece["function"]["name"] == "weather"
    assert json.loads(piece["function"]["arguments"]) == {"city": "Paris"}
    assert [e["choices"][0]["finish_reason"] for e in events] == [None, None, None, "tool_calls"]


def test_arguments_come_while_they_are_written(server: Running, syntax: str) -> None:
    server.engine.script = tell(CALL[syntax]("write", {"text": "word " * 50}), n_piece=5)
    events = server.events(PATH, BODY)
    pieces = [c["delta"]["tool_calls"][0] for e in events[:-1] for c in e["choices"] if "tool_calls" in c["delta"]]
    assert len(pieces) > 40
    assert [("id" in piece) for piece in pieces] == [True] + [False] * (len(pieces) - 1)


def test_several_calls_and_several_completions(server: Running, syntax: str) -> None:
    call = CALL[syntax]
    two = call("weather", {"city": "Rome"}) + "\n" + call("weather", {"city": "Oslo"})
    server.engine.script = tell("no call", two)
    answer = whole(server, {**BODY, "n": 2})
    assert plain(answer, 0) == ({"role": "assistant", "content": "no call"}, "stop")
    message, reason = plain(answer, 1)
    assert [json.loads(c["arguments"])["city"] for c in message["tool_calls"]] == ["Rome", "Oslo"]
    assert reason == "tool_calls"
    server.engine.script = tell("no call", two)
    events = server.events(PATH, {**BODY, "n": 2})
    assert [assembled(events, 0), assembled(events, 1)] == [plain(answer, 0), plain(answer, 1)]


def test_one_call_where_one_is_wanted(server: Running, syntax: str) -> None:
    call = CALL[syntax]("weather", {"city": "Rome"})
    server.engine.script = tell(call + "\n" + call)
    body = {**BODY, "parallel_tool_calls": False}
    message, reason = plain(whole(server, body))
    assert (len(message["tool_calls"]), message["content"], reason) == (1, call, "tool_calls")
    assert assembled(server.events(PATH, body)) == (message, reason)
    assert server.post(PATH, {**BODY, "parallel_tool_calls": "no"}).status_code == 400


@pytest.mark.parametrize(("reason", "word"), [(FinishReason.LIMIT, "length"), (FinishReason.WORD, "stop")])
def test_end_inside_a_call(server: Running, syntax: str, reason: FinishReason, word: str) -> None:
    text = CALL[syntax]("write", {"path": "a", "text": "some words"})
    text = text[: text.index("words")]
    server.engine.script = tell("Hm. " + text, reason=reason)
    assert plain(whole(server, BODY)) == ({"role": "assistant", "content": "Hm. " + text}, word)
    message, told = assembled(server.events(PATH, BODY))
    assert (message["content"], told) == ("Hm.", word)
    (call,) = message["tool_calls"]
    assert call["name"] == "write"
    assert call["arguments"].replace(" ", "") == '{"path":"a","text":"some'


def test_limit_behind_a_call_is_a_limit_and_a_stop_word_is_not(server: Running, syntax: str) -> None:
    for reason, word in ((FinishReason.LIMIT, "length"), (FinishReason.WORD, "tool_calls")):
        server.engine.script = tell(CALL[syntax]("weather", {"city": "Rome"}).removesuffix("call>"), reason=reason)
        message, told = plain(whole(server, BODY))
        assert (len(message["tool_calls"]), message["content"], told) == (1, "", word)
        assert assembled(server.events(PATH, BODY)) == (message, told)


def test_broken_call_leaves_the_rest_of_it_as_text(server: Running, syntax: str) -> None:
    text = CALL[syntax]("write", {"path": "a", "text": "b"})
    end = "</function>" if syntax == "tagged" else "}\n"
    server.engine.script = tell(text.replace(end, "oops" + end))
    content = text.replace(end, "oops" + end)
    assert plain(whole(server, BODY)) == ({"role": "assistant", "content": content}, "stop")
    message, told = assembled(server.events(PATH, BODY))
    assert (message["content"].strip(), told) == (content[content.index("oops") :], "stop")
    assert len(message["tool_calls"]) == 1


def test_unknown_function_is_text(server: Running, syntax: str) -> None:
    text = CALL[syntax]("nobody", {"a": "b"})
    server.engine.script = tell(text)
    expected = ({"role": "assistant", "content": text}, "stop")
    assert plain(whole(server, BODY)) == assembled(server.events(PATH, BODY)) == expected


@pytest.mark.parametrize(
    "more",
    [
        {"tool_choice": "none"},
        {"tools": []},
        {"tools": None},
        {"response_format": {"type": "json_object"}},
        {"json_schema": {"type": "object"}},
    ],
)
def test_what_is_not_parsed(server: Running, syntax: str, more: dict[str, Any]) -> None:
    text = CALL[syntax]("weather", {"city": "Rome"})
    server.engine.script = tell(text)
    body = {**BODY, **more}
    expected = ({"role": "assistant", "content": text}, "stop")
    assert plain(whole(server, body)) == assembled(server.events(PATH, body)) == expected


@pytest.mark.parametrize("choice", ["auto", None, {"type": "function", "function": {"name": "weather"}}])
def test_what_is_as_good_as_auto(server: Running, syntax: str, choice: Any) -> None:
    server.engine.script = tell(CALL[syntax]("weather", {"city": "Rome"}))
    assert plain(whole(server, {**BODY, "tool_choice": choice}))[1] == "tool_calls"


def test_tags_that_are_special_tokens_are_shown(syntax: str) -> None:
    class Special(FakeVocab):
        def tokenize(self, text: str | bytes, add_special: bool, parse_special: bool) -> Any:
            return np.array([300]) if text == "<tool_call>" else super().tokenize(text, add_special, parse_special)

    context = dataclasses.replace(tool_context(syntax), vocab=Special())
    more = {"preserved_tokens": ["x"]}
    assert prepare("chat", json.dumps({**BODY, **more}).encode(), context).limits["preserved_tokens"] == {300, ord("x")}
    assert prepare("chat", json.dumps({**BODY, "tools": []}).encode(), context).limits["preserved_tokens"] == set()


def test_probabilities_and_timings_come_with_every_token(server: Running, syntax: str) -> None:
    text = "A " + CALL[syntax]("weather", {"city": "Rome"})
    server.engine.script = tell(text)
    events = server.events(PATH, {**BODY, "logprobs": True, "timings_per_token": True})
    choices = [e["choices"][0] for e in events[:-1]]
    assert sum("logprobs" in choice for choice in choices) == -(-len(text) // 3)
    assert sum("timings" in e for e in events[:-1]) == -(-len(text) // 3) + 1
    assert assembled(events)[0]["tool_calls"][0]["name"] == "weather"


def test_empty_answer_has_a_role(server: Running) -> None:
    server.engine.script = tell("")
    events = server.events(PATH, BODY)
    assert [e["choices"][0]["delta"] for e in events[:-1]] == [{"role": "assistant", "content": None}, {}]
    assert plain(whole(server, BODY)) == ({"role": "assistant", "content": ""}, "stop")


def test_verbose_has_the_text_as_the_model_wrote_it(server: Running, syntax: str) -> None:
    text = CALL[syntax]("weather", {"city": "Rome"})
    server.engine.script = tell(text)
    assert whole(server, {**BODY, "verbose": True})["__verbose"]["content"] == text


def test_thought_that_the_prompt_opens_has_no_calls(syntax: str) -> None:
    call = CALL[syntax]("weather", {"city": "Rome"})
    thought = f"maybe {call}\n</think>"
    with running(FakeEngine(n_ctx_slot=100_000), context=tool_context(syntax, ThinkingChat)) as server:
        server.engine.script = tell(thought + "\n\n" + call)
        message, reason = plain(whole(server, BODY))
        assert (message["content"], len(message["tool_calls"]), reason) == (thought, 1, "tool_calls")
        assert assembled(server.events(PATH, BODY)) == (message, reason)
        server.engine.script = tell(call)
        ended = [*BODY["messages"], {"role": "assistant", "content": "no\n</think>\n"}]
        for messages, n_calls in ((BODY["messages"], 0), (ended, 1)):
            message, _ = plain(whole(server, {**BODY, "messages": messages}))
            assert len(message.get("tool_calls", ())) == n_calls


def test_client_that_leaves_inside_a_call(server: Running, syntax: str) -> None:
    gate = threading.Event()
    text = CALL[syntax]("write", {"path": "a", "text": "some words"})

    def script(request: Request) -> Iterator[Step]:
        yield [Started(0, 0), Delta(text[:-20], (1,), 1)]
        yield gate
        yield [finished_event(request, text)]

    server.engine.script = script
    connection = raw_post(server.port, PATH, {**BODY, "stream": True})
    read_until(connection, b'"write"')
    connection.close()
    assert until(lambda: len(server.engine.cancelled) == 1)
    gate.set()
    server.engine.script = tell(text)
    assert plain(whole(server, BODY))[1] == "tool_calls"


def test_long_bodies_that_another_process_parses(syntax: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(Path(__file__).parent), *sys.path]))
    make = {"json": json_context, "tagged": tagged_context}[syntax]
    config = fake_config(port=0, parse_inline_bytes=1000)
    with running(FakeEngine(n_ctx_slot=100_000), config, context=make(), make_context=make) as server:
        server.engine.script = tell(CALL[syntax]("write", ARGUMENTS))
        body = {**BODY, "messages": [{"role": "user", "content": "x" * 5000}]}
        message, reason = plain(whole(server, body))
        assert json.loads(message["tool_calls"][0]["arguments"]) == ARGUMENTS
        assert assembled(server.events(PATH, body)) == (message, reason)
        process = server.app.service._parser
        assert process is not None
        assert process.pid is not None


def json_context() -> PrepareContext:
    return tool_context("json")


def tagged_context() -> PrepareContext:
    return tool_context("tagged")


def test_required_call_is_forced_by_a_grammar(server: Running, syntax: str) -> None:
    server.engine.script = tell(CALL[syntax]("weather", {"city": "Rome"}))
    body = {**BODY, "tool_choice": "required"}
    assert plain(whole(server, body))[1] == "tool_calls"
    grammar = server.engine.requests[-1].sampling.grammar
    assert "<tool_call>" in grammar
    assert "weather" in grammar
    whole(server, {**body, "parallel_tool_calls": False})
    assert server.engine.requests[-1].sampling.grammar != grammar
    whole(server, BODY)
    assert server.engine.requests[-1].sampling.grammar == ""


@pytest.mark.parametrize(
    ("more", "part"),
    [
        ({"response_format": {"type": "json_object"}}, "JSON schema"),
        ({"grammar": "root ::= x"}, "grammar"),
        ({"tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "string"}}}]}, "'f'"),
        ({"preserved_tokens": "x"}, "preserved_tokens"),
    ],
)
def test_what_cannot_be_required(server: Running, more: dict[str, Any], part: str) -> None:
    response = server.post(PATH, {**BODY, "tool_choice": "required", **more})
    assert response.status_code == 400
    assert part in response.json()["error"]["message"]


def test_unknown_syntax_says_so_and_shows_the_text() -> None:
    with running(FakeEngine()) as server:
        server.engine.script = tell(json_call("weather", {}))
        assert plain(whole(server, {**BODY, "messages": BODY["messages"]}))[1] == "stop"
        response = server.post(PATH, {**BODY, "tool_choice": "required"})
        assert response.status_code == 501
        assert "this chat template" in response.json()["error"]["message"]


@pytest.mark.parametrize("chat", [ToolChat, ThinkingChat])
def test_thought_may_come_before_a_required_call(syntax: str, chat: type[ToolChat]) -> None:
    context = tool_context(syntax, chat)
    prepared = prepare("chat", json.dumps({**BODY, "tool_choice": "required"}).encode(), context)
    assert ("</think>" in prepared.sampling.grammar) == (chat is ThinkingChat)
