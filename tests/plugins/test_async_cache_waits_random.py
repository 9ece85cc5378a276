"""More conversations than slots, copies of all speeds, and whatever happens meanwhile: answers are right, nothing is lost."""

from __future__ import annotations

import dataclasses
import random
import threading
import time

import pytest
from cache_server import Server, alone, talk

from llamamg import admission
from llamamg.request import Failed, Finished, Request, Started
from llamamg.testing import ask


class Talks:
    """Conversations of which each has at most one turn under way."""

    def __init__(self, server: Server, rng: random.Random, n: int) -> None:
        self.server, self.rng = server, rng
        self.said = [talk(rng.randrange(100, 1500), 100 + i) for i in range(n)]
        self.known = [0] * n  # tokens computed in earlier turns
        self.under_way: dict[int, tuple[int, Request]] = {}  # by id, with the conversation
        self.lost: list[tuple[int, int]] = []
        self.n_right = 0
        self._n_seen = 0

    def begin(self, named: bool = True) -> None:
        busy = {i for i, _ in self.under_way.values()}
        idle = [i for i in range(len(self.said)) if i not in busy]
        if not idle:
            return
        i = self.rng.choice(idle)
        self.said[i] += talk(self.rng.randrange(1, 120), self.rng.randrange(1000))
        id_slot = self.rng.randrange(len(self.server.engine.slots)) if named and self.rng.random() < 0.2 else -1
        request = ask(self.said[i], n_predict=self.rng.randrange(1, 12), id_slot=id_slot)
        request = dataclasses.replace(request, priority=self.rng.choice([0, 0, 0, -1, 2]))
        self.under_way[request.id] = (i, request)
        self.server.engine.submit(request)

    def cancel(self) -> None:
        if self.under_way:
            id_ = self.rng.choice(list(self.under_way))
            self.known[self.under_way.pop(id_)[0]] = 0  # who knows how far it got
            self.server.engine.cancel(id_)

    def look(self) -> None:
        """Take note of what ended."""
        events = self.server.events[self._n_seen :]
        self._n_seen += len(events)
        for id_, event in events:
            if id_ not in self.under_way:
                continue
            i, request = self.under_way[id_]
            assert not isinstance(event, Failed)
            if isinstance(event, Started) and event.n_cached < self.known[i] - 1:
                self.lost.append((self.known[i], event.n_cached))
            if isinstance(event, Finished):
                assert event.text == alone(
                    self.said[i], request.n_predict, hybrid=self.server.engine.kv.needs_checkpoints
                )
                self.n_right += 1
                self.known[i] = len(self.said[i])
                del self.under_way[id_]


def slow_copies(server: Server, rng: random.Random, most_s: float) -> None:
    own = random.Random(rng.random())
    lock = threading.Lock()

    def slow() -> None:
        if threading.current_thread() is not threading.main_thread():
            with lock:
                wait_s = own.choice([0, 0, own.random() * most_s])
            time.sleep(wait_s)

    server.cells.slow = slow


def go_on(server: Server, talks: Talks, until_s: float = 20.0) -> None:
    """Until nothing is to do, as the loop does it."""
    until = time.monotonic() + until_s
    while step(server, talks) or talks.under_way:
        assert time.monotonic() < until, "still busy"


def step(server: Server, talks: Talks) -> bool:
    worked = server.engine.step()
    if not worked:
        hooks = server.engine.calls.hooks
        worked = any(server.engine.calls.each("idle", server.engine.scheduler.state)) if hooks.idle else False
    if not worked and talks.under_way:
        time.sleep(0.001)
    talks.look()
    return worked


@pytest.mark.parametrize("hybrid", [False, True])
@pytest.mark.parametrize("seed", range(2))
def test_everything_at_once(monkeypatch: pytest.MonkeyPatch, hybrid: bool, seed: int) -> None:
    rng = random.Random(seed)
    monkeypatch.setattr(admission, "COPY_S_MAX", rng.choice([0.0, 0.01, 0.1]))
    n_slots = rng.choice([1, 2, 3])
    server = Server(n_slots, hybrid=hybrid, threads="1")
    server.engine.kv.cells_are_positions = rng.random() < 0.5  # type: ignore[misc]
    slow_copies(server, rng, 0.01)
    talks = Talks(server, rng, n_slots + 3)
    for _ in range(200):
        what = rng.random()
        if what < 0.15:
            talks.begin()
        elif what < 0.18:
            talks.cancel()
        elif what < 0.2:
            server.plugins.toggle("async-cache", rng.random() < 0.6)
        step(server, talks)
    server.plugins.toggle("async-cache", True)
    go_on(server, talks)
    assert talks.n_right > 5
    server.stop()


@pytest.mark.parametrize("n_slots", [1, 2, 3])
def test_no_turn_is_computed_twice(n_slots: int) -> None:
    """Where all of a slot is cut at once: else a copy has to be ahead of each step, too."""
    rng = random.Random(n_slots)
    server = Server(n_slots, threads="1")
    server.engine.kv.cells_are_positions = False  # type: ignore[misc]
    slow_copies(server, rng, 0.005)
    talks = Talks(server, rng, n_slots + 3)
    for _ in range(200):
        if rng.random() < 0.15:
            talks.begin(named=False)
        step(server, talks)
    go_on(server, talks)
    assert talks.n_right > 15
    assert talks.lost == []
    server.stop()
