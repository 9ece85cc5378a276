"""The loop with its thread: messages from outside, the end, and what happens when it breaks."""

from __future__ import annotations

import threading
from concurrent.futures import Future
from typing import Any

import pytest

from llamamg.plugins import PluginError
from llamamg.request import Delta, Failed, Finished
from llamamg.sampler import SamplerError
from llamamg.testing import ask, count_up, fake_engine

WAIT_S = 20.0


class Watched:
    """A started engine whose events can be waited for."""

    def __init__(self, n_slots: int = 2, **options: Any) -> None:
        self.engine, self.runner, _ = fake_engine(n_slots, **options)
        self.events: list[tuple[int, Any]] = []
        self.threads: set[int] = set()
        self.changed = threading.Condition()
        self.engine.deliver = self.deliver

    def deliver(self, pairs: list[tuple[int, Any]]) -> None:
        with self.changed:
            self.events += pairs
            self.threads.add(threading.get_ident())
            self.changed.notify_all()

    def of(self, request: Any) -> list[Any]:
        return [event for id_, event in list(self.events) if id_ == request.id]

    def wait(self, condition: Any) -> None:
        with self.changed:
            assert self.changed.wait_for(condition, WAIT_S)

    def last(self, request: Any) -> Any:
        self.wait(lambda: any(isinstance(event, Finished | Failed) for event in self.of(request)))
        return self.of(request)[-1]


def slowly(gate: threading.Semaphore) -> Any:
    """A stand-in model that gives one token for each permit."""

    def next_token(sequence: Any, so_far: list[int]) -> int:
        assert gate.acquire(timeout=WAIT_S)
        return count_up(sequence, so_far)

    return next_token


def test_requests_of_several_threads_all_finish() -> None:
    watched = Watched(3)
    watched.engine.start()
    requests = [ask(f"request {i}", n_predict=5, stream=i % 2 == 0) for i in range(40)]
    threads = [
        threading.Thread(target=lambda part=part: [watched.engine.submit(r) for r in part])
        for part in (requests[::2], requests[1::2])
    ]
    for thread in threads:
        thread.start()
    for request in requests:
        assert isinstance(watched.last(request), Finished)
    for thread in threads:
        thread.join()
    watched.engine.stop(1.0)
    assert not watched.engine.alive
    assert watched.runner.closed
    assert len(watched.threads) == 1


def test_call_runs_between_two_steps_on_the_engine_thread() -> None:
    watched = Watched()
    watched.engine.start()
    seen: list[int] = []
    assert watched.engine.call(lambda engine: seen.append(threading.get_ident()) or engine.n_slots).result(WAIT_S) == 2
    assert seen[0] not in (threading.get_ident(), threading.main_thread().ident)
    with pytest.raises(ZeroDivisionError):
        watched.engine.call(lambda engine: 1 // 0).result(WAIT_S)
    assert watched.engine.call(lambda engine: 7).result(WAIT_S) == 7
    with pytest.raises(PluginError):
        watched.engine.call(lambda engine: engine.plugins.toggle("nobody", True)).result(WAIT_S)
    watched.engine.stop(1.0)


def test_stop_lets_running_streams_end_and_turns_the_queue_away() -> None:
    gate = threading.Semaphore(2)
    watched = Watched(1, next_token=slowly(gate))
    watched.engine.start()
    running, queued, late = ask("a", n_predict=6, stream=True), ask("b", n_predict=6), ask("c", n_predict=6)
    watched.engine.submit(running)
    watched.engine.submit(queued)
    watched.wait(lambda: any(isinstance(event, Delta) for event in watched.of(running)))
    stopper = threading.Thread(target=watched.engine.stop, args=(WAIT_S,))
    stopper.start()
    gate.release(2)
    watched.last(queued)
    watched.engine.submit(late)
    gate.release(100)
    stopper.join(WAIT_S)
    assert not watched.engine.alive
    assert [type(watched.of(r)[-1]) for r in (running, queued, late)] == [Finished, Failed, Failed]
    assert watched.of(running)[-1].n_decoded == 6
    assert [watched.of(r)[-1].code for r in (queued, late)] == [503, 503]
    assert watched.engine.error is None


def test_stop_cuts_what_does_not_end_in_time() -> None:
    gate = threading.Semaphore(1)
    watched = Watched(1, next_token=slowly(gate))
    watched.engine.start()
    running = ask("a", stream=True)
    watched.engine.submit(running)
    watched.wait(lambda: any(isinstance(event, Delta) for event in watched.of(running)))
    stopper = threading.Thread(target=watched.engine.stop, args=(0.0,))
    stopper.start()
    gate.release(3)  # the step in progress ends, then the time is over
    stopper.join(WAIT_S)
    assert not watched.engine.alive
    assert isinstance(watched.of(running)[-1], Failed)
    assert watched.runner.closed


def test_after_the_end_requests_fail_at_once_and_calls_too() -> None:
    watched = Watched()
    watched.engine.start()
    watched.engine.stop(1.0)
    request = ask("a")
    watched.engine.submit(request)
    watched.engine.cancel(request.id)
    assert [type(event) for event in watched.of(request)] == [Failed]
    future: Future[int] = watched.engine.call(lambda engine: 1)
    with pytest.raises(RuntimeError):
        future.result(WAIT_S)
    watched.engine.stop(0.0)


def test_an_engine_that_never_started_gives_its_context_back() -> None:
    watched = Watched()
    watched.engine.stop(1.0)
    assert watched.runner.closed


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_an_error_in_the_loop_fails_every_request_and_is_kept() -> None:
    broken = threading.Event()

    def next_token(sequence: Any, so_far: list[int]) -> int:
        if broken.is_set():
            raise MemoryError("a bug")
        return count_up(sequence, so_far)

    watched = Watched(1, next_token=next_token)
    watched.engine.start()
    running, queued = ask("a", stream=True), ask("b")
    watched.engine.submit(running)
    watched.engine.submit(queued)
    watched.wait(lambda: any(isinstance(event, Delta) for event in watched.of(running)))
    broken.set()
    assert watched.last(running).code == watched.last(queued).code == 500
    watched.engine._thread.join(WAIT_S)
    assert isinstance(watched.engine.error, MemoryError)
    assert watched.runner.closed
    late = ask("c")
    watched.engine.submit(late)
    assert isinstance(watched.of(late)[-1], Failed)


def test_a_request_whose_sampling_cannot_be_set_up_is_refused() -> None:
    watched = Watched()

    def new_sampler(request: Any) -> Any:
        raise SamplerError("no such grammar")

    watched.engine._new_sampler = new_sampler
    watched.engine.start()
    request = ask("a")
    watched.engine.submit(request)
    assert watched.last(request) == Failed(400, "invalid_request_error", "no such grammar")
    watched.engine.stop(1.0)


def test_an_idle_engine_wakes_for_a_request() -> None:
    watched = Watched()
    watched.engine.start()
    for _ in range(3):
        request = ask("a", n_predict=2)
        watched.engine.submit(request)
        assert isinstance(watched.last(request), Finished)
    watched.engine.stop(1.0)
