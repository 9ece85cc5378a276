"""A request that would be restored into a slot that is still being saved lets that end: neither conversation is lost."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterator

import numpy as np
import pytest
from cache_server import Server, alone, talk
from numpy.typing import NDArray

from llamamg import admission
from llamamg.request import Finished, Request
from llamamg.testing import ask
from llamamg_plugins.async_cache_hit import Hit

N_STEPS = 40


@pytest.fixture
def gate() -> Iterator[threading.Event]:
    """Copies stand still until it is set."""
    made = threading.Event()
    yield made
    made.set()


def holding(server: Server, gate: threading.Event, held: list[int], wait_s: float = 20) -> None:
    """The first slot holds `held`, which is being saved."""

    def slow() -> None:
        if threading.current_thread() is not threading.main_thread():
            gate.wait(wait_s)

    server.cells.slow = slow
    server.engine.submit(ask(held, n_predict=2, id_slot=0))
    while server.engine.step():
        pass
    copying = server.engine.slots[0].copying
    assert copying is not None
    assert not copying.is_over


def steps(server: Server, request: Request) -> None:
    server.engine.submit(request)
    for _ in range(N_STEPS):
        server.engine.step()


@pytest.mark.parametrize("hybrid", [False, True])
def test_who_is_restored_waits_until_the_slot_is_saved(
    serve: Callable[..., Server], gate: threading.Event, hybrid: bool
) -> None:
    server = serve(1, hybrid=hybrid)
    first, second = talk(1500, 1), talk(1200, 2)
    server.run(ask(first, n_predict=2))
    holding(server, gate, second)
    back = ask([*first, 60, 61], n_predict=4)
    steps(server, back)
    assert server.engine.queue_len() == 1
    assert not server.engine.slots[0].restoring
    gate.set()
    server.settle()
    assert server.text(back) == alone([*first, 60, 61], 4, hybrid=hybrid)
    assert server.n_cached(back) >= 1490  # a hybrid goes back to a checkpoint
    other = ask([*second, 60, 61], n_predict=4)
    assert server.run(other) == [alone([*second, 60, 61], 4, hybrid=hybrid)]
    assert server.n_cached(other) >= 1190
    assert server.parts.saver.n_cut == 0


def test_others_decode_meanwhile_and_pass_it(serve: Callable[..., Server], gate: threading.Event) -> None:
    server = serve(3)
    first = talk(1500, 1)
    server.run(ask(first, n_predict=2, id_slot=0))
    decoder = ask(talk(40, 9), n_predict=400, id_slot=2)
    holding(server, gate, talk(1000, 2))
    back = ask([*first, 60], n_predict=4, id_slot=0)
    server.engine.submit(decoder)
    steps(server, back)
    passing = ask(talk(30, 3), n_predict=2, id_slot=1)
    steps(server, passing)
    assert server.text(passing) == alone(talk(30, 3), 2)
    assert len(server.engine.slots[2].tokens) > 80
    assert server.engine.queue_len() == 1
    gate.set()
    server.settle()
    assert server.n_cached(back) >= 1490  # a hybrid goes back to a checkpoint


def test_a_prompt_that_begins_like_nothing_kept_waits_for_the_cells_of_its_first_batch(
    serve: Callable[..., Server],
) -> None:
    """Where cells are positions. Each step overwrites its own cells only, and copies are far ahead of prompts."""
    first, other = talk(3500, 1), talk(300, 3)
    for are_positions in (True, False):
        server, gate, copied = serve(1), threading.Event(), []

        def slow(gate: threading.Event = gate, copied: list[int] = copied) -> None:
            copied.append(1)
            if len(copied) > 8:  # blocks of 256
                gate.wait(20)

        server.engine.kv.cells_are_positions = are_positions  # type: ignore[misc]
        server.cells.slow = slow
        server.engine.submit(ask(first, n_predict=2))
        while server.engine.step():
            pass
        request = ask(other, n_predict=40)
        server.engine.submit(request)
        until = time.monotonic() + 0.5
        while time.monotonic() < until and (not server.engine.step() or server.engine.queue_len()):
            pass
        assert server.engine.queue_len() == (0 if are_positions else 1)
        gate.set()
        server.settle()
        assert server.text(request) == alone(other, 40)
        back = ask([*first, 60], n_predict=4)
        assert server.run(back) == [alone([*first, 60], 4)]
        assert server.n_cached(back) >= 3500
        assert server.parts.saver.n_cut == 0


def test_a_prompt_that_goes_to_the_prefill_slots_waits_for_all_of_it(
    serve: Callable[..., Server], gate: threading.Event
) -> None:
    """What its slot holds goes there too, at once, and a copy of that is cut."""
    server, copied = serve(1, n_prefill_slots=1), []
    first = talk(3500, 1)
    other = [*first[:300], *talk(900, 2)]

    def slow() -> None:
        copied.append(1)
        if len(copied) > 8:  # blocks of 256
            gate.wait(20)

    server.cells.slow = slow
    server.engine.submit(ask(first, n_predict=4))
    while server.engine.step():
        pass
    until = time.monotonic() + 5
    while len(copied) < 9 and time.monotonic() < until:
        time.sleep(0.001)
    request = ask(other, n_predict=4)
    steps(server, request)
    gate.set()
    server.settle()
    assert server.text(request) == alone(other, 4)
    back = ask([*first, 60], n_predict=4)
    assert server.run(back) == [alone([*first, 60], 4)]
    assert server.n_cached(back) >= 3500


def test_nobody_passes_who_waits_for_the_same_slot(serve: Callable[..., Server], gate: threading.Event) -> None:
    """A conversation that goes on at once would keep its slot for ever."""
    server = serve(1)
    first = talk(1500, 1)
    server.run(ask(first, n_predict=2))
    holding(server, gate, talk(1200, 2))
    back = ask([*first, 60, 61], n_predict=4)
    follow_up = ask([*server.engine.slots[0].tokens.view().tolist(), 60], n_predict=4)
    steps(server, back)
    steps(server, follow_up)
    assert server.engine.queue_len() == 2
    gate.set()
    server.settle()
    ended = [id_ for id_, event in server.events if isinstance(event, Finished)]
    assert ended.index(back.id) < ended.index(follow_up.id)
    assert server.n_cached(follow_up) >= 1200
    assert server.n_cached(back) >= 1500


def test_who_waits_goes_on_when_the_plugin_is_switched_off(serve: Callable[..., Server], gate: threading.Event) -> None:
    server = serve(1)
    first = talk(1500, 1)
    server.run(ask(first, n_predict=2))
    holding(server, gate, talk(1200, 2), wait_s=0.1)
    back = ask([*first, 60, 61], n_predict=4)
    steps(server, back)
    assert server.engine.queue_len() == 1
    server.plugins.toggle("async-cache", False)
    server.engine.step()
    assert server.engine.queue_len() == 0
    while server.engine.step():
        pass
    assert server.text(back) == alone([*first, 60, 61], 4)
    server.plugins.toggle("async-cache", True)
    server.settle()


def test_a_follow_up_waits_for_nothing(serve: Callable[..., Server], gate: threading.Event) -> None:
    server = serve(1)
    server.engine.kv.cells_are_positions = False  # type: ignore[misc]
    held = talk(1200, 2)
    holding(server, gate, held)
    answered = server.engine.slots[0].tokens.view().tolist()
    follow_up = ask([*answered, 60], n_predict=4)
    server.engine.submit(follow_up)
    server.engine.step()
    assert server.engine.queue_len() == 0
    gate.set()
    server.settle()
    assert server.n_cached(follow_up) == len(answered)


def test_a_copy_that_takes_too_long_is_cut(
    serve: Callable[..., Server], gate: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(admission, "COPY_S_MAX", 0.05)
    server = serve(1)
    first = talk(1500, 1)
    server.run(ask(first, n_predict=2))
    began = [0]

    def slow() -> None:
        began[0] += 1
        if began[0] > 1:
            gate.wait(0.3)  # one chunk

    server.cells.slow = slow
    server.engine.submit(ask(talk(2000, 2), n_predict=2))
    while server.engine.step():
        pass
    back = ask([*first, 60, 61], n_predict=4)
    steps(server, back)
    assert server.engine.queue_len() == 1
    time.sleep(0.06)
    server.engine.step()
    gate.set()
    server.settle()
    assert server.text(back) == alone([*first, 60, 61], 4)
    assert server.n_cached(back) >= 1490  # a hybrid goes back to a checkpoint
    assert server.parts.saver.n_cut == 1


def test_who_waits_for_all_of_a_copy_is_asked_for_once_and_no_longer_than_before(
    serve: Callable[..., Server], gate: threading.Event
) -> None:
    """First for the cells of its first batch, then, since there is something to restore, for the others."""
    server, first_batch, copied, asked = serve(1), threading.Event(), [], []
    first = talk(1500, 1)
    server.run(ask(first, n_predict=2))
    find = server.parts.restorer.find

    def counted(prompt: NDArray[np.int32]) -> Hit | None:
        asked.append(1)
        return find(prompt)

    server.parts.restorer.find = counted  # type: ignore[method-assign]

    def slow() -> None:
        copied.append(1)
        (first_batch if len(copied) < 4 else gate).wait(20)  # blocks of 256

    server.cells.slow = slow
    server.engine.submit(ask(talk(2000, 2), n_predict=2))
    while server.engine.step():
        pass
    back = ask([*first, 60, 61], n_predict=4)
    asked.clear()
    steps(server, back)
    (waiting,) = server.engine.scheduler._admission.queue
    latest = dict(waiting.latest)
    assert not asked
    first_batch.set()
    until = time.monotonic() + 5
    while len(copied) < 4 and time.monotonic() < until:
        time.sleep(0.001)
    for _ in range(N_STEPS):
        server.engine.step()
    assert (len(asked), waiting.latest) == (1, latest)
    assert server.engine.queue_len() == 1
    gate.set()
    server.settle()
    assert server.n_cached(back) >= 1500
    assert server.parts.saver.n_cut == 0


def test_who_is_sent_from_one_slot_to_the_other_waits_for_each_copy_once(
    serve: Callable[..., Server], gate: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in two groups, of which now one computes and now the other."""
    monkeypatch.setattr(admission, "COPY_S_MAX", 0.05)
    server = serve(2)
    server.engine.kv.cells_are_positions = False  # type: ignore[misc]
    slots, looks = server.engine.slots, itertools.count()
    holding(server, gate, talk(1200, 2), wait_s=0.5)
    server.engine.submit(ask(talk(1300, 3), n_predict=2, id_slot=1))
    while server.engine.step():
        pass
    monkeypatch.setattr(server.engine.scheduler._admission, "choose", lambda request, free: slots[next(looks) % 2])
    request = ask(talk(900, 4), n_predict=2)
    server.engine.submit(request)
    until = time.monotonic() + 0.4
    while time.monotonic() < until and (not server.engine.step() or server.engine.queue_len()):
        pass
    assert server.engine.queue_len() == 0
    assert next(looks) > 3
    gate.set()
    server.settle()
    assert server.text(request) == alone(talk(900, 4), 2)


def test_one_that_is_cancelled_while_it_waits_leaves_the_copy_alone(
    serve: Callable[..., Server], gate: threading.Event
) -> None:
    server = serve(1)
    first, second = talk(1500, 1), talk(1200, 2)
    server.run(ask(first, n_predict=2))
    holding(server, gate, second)
    back = ask([*first, 60, 61], n_predict=4)
    steps(server, back)
    server.engine.cancel(back.id)
    server.engine.step()
    assert server.engine.queue_len() == 0
    gate.set()
    server.settle()
    assert server.parts.saver.n_cut == 0
    other = ask([*second, 60, 61], n_predict=4)
    server.run(other)
    assert server.n_cached(other) >= 1190
