"""Who gets which slot, and when."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from llamamg import hookimpl
from llamamg.admission import least_recently_used
from llamamg.decisions import Defer, Reject
from llamamg.guard import Guard
from llamamg.plugins import plugin
from llamamg.request import Failed, Finished, Started
from llamamg.slot import Slot
from llamamg.testing import ask, fake_engine, run

DECLARE: dict[str, Any] = {"summary": "", "helps": "", "hurts": "", "guard": Guard.exact()}


def started(events: list[Any]) -> dict[int, Started]:
    return {id_: event for id_, event in events if isinstance(event, Started)}


def hold(engine: Any, slot: int, tokens: str) -> None:
    """Let a slot hold the tokens of an earlier request."""
    engine.submit(ask(tokens, n_predict=1, id_slot=slot))
    run(engine)


def test_longest_common_prefix_before_least_recently_used() -> None:
    engine, _, events = fake_engine(3)
    hold(engine, 0, "abcdefgh")
    hold(engine, 1, "abcdxxxx")
    hold(engine, 2, "zzzzzzzz")
    request = ask("abcdefij", n_predict=1)
    engine.submit(request)
    run(engine)
    assert (started(events)[request.id].id_slot, started(events)[request.id].n_cached) == (0, 6)


def test_a_prefix_below_the_similarity_does_not_count() -> None:
    engine, _, events = fake_engine(2)
    hold(engine, 1, "a" + "x" * 30)
    hold(engine, 0, "b" * 30)
    request = ask("a" + "y" * 19, n_predict=1)  # 1 of 20: under the 10 % it takes; slot 1 is the older one anyway
    other = ask("b" * 2 + "z" * 18, n_predict=1)  # 2 of 20 is not above 10 % either
    engine.submit(request)
    engine.submit(other)
    run(engine)
    assert [started(events)[r.id].id_slot for r in (request, other)] == [1, 0]


def test_never_used_slots_are_taken_from_the_last_one_down() -> None:
    engine, _, events = fake_engine(3)
    requests = [ask(chr(97 + i) * 5, n_predict=3) for i in range(3)]
    for request in requests:
        engine.submit(request)
    run(engine)
    assert [started(events)[r.id].id_slot for r in requests] == [2, 1, 0]


def test_of_equally_old_slots_the_last_is_taken() -> None:
    slots = [Slot(i, i, t_last_used=t) for i, t in enumerate((5.0, 2.0, 2.0, 7.0))]
    assert least_recently_used(slots).id == 2


def test_a_request_waits_for_its_own_slot_and_lets_others_pass() -> None:
    engine, _, events = fake_engine(2)
    first = ask("aaaa", n_predict=20, id_slot=1)
    same = ask("bbbb", n_predict=1, id_slot=1)
    other = ask("cccc", n_predict=1)
    for request in (first, same, other):
        engine.submit(request)
    engine.step()
    assert [id_ for id_, event in events if isinstance(event, Started)] == [first.id, other.id]
    run(engine)
    assert started(events)[same.id].id_slot == 1
    ends = [id_ for id_, event in events if isinstance(event, Finished)]
    assert ends == [other.id, first.id, same.id]


def test_id_slot_beyond_the_last_wraps() -> None:
    engine, _, events = fake_engine(2)
    request = ask("a", n_predict=1, id_slot=5)
    engine.submit(request)
    run(engine)
    assert started(events)[request.id].id_slot == 1


def test_lower_priority_goes_first_then_arrival() -> None:
    engine, _, events = fake_engine(1)
    requests = [ask("a", n_predict=1, priority=p) for p in (2, 0, 1, 0)]
    for request in requests:
        engine.submit(request)
    run(engine)
    order = [id_ for id_, event in events if isinstance(event, Started)]
    assert order == [requests[i].id for i in (1, 3, 2, 0)]


def test_cache_prompt_false_computes_all_again() -> None:
    engine, runner, events = fake_engine(1)
    hold(engine, 0, "abcdefgh")
    request = ask("abcdefgh", n_predict=1, cache_prompt=False)
    engine.submit(request)
    run(engine)
    assert started(events)[request.id].n_cached == 0
    assert runner.batches[-1] == [(0, 0, 8, 1)]


def test_the_same_prompt_leaves_one_token_to_compute() -> None:
    engine, runner, _ = fake_engine(1)
    hold(engine, 0, "abcdefgh")
    hold(engine, 0, "abcdefgh")
    assert runner.batches[-1] == [(0, 7, 1, 1)]


def test_a_prompt_that_is_the_beginning_of_what_the_slot_holds() -> None:
    engine, runner, _ = fake_engine(1)
    hold(engine, 0, "abcdefgh")
    request = ask("abcd", n_predict=2)
    engine.submit(request)
    run(engine)
    assert runner.batches[-2:] == [[(0, 3, 1, 1)], [(0, 4, 1, 1)]]


@pytest.mark.parametrize("hybrid", [False, True])
def test_reuse_gives_the_same_text_as_none(hybrid: bool) -> None:
    def texts(cached: bool) -> list[str]:
        engine, _, events = fake_engine(1, hybrid=hybrid)
        prompt, out = "the quick brown fox jumps over the lazy dog", []
        for _ in range(3):
            request = ask(prompt, n_predict=8, cache_prompt=cached)
            engine.submit(request)
            run(engine)
            text = next(e.text for i, e in events if i == request.id and isinstance(e, Finished))
            out.append(text)
            prompt += text + " and more"
        return out

    assert texts(True) == texts(False)


# -- plugins


def test_defer_keeps_the_head_of_the_queue_and_asks_again(with_plugins: Callable[..., Any]) -> None:
    asked: list[int] = []

    @plugin(name="gate", **DECLARE)
    class Gate:
        @hookimpl
        def admit(self, request: Any, state: Any) -> Any:
            asked.append(request.id)
            return Defer() if len(asked) < 3 else None

    engine, _, events = with_plugins(Gate)
    first, second = ask("a", n_predict=1), ask("b", n_predict=1)
    engine.submit(first)
    engine.submit(second)
    engine.step()
    engine.step()
    assert (asked, events) == ([first.id, first.id], [])
    run(engine)
    assert asked == [first.id] * 3 + [second.id]
    assert len(started(events)) == 2


def test_reject_answers_with_its_sentence_and_frees_the_sampler(with_plugins: Callable[..., Any]) -> None:
    @plugin(name="gate", **DECLARE)
    class Gate:
        @hookimpl
        def admit(self, request: Any) -> Any:
            return Reject("not today") if request.tags.get("bad") else None

    engine, _, events = with_plugins(Gate, n_slots=1)
    bad, good = ask("a", n_predict=1, tags={"bad": True}), ask("b", n_predict=1)
    engine.submit(bad)
    engine.submit(good)
    engine._drain()
    sampler = engine.scheduler._admission.queue[0].sampler
    run(engine)
    assert events[0] == (bad.id, Failed(503, "unavailable_error", "not today"))
    assert sampler.closed
    assert isinstance(events[-1][1], Finished)


def test_select_slot_may_choose_but_not_a_busy_one(with_plugins: Callable[..., Any]) -> None:
    @plugin(name="chooser", **DECLARE)
    class Chooser:
        @hookimpl
        def select_slot(self, request: Any, slots: Any) -> Any:
            return slots[0]

    engine, _, events = with_plugins(Chooser, n_slots=3)
    first, second = ask("a", n_predict=9), ask("b", n_predict=1)
    engine.submit(first)
    engine.step()
    assert engine.plugins.enabled() == ["chooser"]
    engine.submit(second)
    run(engine)
    assert started(events)[first.id].id_slot == 0
    assert started(events)[second.id].id_slot != 0
    assert engine.plugins.enabled() == []


class Hit:
    """A stored prefix, put into the slot's memory by hand."""

    def __init__(self, kv: Any, tokens: list[int], *, breaks: bool = False) -> None:
        self.n_tokens, self._kv, self._tokens, self._breaks = len(tokens), kv, tokens, breaks

    def start(self, slot: Slot, n_kept: int) -> None:
        assert slot.busy
        assert self._kv.held[slot.seq_id] == self._tokens[:n_kept]

    def ready(self) -> bool:
        return True

    def abandon(self) -> None:
        assert self._breaks

    def restore(self, slot: Slot) -> None:
        self._kv.held[slot.seq_id] = list(self._tokens[: 2 if self._breaks else None])
        if self._breaks:
            raise OSError("the store is gone")


@pytest.mark.parametrize("breaks", [False, True])
def test_find_prefix_restores_and_a_broken_one_costs_only_its_plugin(
    with_plugins: Callable[..., Any], breaks: bool
) -> None:
    kv: list[Any] = []

    @plugin(name="store", **DECLARE)
    class Store:
        @hookimpl
        def find_prefix(self, request: Any, slot: Any) -> Any:
            return Hit(kv[0], request.prompt[:20].tolist(), breaks=breaks)

    engine, runner, events = with_plugins(Store, n_slots=1)
    kv.append(runner.kv)
    request = ask(np.arange(40, 70).tolist(), n_predict=2)
    engine.submit(request)
    run(engine)
    assert started(events)[request.id].n_cached == (0 if breaks else 20)
    assert isinstance(events[-1][1], Finished)
    assert engine.plugins.enabled() == ([] if breaks else ["store"])
    assert engine.slots[0].tokens.view().tolist() == runner.kv.held[0]
