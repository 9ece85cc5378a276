"""Requests nobody waits for any more."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llamamg import hookimpl
from llamamg.guard import Guard
from llamamg.plugins import plugin
from llamamg.request import Delta, Finished, Started
from llamamg.testing import ask, fake_engine, run

DECLARE: dict[str, Any] = {"summary": "", "helps": "", "hurts": "", "guard": Guard.exact()}


def of(events: list[Any], request: Any) -> list[Any]:
    return [event for id_, event in events if id_ == request.id]


def test_a_streaming_request_frees_its_slot_in_the_next_step_and_says_nothing_more() -> None:
    engine, _, events = fake_engine(1)
    request, following = ask("aaaa", stream=True), ask("bbbb", n_predict=2)
    engine.submit(request)
    engine.submit(following)
    while sum(isinstance(event, Delta) for event in of(events, request)) < 3:
        engine.step()
    engine.cancel(request.id)
    n = len(of(events, request))
    engine.step()
    assert engine.slots[0].sequence is not None
    assert engine.slots[0].sequence.request is following
    run(engine)
    assert len(of(events, request)) == n
    assert isinstance(of(events, following)[-1], Finished)


def test_a_queued_request_whose_client_is_gone_never_starts() -> None:
    engine, runner, events = fake_engine(1)
    running, gone = ask("aaaa", n_predict=10), ask("bbbb", n_predict=5)
    engine.submit(running)
    engine.submit(gone)
    engine.step()
    sampler = engine.scheduler._admission.queue[0].sampler
    engine.cancel(gone.id)
    run(engine)
    assert of(events, gone) == []
    assert sampler.closed
    assert len(runner.batches) == 10


def test_cancelling_a_queued_request_leaves_a_streaming_one_unchanged() -> None:
    def deltas(with_cancel: bool) -> tuple[list[Any], list[Any]]:
        engine, runner, events = fake_engine(1)
        streaming, queued = ask("aaaa", n_predict=20, stream=True), ask("bbbb")
        engine.submit(streaming)
        for i in range(8):
            if with_cancel and i == 2:
                engine.submit(queued)
            if with_cancel and i == 5:
                engine.cancel(queued.id)
            engine.step()
        run(engine)
        return [e.text for e in of(events, streaming) if isinstance(e, Delta)], runner.batches

    assert deltas(True) == deltas(False)


def test_cancel_while_prefilling_keeps_what_is_computed_for_the_next_one() -> None:
    engine, _, events = fake_engine(1, n_batch=8)
    prompt = list(range(40, 80))
    gone, again = ask(prompt), ask(prompt, n_predict=1)
    engine.submit(gone)
    engine.step()
    engine.step()
    engine.cancel(gone.id)
    engine.submit(again)
    run(engine)
    assert of(events, again)[0] == Started(0, 16)


def test_cancel_twice_unknown_or_finished_does_nothing() -> None:
    engine, _, events = fake_engine(1)
    request = ask("a", n_predict=1)
    engine.submit(request)
    run(engine)
    n = len(events)
    for id_ in (request.id, request.id, 10**9):
        engine.cancel(id_)
    run(engine)
    assert len(events) == n


def test_cancel_right_after_submit_costs_nothing() -> None:
    engine, runner, events = fake_engine(1)
    request = ask("aaaa")
    engine.submit(request)
    engine.cancel(request.id)
    run(engine)
    assert (events, runner.batches) == ([], [])


def test_rows_planned_but_not_computed_are_not_claimed_by_the_slot(with_plugins: Callable[..., Any]) -> None:
    """A plan may have several batches; a cancel between two of them drops the rows of the later ones."""

    @plugin(name="one-each", **DECLARE)
    class OneEach:
        @hookimpl
        def plan_step(self, state: Any, plan: Any) -> None:
            plan.split(plan.batches[0], [[row] for row in plan.batches[0].rows])

    engine, runner, events = with_plugins(OneEach)
    first, second = ask(list(range(40, 60)), id_slot=0), ask(list(range(60, 80)), id_slot=1)
    engine.submit(first)
    engine.submit(second)
    engine.step()
    assert len(runner.batches) == 1
    engine.cancel(second.id)
    engine.step()
    assert len(engine.slots[1].tokens) == 0
    engine.cancel(first.id)
    engine.submit(ask(list(range(60, 80)), n_predict=2, id_slot=1))
    run(engine)
    assert runner.kv.held[1][:20] == list(range(60, 80))
    assert isinstance(events[-1][1], Finished)


def test_released_and_finished_are_told_once_with_the_reason(with_plugins: Callable[..., Any]) -> None:
    told: list[tuple[str, Any]] = []

    @plugin(name="listener", **DECLARE)
    class Listener:
        @hookimpl
        def slot_released(self, sequence: Any, reason: Any) -> None:
            told.append((reason.value, sequence.request.id))

        @hookimpl
        def request_finished(self, request: Any) -> None:
            told.append(("over", request.id))

    engine, _, _ = with_plugins(Listener, n_slots=1)
    done, gone, queued = ask("a", n_predict=1), ask("b"), ask("c")
    for request in (done, gone, queued):
        engine.submit(request)
    engine.step()
    engine.step()
    engine.cancel(queued.id)
    engine.cancel(gone.id)
    run(engine)
    assert told == [
        ("limit", done.id), ("over", done.id), ("over", queued.id), ("cancelled", gone.id), ("over", gone.id),
    ]  # fmt: skip
