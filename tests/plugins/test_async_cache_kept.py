"""States on devices, over a stand-in whose states are the tokens: a state of another time or sequence is a wrong answer."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from cache_server import Server, alone, talk

from llamamg import KeptState
from llamamg.testing import ask
from llamamg_plugins.async_cache_kept import N_FIRST, device_bytes


@pytest.fixture
def serve() -> Iterator[Callable[..., Server]]:
    made: list[Server] = []

    def make(*args: Any, **options: Any) -> Server:
        made.append(Server(*args, hybrid=True, **options))
        return made[-1]

    yield make
    for server in made:
        server.stop()
        assert server.cells.n_state_bytes_max == 0


def on_device(server: Server) -> int:
    gc.collect()
    return len(server.cells.detached)


def test_a_hit_takes_the_state_from_its_device(serve: Callable[..., Server]) -> None:
    server = serve(1, **{"device-mb": "1"})
    first, other = talk(700, 1), talk(650, 2)
    server.run(ask(first, n_predict=8))
    (slot,) = server.engine.slots
    assert slot.checkpoints
    assert all(isinstance(c.data, KeptState) and c.data.device is not None for c in slot.checkpoints)
    server.run(ask(other, n_predict=8))
    again = first + talk(30, 3)
    request = ask(again, n_predict=8)
    assert server.run(request) == [alone(again, hybrid=True)]
    assert server.n_cached(request) >= 696
    assert server.parts.kept.n_put == 1
    assert server.cells.state_bytes() > 0


@pytest.mark.parametrize("n_most", [3, N_FIRST, 100])
def test_memory_for_the_first_states_is_taken_at_once(serve: Callable[..., Server], n_most: int) -> None:
    """As many as there is room for; the copies that held it are gone, and not again."""
    server = serve(1, **{"device-mb": "1"})
    cells, held = server.cells, []
    save_state = cells.save_state
    cells.kv.held[0] = talk(100, 1)
    cells.limit_states(n_most * 400, 0)

    def save(seq_id: int) -> Any:
        gc.collect()
        held.append(len(cells.detached))
        return save_state(seq_id)

    cells.save_state = save  # type: ignore[method-assign]
    kept = server.parts.kept
    first = kept.take(0)
    assert held == list(range(min(n_most + 1, N_FIRST)))
    assert on_device(server) == 1
    second = kept.take(0)
    assert len(held) == min(n_most + 1, N_FIRST) + 1
    assert first.device is not None
    assert second.device is not None


@pytest.mark.parametrize("n_bytes", [16_000, 1 << 20])
def test_six_conversations_in_turn_answer_as_without_cache(serve: Callable[..., Server], n_bytes: int) -> None:
    """Perhaps with room for a few states only: those unused for longest go, and come back from main memory."""
    server = serve(2, **{"device-mb": "1"})
    server.cells.limit_states(n_bytes, 0)
    system = talk(300, 0)
    talks = [system + talk(200 + 70 * i, 10 + i) for i in range(6)]
    for turn in range(4):
        requests = [ask(t, n_predict=5) for t in talks]
        answers = [server.run(request)[0] for request in requests]
        for i, (t, answer) in enumerate(zip(talks, answers, strict=True)):
            assert answer == alone(t, 5, hybrid=True), f"turn {turn}, conversation {i}"
            if turn:
                assert server.n_cached(requests[i]) > 300
        assert server.cells.state_bytes() <= n_bytes
        talks = [
            t + list(a.encode()) + talk(40, 100 * turn + i) for i, (t, a) in enumerate(zip(talks, answers, strict=True))
        ]
    assert server.parts.kept.n_taken > 12
    assert server.parts.restorer.n_hits >= 12
    assert (server.parts.kept.n_put >= 12) is (n_bytes == 1 << 20)


def test_a_slot_goes_back_to_a_checkpoint_on_its_device(serve: Callable[..., Server]) -> None:
    """Also when the plugin is off by then."""
    server = serve(1, **{"device-mb": "1"})
    first = talk(700, 1)
    server.run(ask(first, n_predict=8))
    server.plugins.toggle("async-cache", False)
    other = first[:698] + talk(20, 5)
    request = ask(other, n_predict=8)
    assert server.run(request) == [alone(other, hybrid=True)]
    assert server.n_cached(request) == 696
    server.plugins.toggle("async-cache", True)


def test_nobody_waits_for_a_state_on_its_way(serve: Callable[..., Server]) -> None:
    server = serve(1, **{"device-mb": "1"})
    server.cells.slow = lambda: time.sleep(0.2)
    first = talk(700, 1)
    server.engine.submit(ask(first, n_predict=2))
    started = time.perf_counter()
    while server.engine.step():
        pass
    n_taken = server.parts.kept.n_taken
    assert n_taken >= 2
    assert time.perf_counter() - started < 0.2, "a step waited for a copy"
    server.cells.slow = lambda: None
    server.settle()


def test_a_copy_to_main_memory_that_fails_costs_that_state_only(serve: Callable[..., Server]) -> None:
    server = serve(1, **{"device-mb": "1"})
    first, other = talk(700, 1), talk(650, 2)

    def fail() -> None:
        raise OSError("the bus is on fire")

    server.cells.slow = fail
    server.run(ask(first, n_predict=8))
    server.cells.slow = lambda: None
    server.run(ask(other, n_predict=8))
    request = ask(first, n_predict=8)
    assert server.run(request) == [alone(first, hybrid=True)]
    assert server.n_cached(request) == 0
    assert server.plugins.enabled() == ["async-cache"]


def test_a_request_cancelled_while_its_state_is_on_the_way_leaves_nothing(serve: Callable[..., Server]) -> None:
    server = serve(1, **{"device-mb": "1"})
    stored = talk(900, 1)
    server.run(ask(stored, n_predict=2))
    server.run(ask(talk(400, 3), n_predict=2))
    for kept in [ref() for ref in server.parts.kept._order]:
        if kept is not None:
            kept.device = None  # so it has to come from main memory
    server.cells.slow = lambda: time.sleep(0.05)
    request = ask(stored, n_predict=8)
    server.engine.submit(request)
    server.engine.step()
    assert server.engine.slots[0].restoring
    server.engine.cancel(request.id)
    server.engine.step()
    server.cells.slow = lambda: None
    owner = ask(talk(300, 7), n_predict=4)
    assert server.run(owner) == [alone(talk(300, 7), 4, hybrid=True)]
    time.sleep(0.1)
    assert server.runner.kv.held[0][:300] == talk(300, 7), "a late write"
    request = ask(stored, n_predict=8)
    assert server.run(request) == [alone(stored, hybrid=True)]


def test_a_state_that_is_nowhere_else_keeps_its_device(serve: Callable[..., Server]) -> None:
    """There is room for one: the second is copied at once as long as the first is on its way to main memory."""
    server = serve(1, **{"device-mb": "1"})
    cells, kept = server.cells, server.parts.kept
    cells.kv.held[0] = talk(100, 1)
    cells.limit_states(400, 0)
    may_copy = threading.Event()
    cells.slow = lambda: may_copy.wait(10) and None
    first = kept.take(0)
    cells.slow = lambda: None
    second = kept.take(0)
    assert first.device is not None
    assert (second.device, second.data is not None) == (None, True)
    may_copy.set()
    first.host_bytes()
    third = kept.take(0)
    assert first.device is None
    assert third.device is not None
    third.host_bytes()


def test_states_that_nobody_has_any_more_free_their_device(serve: Callable[..., Server]) -> None:
    server = serve(1, **{"device-mb": "1"})
    server.run(ask(talk(700, 1), n_predict=8))
    assert on_device(server) > 0
    server.cache.forget()
    server.engine.scheduler.clear(server.engine.slots[0])
    assert on_device(server) == 0


def test_without_device_memory_states_are_copied_at_once(serve: Callable[..., Server]) -> None:
    server = serve(1)
    server.run(ask(talk(700, 1), n_predict=8))
    assert not any(isinstance(c.data, KeptState) for c in server.engine.slots[0].checkpoints)
    assert on_device(server) == 0


def test_the_automatic_size() -> None:
    class Devices:
        def __init__(self, *free_gib: int) -> None:
            self.memory_free = lambda: [n << 30 for n in free_gib]

    assert device_bytes(Devices(), -1) == 0  # type: ignore[arg-type]
    assert device_bytes(Devices(5), -1) == 1 << 30  # type: ignore[arg-type]
    assert device_bytes(Devices(1, 50), -1) == 0  # type: ignore[arg-type]
    assert device_bytes(Devices(50, 50), -1) == 2 << 30  # type: ignore[arg-type]
    assert device_bytes(Devices(50), 0) == 0  # type: ignore[arg-type]
    assert device_bytes(Devices(), 7) == 7 << 20  # type: ignore[arg-type]
