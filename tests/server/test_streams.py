"""What goes over the wire while text is generated: order, ends, errors, several parts, and clients that leave."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from fake_engine import FakeEngine, Step, fake_config, finished, refuse
from harness import Running, read_events, running

from llamamg.request import Delta, Failed, FinishReason, Request, Started

HI = [{"role": "user", "content": "hi"}]


def until(condition: Callable[[], bool], seconds: float = 5.0) -> bool:
    """Wait for something another thread does."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.005)
    return True


def held(gate: threading.Event, text: str = "abc") -> Callable[[Request], Iterator[Step]]:
    """Three deltas, then nothing until the gate opens."""

    def script(request: Request) -> Iterator[Step]:
        yield [Started(0, 0)]
        for i, c in enumerate(text):
            yield [Delta(c, (ord(c),), i + 1)]
        yield gate
        yield [finished(request, text)]

    return script


def raw_post(port: int, path: str, body: Any) -> socket.socket:
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
    connection = socket.create_connection(("127.0.0.1", port), 10)
    connection.sendall(head.encode() + data)
    return connection


def read_until(connection: socket.socket, part: bytes) -> bytes:
    data = b""
    while part not in data:
        received = connection.recv(65536)
        assert received, data
        data += received
    return data


@pytest.fixture
def gate() -> Iterator[threading.Event]:
    found = threading.Event()
    yield found
    found.set()


def test_stream_equals_the_whole(server: Running) -> None:
    for path, body in (
        ("/completion", {"prompt": "a"}),
        ("/v1/completions", {"prompt": "a"}),
        ("/v1/chat/completions", {"messages": HI}),
    ):
        whole = server.post(path, body).json()
        events = [e for e in server.events(path, body) if e != "[DONE]"]
        if path == "/completion":
            assert "".join(e["content"] for e in events) == whole["content"] == "hello"
            assert [t for e in events for t in e["tokens"]] == list(b"hello")
        elif path == "/v1/completions":
            assert "".join(e["choices"][0]["text"] for e in events) == whole["choices"][0]["text"] == "hello"
        else:
            text = "".join(e["choices"][0]["delta"].get("content") or "" for e in events)
            assert text == whole["choices"][0]["message"]["content"] == "hello"


@pytest.mark.parametrize("asked", [True, False])
def test_usage_chunk_only_when_asked(server: Running, asked: bool) -> None:
    events = server.events("/v1/chat/completions", {"messages": HI, "stream_options": {"include_usage": asked}})
    assert events[-1] == "[DONE]"
    without_choices = [e for e in events[:-1] if e["choices"] == []]
    assert len(without_choices) == int(asked)
    if asked:
        assert events[-2] is without_choices[0]
        assert events[-2]["usage"]["completion_tokens"] == 5
    assert [e["choices"][0]["finish_reason"] for e in events[:-1] if e["choices"]][-1] == "length"


def test_text_held_back_comes_before_the_end(server: Running) -> None:
    def script(request: Request) -> Iterator[Step]:
        yield [Started(0, 0), Delta("The ", (1,), 1), Delta("", (2,), 2)]
        yield [finished(request, "The qu", tail="qu", reason=FinishReason.EOS)]

    server.engine.script = script
    chat = server.events("/v1/chat/completions", {"messages": HI})
    assert [e["choices"][0]["delta"].get("content") for e in chat[:-1]] == [None, "The ", "qu", None]
    assert chat[-2]["choices"][0]["finish_reason"] == "stop"
    native = server.events("/completion", {"prompt": "a"})
    assert [e["content"] for e in native] == ["The ", "", "qu", ""]


def test_role_comes_even_without_text(server: Running) -> None:
    def script(request: Request) -> Iterator[Step]:
        yield [Started(0, 0), finished(request, "", reason=FinishReason.EOS, n_decoded=1)]

    server.engine.script = script
    events = server.events("/v1/chat/completions", {"messages": HI})
    assert events[0]["choices"][0]["delta"] == {"role": "assistant", "content": None}
    assert events[1]["choices"][0]["finish_reason"] == "stop"


def test_ids_stay_and_answers_differ(server: Running) -> None:
    first, second = (server.events("/v1/chat/completions", {"messages": HI})[:-1] for _ in range(2))
    assert len({e["id"] for e in first}) == 1
    assert first[0]["id"] != second[0]["id"]
    assert first[0]["id"].startswith("chatcmpl-")
    assert first[0]["system_fingerprint"] == "b1-7e4c0a9"


def test_logprobs_of_chat(server: Running) -> None:
    body = {"messages": HI, "logprobs": True, "top_logprobs": 2, "max_tokens": 3}
    content = server.post("/v1/chat/completions", body).json()["choices"][0]["logprobs"]["content"]
    assert [c["token"] for c in content] == ["h", "e", "l"]
    assert len(content[0]["top_logprobs"]) == 2
    streamed = [
        c
        for e in server.events("/v1/chat/completions", body)[:-1]
        for c in (e["choices"][0].get("logprobs") or {"content": []})["content"]
    ]
    assert streamed == content


def test_probabilities_after_sampling_have_their_names(server: Running) -> None:
    body = {"prompt": "a", "n_probs": 2, "post_sampling_probs": True, "n_predict": 1}
    (one,) = server.post("/completion", body).json()["completion_probabilities"]
    assert one.keys() == {"id", "token", "bytes", "prob", "top_probs"}
    assert one["top_probs"][0].keys() == {"id", "token", "bytes", "prob"}


def test_n_completions_in_one_stream(server: Running) -> None:
    body = {"messages": HI, "n": 2, "seed": 5, "stream_options": {"include_usage": True}}
    events = server.events("/v1/chat/completions", body)
    texts = {0: "", 1: ""}
    for event in events[:-2]:
        for choice in event["choices"]:
            texts[choice["index"]] += choice["delta"].get("content") or ""
    assert texts == {0: "hello", 1: "hello"}
    assert events[-2]["usage"]["completion_tokens"] == 10
    assert events[-2]["usage"]["prompt_tokens"] == len(server.engine.requests[0].prompt)
    assert [r.sampling.seed for r in server.engine.requests] == [5, 6]
    whole = server.post("/v1/chat/completions", {"messages": HI, "n": 2}).json()
    assert [c["index"] for c in whole["choices"]] == [0, 1]


def test_several_prompts(server: Running) -> None:
    answer = server.post("/completion", {"prompt": ["a", [98, 99], [100, "e"]], "n_predict": 1}).json()
    assert [one["prompt"] for one in answer] == ["a", "bc", "de"]
    assert [one["index"] for one in answer] == [0, 1, 2]


def test_failure_before_the_first_byte_is_a_plain_error() -> None:
    engine = FakeEngine()
    engine.script = refuse(Failed(503, "unavailable_error", "no"))
    with running(engine) as server:
        response = server.post("/completion", {"prompt": "a", "stream": True})
    assert response.status_code == 503
    assert response.json() == {"error": {"code": 503, "type": "unavailable_error", "message": "no"}}


@pytest.mark.parametrize("path", ["/completion", "/v1/chat/completions"])
def test_failure_in_the_stream_is_its_last_event(server: Running, path: str) -> None:
    def script(request: Request) -> Iterator[Step]:
        yield [Started(0, 0), Delta("a", (97,), 1)]
        yield [Failed(500, "server_error", "broken", {"more": 1})]

    server.engine.script = script
    events = server.events(path, {"prompt": "a", "messages": HI})
    assert events[-1] == {"error": {"code": 500, "type": "server_error", "message": "broken", "more": 1}}
    assert "[DONE]" not in events
    assert server.client.get("/health").status_code == 200


def test_failing_part_cancels_its_siblings(server: Running, gate: threading.Event) -> None:
    def script(request: Request) -> Iterator[Step]:
        if len(server.engine.requests) == 2 and request is server.engine.requests[1]:
            yield [Failed(500, "server_error", "broken")]
        yield gate
        yield [finished(request, "a")]

    server.engine.script = script
    assert server.post("/completion", {"prompt": ["a", "b"]}).status_code == 500
    assert until(lambda: server.engine.cancelled == [server.engine.requests[0].id])


def test_client_that_closes_after_three_chunks_is_cancelled_at_once(server: Running, gate: threading.Event) -> None:
    server.engine.script = held(gate)
    connection = raw_post(server.port, "/completion", {"prompt": "a", "stream": True})
    read_until(connection, b'"content":"c"')
    assert server.engine.cancelled == []
    connection.close()
    assert until(lambda: server.engine.cancelled == [server.engine.requests[0].id])
    assert until(lambda: len(server.app.service.exchanges) == 0)


def test_client_without_a_stream_that_leaves_is_cancelled(server: Running, gate: threading.Event) -> None:
    server.engine.script = held(gate)
    connection = raw_post(server.port, "/completion", {"prompt": "a"})
    assert until(lambda: len(server.engine.begun) == 1)
    connection.close()
    assert until(lambda: len(server.engine.cancelled) == 1)


def test_queued_request_whose_client_is_gone_never_starts() -> None:
    gate, engine = threading.Event(), FakeEngine(n_slots=1)
    engine.script = held(gate)
    with (
        running(engine) as server,
        server.client.stream("POST", "/completion", json={"prompt": "A", "stream": True}) as a,
    ):
        events = read_events(a)
        seen = [next(events)["content"] for _ in range(3)]
        b = raw_post(server.port, "/completion", {"prompt": "B", "stream": True})
        assert until(lambda: len(engine.requests) == 2)
        b.close()
        assert until(lambda: engine.cancelled == [engine.requests[1].id])
        gate.set()
        rest = list(events)
        assert engine.begun == [engine.requests[0].id]
    assert seen == ["a", "b", "c"]
    assert [event["stop"] for event in rest] == [True]


def test_client_that_leaves_while_sending_its_body_is_no_error(server: Running) -> None:
    connection = socket.create_connection(("127.0.0.1", server.port), 10)
    connection.sendall(b'POST /completion HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{"prompt"')
    time.sleep(0.05)
    connection.close()
    assert server.post("/completion", {"prompt": "a"}).status_code == 200
    assert len(server.engine.requests) == 1


def test_two_streams_at_once_both_finish(server: Running) -> None:
    results: list[str] = []

    def read() -> None:
        results.append("".join(e["content"] for e in server.events("/completion", {"prompt": "a"})))

    threads = [threading.Thread(target=read) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert results == ["hello", "hello"]


def test_silence_is_broken_by_comments(gate: threading.Event) -> None:
    engine = FakeEngine()
    engine.script = held(gate)
    with running(engine) as server:
        connection = raw_post(server.port, "/completion", {"prompt": "a", "stream": True, "sse_ping_interval": 1})
        read_until(connection, b"\r\n:\n\n\r\n")
        gate.set()
        read_until(connection, b'"stop":true')
        connection.close()


def test_slow_reader_gets_everything_and_holds_up_nobody(server: Running) -> None:
    n, size = 400, 50_000

    def script(request: Request) -> Iterator[Step]:
        yield [Started(0, 0)]
        if request.stream:
            for i in range(n):
                yield [Delta(chr(97 + i % 26) * size, (97,), i + 1)]
        yield [finished(request, "end", tail="end")]

    server.engine.script = script
    connection = raw_post(server.port, "/completion", {"prompt": "a", "stream": True})
    assert until(lambda: len(server.engine.begun) == 1)
    assert server.post("/completion", {"prompt": "b"}).status_code == 200
    # The engine is through with it long before the first byte is read: 20 MB are more than the sockets hold.
    assert until(lambda: all(part.ended for exchange in server.app.service.exchanges.each() for part in exchange.parts))
    assert until(lambda: server.engine.idle)
    data = read_until(connection, b"0\r\n\r\n")
    connection.close()
    body = b"".join(data.split(b"\r\n\r\n", 1)[1].split(b"\r\n")[1::2])
    events = [json.loads(line[6:]) for line in body.decode().split("\n\n") if line.startswith("data: ")]
    assert [e["content"][:1] for e in events[:n]] == [chr(97 + i % 26) for i in range(n)]
    assert all(len(e["content"]) == size for e in events[:n])
    assert [e["content"] for e in events[n:]] == ["end", ""]


def test_shutdown_ends_running_streams_with_an_error(server: Running, gate: threading.Event) -> None:
    server.engine.script = held(gate)
    connection = raw_post(server.port, "/completion", {"prompt": "a", "stream": True})
    read_until(connection, b'"content":"c"')
    server.loop.call_soon_threadsafe(server.app.service.cut)
    assert b"shutting down" in read_until(connection, b"0\r\n\r\n")
    connection.close()
    assert until(lambda: len(server.engine.cancelled) == 1)


def test_keep_alive_connection_serves_stream_after_stream(server: Running) -> None:
    for _ in range(3):
        assert server.events("/v1/chat/completions", {"messages": HI})[-1] == "[DONE]"


def test_sibling_completions_do_not_share_a_chosen_slot(server: Running) -> None:
    server.post("/completion", {"prompt": "a", "n": 2, "id_slot": 3})
    assert [r.id_slot for r in server.engine.requests] == [1, -1]  # 3 wraps around two slots


def test_config_that_turns_slots_off() -> None:
    with running(config=fake_config(port=0, endpoint_slots=False)) as server:
        response = server.client.get("/slots")
    assert response.status_code == 501
    assert "--slots" in response.json()["error"]["message"]
