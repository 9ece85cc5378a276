"""Long bodies are parsed in a process of their own, with the same results and errors; a dead process is replaced."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fake_engine import FakeEngine, fake_config, fake_context
from harness import Running, running

from llamamg.config import GenerationConfig
from llamamg.server.errors import ApiError
from llamamg.server.parse_process import ParseProcess
from llamamg.server.prepare import Kind, PrepareContext, prepare


def make_context() -> PrepareContext:
    return fake_context(n_ctx_slot=1_000_000)


@pytest.fixture(scope="module")
def parser() -> Iterator[ParseProcess]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join([str(Path(__file__).parent), *sys.path]))
        found = ParseProcess(make_context)
        found.start()
        yield found
        found.stop()


BODIES: list[tuple[Kind, Any]] = [
    ("completion", {"prompt": "long " * 30_000, "temperature": 0.5, "stop": ["x"], "stream": True}),
    ("completion", {"prompt": [97] * 250_000}),
    ("completion", {"prompt": ["a", "b" * 100_000, [1, 2, 3]], "n": 2}),
    (
        "chat",
        {
            "messages": [
                {"role": "user", "content": "a"},
                {"role": "assistant", "content": "b"},
                {"role": "user", "content": "c"},
            ]
        },
    ),
    ("tokenize", {"content": "abc" * 10_000}),
    ("detokenize", {"tokens": [97] * 10_000}),
]


@pytest.mark.parametrize(("kind", "body"), BODIES)
def test_same_as_in_this_process(parser: ParseProcess, kind: Kind, body: Any) -> None:
    data = json.dumps(body).encode()
    here, there = prepare(kind, data, make_context()), parser.run(kind, [data[:10], data[10:]])
    assert [p.array().tolist() for p in there.prompts] == [p.array().tolist() for p in here.prompts]
    assert [(p.echo, p.user_starts) for p in there.prompts] == [(p.echo, p.user_starts) for p in here.prompts]
    assert there.answer == here.answer
    for name in ("kind", "sampling", "limits", "n_cmpl", "stream", "include_usage", "response_fields"):
        assert getattr(there, name) == getattr(here, name)


def test_errors_come_back_as_they_are(parser: ParseProcess) -> None:
    with pytest.raises(ApiError) as caught:
        parser.run("completion", [b'{"prompt": "a", "temperature": "x"}'])
    assert (caught.value.code, "temperature" in caught.value.message) == (400, True)
    with pytest.raises(ApiError) as caught:
        parser.run("completion", [b'{"prompt": "', b"\xff", b'"}'])
    assert caught.value.code == 400


def test_dead_process_is_an_error_once_and_then_replaced(parser: ParseProcess) -> None:
    parser.run("tokenize", [b'{"content": "a"}'])
    before = parser.pid
    assert before is not None
    os.kill(before, signal.SIGKILL)
    os.waitid(os.P_PID, before, os.WEXITED | os.WNOWAIT)
    parser.run("tokenize", [b'{"content": "a"}'])
    assert parser.pid != before


def test_interrupt_of_the_group_is_left_to_the_parent(parser: ParseProcess) -> None:
    parser.run("tokenize", [b'{"content": "a"}'])
    pid = parser.pid
    assert pid is not None
    os.kill(pid, signal.SIGINT)
    parser.run("tokenize", [b'{"content": "a"}'])
    assert parser.pid == pid


class Bomb:
    """A context whose vocabulary ends the process."""

    def __init__(self) -> None:
        self.__dict__.update(vars(fake_context().vocab))

    n_vocab, add_bos, bos_piece = 258, False, ""

    def tokenize(self, *_: Any) -> Any:
        os._exit(7)


def make_bomb() -> PrepareContext:
    context = fake_context()
    context.vocab = Bomb()  # type: ignore[assignment]
    return context


def test_crash_while_parsing_says_so(parser: ParseProcess) -> None:
    broken = ParseProcess(make_bomb)
    for _ in range(2):
        with pytest.raises(ApiError) as caught:
            broken.run("completion", [b'{"prompt": "a"}'])
        assert caught.value.code == 500
        assert "exit code 7" in caught.value.message
    broken.stop()


def test_server_uses_it_above_the_limit_only(parser: ParseProcess, server: Running) -> None:
    engine, config = FakeEngine(n_ctx_slot=1_000_000), fake_config(port=0, parse_inline_bytes=1000)
    with running(
        engine, config, context=fake_context(1_000_000, 2, GenerationConfig()), make_context=make_context
    ) as long:
        process = long.app.service._parser
        assert process is not None
        long.post("/completion", {"prompt": "a" * 500, "n_predict": 1})
        assert process.pid is None
        answer = long.post("/completion", {"prompt": "b" * 200_000, "n_predict": 1}).json()
        assert process.pid is not None
        assert answer["tokens_evaluated"] == 200_000
        assert answer["prompt"] == "b" * 200_000
        assert long.post("/completion", {"prompt": 7, "x": "y" * 2000}).status_code == 400


def sleepy_context() -> PrepareContext:
    time.sleep(300)
    return make_context()


def test_stopping_does_not_wait_for_a_body_that_is_parsed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that is told to stop has no time for a child that others starve."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(Path(__file__).parent), *sys.path]))
    found, said = ParseProcess(sleepy_context), []

    def ask() -> None:
        with pytest.raises(ApiError) as caught:
            found.run("completion", [b'{"prompt": "x"}'])
        said.append(caught.value.code)

    threads = [threading.Thread(target=ask) for _ in range(2)]  # one waits for the answer, the other for its turn
    for thread in threads:
        thread.start()
    while found.pid is None:
        time.sleep(0.01)
    stopper = threading.Thread(target=found.stop, daemon=True)
    stopper.start()
    for thread in (stopper, *threads):
        thread.join(60)
        assert not thread.is_alive()
    assert (said, found.pid) == ([503, 503], None)
    found.start()
    assert found.pid is None, "nothing is started any more"
