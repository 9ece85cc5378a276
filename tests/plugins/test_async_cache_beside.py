"""What async-cache does in a step in which others decode: copies are made once a batch is submitted, not before."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from cache_server import Server, alone, talk

from llamamg import arrange, staying
from llamamg.request import Request
from llamamg.testing import ask
from llamamg_plugins import async_cache_save
from llamamg_plugins.async_cache_hit import Hit
from llamamg_plugins.seq_compact import SeqCompact


class AlwaysCompact(SeqCompact):
    """Moves at every gap, whatever times say."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**{**options, "always": True})


def decoding(server: Server, n_predict: int = 600) -> Request:
    """A neighbour that goes on decoding."""
    neighbour = ask(talk(40, 9), n_predict=n_predict, id_slot=0)
    server.engine.submit(neighbour)
    for _ in range(4):
        server.engine.step()
    return neighbour


def until_over(server: Server, request: Request) -> None:
    server.engine.submit(request)
    while not any(
        id_ == request.id and hasattr(event, "text") and hasattr(event, "reason") for id_, event in server.events
    ):
        server.engine.step()


def test_a_save_is_prepared_behind_the_next_batch(serve: Callable[..., Server], monkeypatch: Any) -> None:
    server = serve(2)
    decoding(server)
    saver, at = server.parts.saver, []
    look = type(saver)._look
    monkeypatch.setattr(
        type(saver), "_look", lambda self, save: (at.append(server.runner.n_in_flight), look(self, save))
    )
    first = talk(1000, 1)
    until_over(server, ask(first, n_predict=2, id_slot=1))
    assert len(saver._unprepared) == 1
    assert not server.engine.slots[1].copying.is_over  # type: ignore[union-attr]
    assert not at
    server.engine.step()
    assert at == [1], "in the step, with its batch on the way"
    assert not saver._unprepared
    server.settle()
    request = ask([*first, 50, 51], n_predict=4, id_slot=0)
    assert server.run(request) == [alone([*first, 50, 51], 4)]
    assert server.n_cached(request) >= 1000


@pytest.mark.parametrize("hybrid", [False, True])
def test_a_slot_that_is_taken_at_once_is_saved_all_the_same(serve: Callable[..., Server], hybrid: bool) -> None:
    server = serve(2, hybrid=hybrid)
    decoding(server)
    first, other = talk(900, 1), talk(40, 2)
    until_over(server, ask(first, n_predict=2, id_slot=1))
    assert server.parts.saver._unprepared
    follow = ask(other, n_predict=4, id_slot=1)
    server.engine.submit(follow)
    server.engine.step()
    assert not server.parts.saver._unprepared
    server.settle()
    assert server.text(follow) == alone(other, 4, hybrid=hybrid)
    again = ask([*first, 60], n_predict=4, id_slot=0)
    assert server.run(again) == [alone([*first, 60], 4, hybrid=hybrid)]


def test_what_was_overwritten_while_the_plugin_was_off_is_not_kept(serve: Callable[..., Server]) -> None:
    server = serve(2)
    decoding(server)
    first, other = talk(900, 1), talk(900, 2)
    until_over(server, ask(first, n_predict=2, id_slot=1))
    assert server.parts.saver._unprepared
    server.plugins.toggle("async-cache", False)
    until_over(server, ask(other, n_predict=2, id_slot=1))
    server.plugins.toggle("async-cache", True)
    server.settle()
    for prompt in (first, other):
        assert server.run(ask([*prompt, 60], n_predict=4)) == [alone([*prompt, 60], 4)]


def test_a_save_takes_some_steps_when_there_is_little_time(serve: Callable[..., Server], monkeypatch: Any) -> None:
    server = serve(2)
    decoding(server)
    monkeypatch.setattr(async_cache_save, "N_PREPARE", 1)
    clock = iter(range(1 << 30))
    monkeypatch.setattr(async_cache_save.time, "perf_counter", lambda: float(next(clock)))
    saver, first = server.parts.saver, talk(1500, 1)
    until_over(server, ask(first, n_predict=2, id_slot=1))
    save, n_parts = saver._running[-1], []
    while saver._unprepared:
        saver.prepare(within_s=2.0)  # by this clock: two looks at it
        n_parts.append(len(save.parts))
    assert n_parts == [1, 2, 3, 4, 5, 6]
    monkeypatch.undo()
    server.settle()
    assert server.n_cached(_run(server, [*first, 60])) == 1500


def _run(server: Server, prompt: list[int]) -> Request:
    request = ask(prompt, n_predict=4)
    assert server.run(request) == [alone(prompt, 4)]
    return request


def test_a_restore_is_prepared_behind_the_batch_of_others(serve: Callable[..., Server], monkeypatch: Any) -> None:
    server = serve(2)
    first = talk(1500, 1)
    server.run(ask(first, n_predict=2, id_slot=1))
    server.run(ask(talk(800, 3), n_predict=2, id_slot=1))
    decoding(server)
    at: list[int] = []
    place = Hit._place
    monkeypatch.setattr(
        Hit, "_place", lambda self, within_s: (at.append(server.runner.n_in_flight), place(self, within_s))
    )
    request = ask([*first, 60], n_predict=4, id_slot=1)
    server.engine.submit(request)
    server.engine.step()
    assert at == [1]
    server.settle()
    assert server.text(request) == alone([*first, 60], 4)
    assert server.n_cached(request) == 1500


def test_a_restore_waits_for_no_batch_when_nobody_decodes(serve: Callable[..., Server], monkeypatch: Any) -> None:
    server = serve(2)
    first = talk(1500, 1)
    server.run(ask(first, n_predict=2, id_slot=1))
    server.run(ask(talk(800, 3), n_predict=2, id_slot=1))
    monkeypatch.setattr(Hit, "go_on_beside", lambda *_: pytest.fail("nothing is submitted"))
    server.engine.submit(ask([*first, 60], n_predict=4, id_slot=1))
    server.engine.step()
    assert server.parts.restorer.under_way[0].transfer._sealed  # type: ignore[union-attr]
    monkeypatch.undo()
    server.settle()


@pytest.mark.parametrize("hybrid", [False, True])
def test_a_slot_of_another_conversation_is_emptied_behind_the_batch_of_others(
    serve: Callable[..., Server], monkeypatch: Any, hybrid: bool
) -> None:
    server = serve(2, hybrid=hybrid)
    first = talk(1500, 1)
    server.run(ask(first, n_predict=2, id_slot=1))
    server.run(ask(talk(800, 3), n_predict=2, id_slot=1))
    decoding(server)
    kv, at = server.runner.kv, []
    remove = kv.remove

    def noted(seq_id: int, p0: int, p1: int = -1) -> bool:
        at.append((seq_id, server.runner.n_in_flight))
        return remove(seq_id, p0, p1)

    monkeypatch.setattr(kv, "remove", noted)
    request = ask([*first, 60], n_predict=4, id_slot=1)
    server.engine.submit(request)
    server.engine.step()
    assert at == [(1, 1)]
    server.settle()
    assert server.text(request) == alone([*first, 60], 4, hybrid=hybrid)
    assert server.n_cached(request) >= 1490


def test_a_request_that_goes_before_its_slot_is_emptied_leaves_it_empty(serve: Callable[..., Server]) -> None:
    server = serve(2)
    first = talk(1500, 1)
    server.run(ask(first, n_predict=2, id_slot=1))
    server.run(ask(talk(800, 3), n_predict=2, id_slot=1))
    decoding(server)
    request = ask([*first, 60], n_predict=4, id_slot=1)
    server.engine.submit(request)
    server.engine._drain()
    server.engine._pending.extend(server.engine.scheduler.plan().batches)
    assert server.parts.restorer.under_way
    server.engine.scheduler.cancel(request.id)
    assert not server.parts.restorer.under_way
    assert not server.runner.kv.held[1]
    server.settle()


@pytest.mark.parametrize("hybrid", [False, True])
def test_a_slot_is_stored_once_all_of_it_is_saved(serve: Callable[..., Server], hybrid: bool) -> None:
    server = serve(2, hybrid=hybrid)
    slot = server.engine.slots[1]
    server.run(ask(talk(700, 1), n_predict=8, id_slot=1))
    assert server.cache.is_stored(slot)
    slot.tokens.append(40)
    assert not server.cache.is_stored(slot)
    slot.tokens.keep(len(slot.tokens) - 1)
    assert server.cache.is_stored(slot)
    server.cache.forget()
    assert not server.cache.is_stored(slot)


def test_a_slot_makes_room_for_others_when_it_is_saved_and_comes_back(monkeypatch: Any) -> None:
    """What is too large to change places: seq-compact waits for the save, and the conversation goes on from the cache."""
    monkeypatch.setattr(arrange, "SWAP_BYTES_MAX", 16)
    monkeypatch.setattr(staying, "AGAIN_S", 0.001)
    server = Server(3, beside=(AlwaysCompact,))
    first = talk(900, 1)
    server.run(ask(first, n_predict=4, id_slot=1))
    others = [ask(talk(40, 7 + i), n_predict=400, id_slot=2 * i) for i in range(2)]
    server.run(*others)
    assert server.engine.stats.n_moves == server.engine.stats.n_moves_dropped == 1
    assert server.runner.batches[-1][0][0] + 1 == server.runner.batches[-1][1][0]
    again = ask(first + talk(30, 3), n_predict=4)
    assert server.run(again) == [alone([*first, *talk(30, 3)], 4)]
    assert server.n_cached(again) >= 900
    assert [server.text(other) for other in others] == [alone(talk(40, 7 + i), 400) for i in range(2)]
    server.stop()
