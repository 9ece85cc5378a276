"""The plugin async-cache over a stand-in model whose cells hold the tokens themselves: a wrong row is a wrong answer."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest
from cache_server import Server, alone, talk
from prometheus_client import generate_latest

from llamamg import N_ROWS, admission
from llamamg.testing import ask


@pytest.mark.parametrize("hybrid", [False, True])
def test_a_conversation_comes_back_after_another_took_its_slot(serve: Callable[..., Server], hybrid: bool) -> None:
    server = serve(1, hybrid=hybrid)
    first, other = talk(700, 1), talk(650, 2)
    server.run(ask(first, n_predict=8))
    server.run(ask(other, n_predict=8))
    again = first + talk(30, 3)
    request = ask(again, n_predict=8)
    assert server.run(request) == [alone(again, hybrid=hybrid)]
    assert server.n_cached(request) == 700 - (4 if hybrid else 0)  # of a hybrid the snapshot near the prompt's end
    assert server.runner.kv.held[0][: len(again)] == again


@pytest.mark.parametrize("hybrid", [False, True])
def test_six_conversations_in_turn_answer_as_without_cache(serve: Callable[..., Server], hybrid: bool) -> None:
    server = serve(2, hybrid=hybrid)
    system = talk(300, 0)
    talks = [system + talk(200 + 70 * i, 10 + i) for i in range(6)]
    for turn in range(4):
        requests = [ask(t, n_predict=5) for t in talks]
        answers = [server.run(request)[0] for request in requests]
        for i, (t, answer) in enumerate(zip(talks, answers, strict=True)):
            assert answer == alone(t, 5, hybrid=hybrid), f"turn {turn}, conversation {i}"
            if turn:
                assert server.n_cached(requests[i]) > 300
        talks = [
            t + list(a.encode()) + talk(40, 100 * turn + i) for i, (t, a) in enumerate(zip(talks, answers, strict=True))
        ]
    assert server.parts.restorer.n_hits >= 12


def test_only_new_rows_are_copied(serve: Callable[..., Server]) -> None:
    server = serve(1)
    first = talk(700, 1)
    answer = server.run(ask(first, n_predict=5))[0]
    n_before = server.parts.saver.n_bytes
    assert n_before == 4 * 704  # the last token is sampled and not in the cache
    server.run(ask(first + list(answer.encode()) + talk(100, 2), n_predict=5))
    assert server.parts.saver.n_bytes - n_before == 4 * 105


def test_a_short_slot_does_not_hide_a_longer_prefix(serve: Callable[..., Server]) -> None:
    server = serve(1)
    long = talk(900, 1)
    server.run(ask(long, n_predict=2))
    server.run(ask(long[:300] + talk(100, 5), n_predict=2))  # the slot holds 300 tokens of it now
    request = ask(long, n_predict=8)
    assert server.run(request) == [alone(long)]
    assert server.n_cached(request) == 899


def test_the_next_user_of_a_slot_is_not_held_back_for_long_and_nothing_wrong_is_kept(
    serve: Callable[..., Server], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(admission, "COPY_S_MAX", 0.0)
    server = serve(1)
    gate = threading.Event()
    copied = [0]

    def slow() -> None:
        copied[0] += 1
        if copied[0] > 1:
            gate.wait(0.05)  # one chunk

    server.cells.slow = slow
    first, other = talk(2000, 1), talk(300, 2)
    server.engine.submit(ask(first, n_predict=2))
    while server.engine.step():
        pass
    transfer = server.engine.slots[0].copying
    assert transfer is not None
    assert not transfer.is_over
    request = ask(other, n_predict=4)
    server.engine.submit(request)
    server.engine.step()
    assert server.engine.queue_len() == 1
    started = time.perf_counter()
    server.engine.step()
    assert time.perf_counter() - started < 1.0
    assert transfer.limit == 0
    gate.set()
    server.cells.slow = lambda: None
    server.settle()
    assert server.text(request) == alone(other, 4)
    assert server.parts.saver.n_cut == 1
    again = ask(first, n_predict=4)
    assert server.run(again) == [alone(first, 4)]


def test_what_stays_is_saved_on_while_its_next_user_computes(serve: Callable[..., Server]) -> None:
    """A follow-up keeps the slot's tokens, so they go on being copied."""
    server = serve(1)
    gate = threading.Event()
    server.cells.slow = lambda: gate.wait(20) and None
    first = talk(1500, 1)
    server.engine.submit(ask(first, n_predict=2))
    while server.engine.step():
        pass
    follow_up = ask(first[:1200] + talk(50, 2), n_predict=4)
    threading.Timer(0.1, gate.set).start()  # the chunk being copied now reaches behind what stays only with an error
    server.engine.submit(follow_up)
    server.settle()
    assert server.text(follow_up) == alone(first[:1200] + talk(50, 2), 4)
    server.run(ask(talk(600, 9), n_predict=2))
    request = ask(first, n_predict=4)
    assert server.run(request) == [alone(first, 4)]
    assert server.n_cached(request) >= 1200


def test_others_go_on_while_a_slot_is_filled(serve: Callable[..., Server]) -> None:
    server = serve(2)
    stored, other = talk(1500, 1), talk(800, 2)
    server.run(ask(stored, n_predict=2), ask(other, n_predict=2))
    server.run(ask(talk(400, 3), n_predict=2), ask(talk(400, 4), n_predict=2))
    gate = threading.Event()
    server.cells.slow = lambda: gate.wait(20) and None
    decoder, waiting = ask(talk(50, 5), n_predict=60, id_slot=0), ask(stored, n_predict=8, id_slot=1)
    server.engine.submit(decoder)
    server.engine.step()
    server.engine.submit(waiting)
    for _ in range(30):
        server.engine.step()
    assert server.engine.slots[1].restoring
    assert server.engine.queue_len() == 1
    assert sum(len(s.tokens) for s in server.engine.slots if s.id == 0) > 70, "the decoder stood still"
    gate.set()
    server.cells.slow = lambda: None
    server.settle()
    assert server.text(waiting) == alone(stored)
    assert server.n_cached(waiting) == 1499


@pytest.mark.parametrize("appending", [True, False])
def test_a_request_cancelled_while_its_slot_is_filled_leaves_nothing(
    serve: Callable[..., Server], appending: bool
) -> None:
    server = serve(1)
    server.cells.appending = appending
    stored = talk(2000, 1)
    server.run(ask(stored, n_predict=2))
    server.run(ask(talk(400, 3), n_predict=2))
    server.cells.slow = lambda: time.sleep(0.02)
    request = ask(stored, n_predict=8)
    server.engine.submit(request)
    server.engine.step()
    assert server.engine.slots[0].restoring
    server.engine.cancel(request.id)
    server.engine.step()
    assert not server.engine.slots[0].busy
    assert server.runner.kv.held[0] == []
    owner = ask(talk(300, 7), n_predict=4)
    assert server.run(owner) == [alone(talk(300, 7), 4)]
    time.sleep(0.1)
    assert server.runner.kv.held[0][:300] == talk(300, 7), "a late write"


def test_a_restore_that_takes_too_long_is_given_up(serve: Callable[..., Server]) -> None:
    server = serve(1)
    stored = talk(1000, 1)
    server.run(ask(stored, n_predict=2))
    server.run(ask(talk(400, 3), n_predict=2))
    server.cells.slow = lambda: time.sleep(0.02)
    server.engine.scheduler._admission.restorer.timeout_s = 0.0
    request = ask(stored, n_predict=8)
    assert server.run(request) == [alone(stored)]
    assert server.n_cached(request) == 0


def test_a_copy_that_fails_costs_the_prefix_only(serve: Callable[..., Server]) -> None:
    server = serve(1)
    stored = talk(1000, 1)
    server.run(ask(stored, n_predict=2))
    server.run(ask(talk(400, 3), n_predict=2))

    def fail() -> None:
        raise OSError("the bus is on fire")

    server.cells.slow = fail
    request = ask(stored, n_predict=8)
    assert server.run(request) == [alone(stored)]
    assert server.n_cached(request) == 0
    assert server.parts.restorer.n_failed == 1
    assert server.plugins.enabled() == ["async-cache"]


def test_switched_off_while_it_saves(serve: Callable[..., Server]) -> None:
    """The engine itself sees to it that nobody reads a slot that is being overwritten."""
    server = serve(1)
    server.cells.slow = lambda: time.sleep(0.02)
    server.engine.submit(ask(talk(2000, 1), n_predict=2))
    while server.engine.step():
        pass
    transfer = server.engine.slots[0].copying
    server.plugins.toggle("async-cache", False)
    server.engine.submit(ask(talk(500, 2), n_predict=2))
    server.engine.step()
    assert transfer is not None
    assert transfer.limit == 0
    while server.engine.step():
        pass
    server.plugins.toggle("async-cache", True)
    server.cells.slow = lambda: None
    assert server.run(ask(talk(2000, 1), n_predict=4)) == [alone(talk(2000, 1), 4)]


def test_the_limit_holds_and_the_oldest_goes(serve: Callable[..., Server]) -> None:
    server = serve(1, ram="1")
    tree = server.parts.tree
    assert tree is not None
    tree.n_bytes_max = 6 * 4 * N_ROWS
    for seed in range(1, 8):
        server.run(ask(talk(500, seed), n_predict=2))
        assert tree.n_bytes <= tree.n_bytes_max
    assert tree.n_evicted >= 8
    request, gone = ask(talk(500, 6), n_predict=4), ask(talk(500, 1), n_predict=4)
    assert server.run(request) == [alone(talk(500, 6), 4)]
    assert server.n_cached(request) == 499
    assert server.run(gone) == [alone(talk(500, 1), 4)]
    assert server.n_cached(gone) == 0


def test_slots_saved_only_when_they_are_taken(serve: Callable[..., Server]) -> None:
    server = serve(1, **{"idle-slots": "off"})
    first = talk(700, 1)
    server.run(ask(first, n_predict=2))
    assert server.parts.saver.n_saved == 0
    server.run(ask(talk(600, 2), n_predict=2))
    assert server.parts.saver.n_saved == 1
    request = ask(first, n_predict=4)
    assert server.run(request) == [alone(first, 4)]
    assert server.n_cached(request) == 699


@pytest.mark.parametrize("hybrid", [False, True])
def test_rows_are_saved_before_the_next_user_overwrites_them(
    serve: Callable[..., Server], hybrid: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Six conversations at once in two slots: nobody waits for a slot to be saved, and all are found again."""
    monkeypatch.setattr("llamamg.slot.GIVE_WAY_S", 10.0)  # whatever else this machine does
    server = serve(2, hybrid=hybrid)
    server.cells.slow = lambda: time.sleep(0.001)
    system = talk(300, 0)
    talks = [system + talk(400 + 70 * i, 10 + i) for i in range(6)]
    for turn in range(3):
        requests = [ask(t, n_predict=5) for t in talks]
        answers = server.run(*requests)
        for i, (t, answer) in enumerate(zip(talks, answers, strict=True)):
            assert answer == alone(t, 5, hybrid=hybrid), f"turn {turn}, conversation {i}"
            if turn:
                assert server.n_cached(requests[i]) >= 696
        talks = [
            t + list(a.encode()) + talk(40, 100 * turn + i) for i, (t, a) in enumerate(zip(talks, answers, strict=True))
        ]


def test_a_slow_copy_is_given_up_where_the_next_user_writes(
    serve: Callable[..., Server], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(admission, "COPY_S_MAX", 0.0)
    server = serve(1)
    server.cells.slow = lambda: time.sleep(0.03)
    first = talk(3000, 1)
    server.engine.submit(ask(first, n_predict=2))
    while server.engine.step():
        pass
    time.sleep(0.1)
    transfer = server.engine.slots[0].copying
    assert transfer is not None
    assert not transfer.is_over
    server.engine.submit(ask(talk(400, 2), n_predict=2))
    while server.engine.step() or server.engine.queue_len():
        pass
    assert transfer.limit == 0
    server.cells.slow = lambda: None
    server.settle()
    again = ask(first, n_predict=4)
    assert server.run(again) == [alone(first, 4)]
    n_kept = server.n_cached(again)
    assert 0 < n_kept < 2999, "what was copied by then is kept, the rest is not"


@pytest.mark.parametrize("n_prefill", [0, 1])
def test_in_several_contexts(n_prefill: int) -> None:
    """Slots of two groups, prompts perhaps in a context of their own: sequences move, and answers stay what they are."""
    server = Server(4, n_groups=2, n_prefill_slots=n_prefill)
    system = talk(300, 0)
    talks = [system + talk(150 + 60 * i, 30 + i) for i in range(7)]
    for turn in range(3):
        requests = [ask(t, n_predict=5) for t in talks]
        answers = server.run(*requests)
        for i, (t, answer) in enumerate(zip(talks, answers, strict=True)):
            assert answer == alone(t, 5), f"turn {turn}, conversation {i}"
        talks = [
            t + list(a.encode()) + talk(30, 100 * turn + i) for i, (t, a) in enumerate(zip(talks, answers, strict=True))
        ]
    assert server.parts.restorer.n_hits > 0
    assert server.plugins.enabled() == ["async-cache"]
    server.stop()


def test_what_happened_is_in_the_metrics(serve: Callable[..., Server]) -> None:
    server = serve(1)
    for seed in (1, 2, 1):
        server.run(ask(talk(600, seed), n_predict=2))
    text = generate_latest(server.plugins.registry).decode()
    found = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    assert float(found["llamamg:async_cache_hits_total"]) == 1
    assert float(found["llamamg:async_cache_misses_total"]) == 2
    assert float(found["llamamg:async_cache_restored_tokens_total"]) == 600 == server.cache.effect
    assert float(found["llamamg:async_cache_saved_bytes_total"]) == 4 * 2 * 601
    assert float(found["llamamg:async_cache_bytes"]) == 6 * 4 * N_ROWS
    assert "threads: the cache is in main memory" in server.cache.note


def test_the_note_says_the_way_of_the_moment() -> None:
    server = Server()
    assert "threads: the cache is in main memory" in server.cache.note
    server.parts.copier.way = "one by one: the driver gave up"  # type: ignore[misc]
    assert "threads: one by one: the driver gave up" in server.cache.note
    assert server.cache.way == "threads: one by one: the driver gave up"
