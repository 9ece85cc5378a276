"""Which prompt gets a place in the context for prompts: short ones do not wait for all long ones, and nobody waits for ever."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest

from llamamg.plugins.testing import on
from llamamg.plugins.testing import plugin as made_plugin
from llamamg.request import Finished
from llamamg.testing import ask, fake_engine, run
from llamamg_plugins.prefill_gate import PrefillGate


def served(n_prefill: int, n_slots: int = 6, *classes: type[Any], **sizes: int) -> Any:
    flights = made_plugin("flights", {"batches_in_flight": lambda self: 9})
    return fake_engine(
        n_slots, plugins=on(flights, *classes), n_prefill_slots=n_prefill, n_batch=32, n_ctx_slot=2048, **sizes
    )


def asked(engine: Any, n_tokens: int, priority: int = 0) -> Any:
    request = ask([40 + len(engine.scheduler.running)] * n_tokens, n_predict=2, priority=priority)
    engine.submit(request)
    engine.step()
    return request


def at_prefill(engine: Any) -> set[int]:
    first = engine.runner.kv.layout.prefill.start
    return {slot.sequence.request.id for slot in engine.slots if slot.sequence and slot.seq_id >= first}


def ended(engine: Any, events: list[Any]) -> list[int]:
    """Ids of requests in the order in which their answers ended."""
    run(engine)
    assert engine.scheduler.moves._at_prefill == []
    return [id_ for id_, event in events if isinstance(event, Finished)]


def test_with_one_place_the_shortest_and_the_oldest_take_turns() -> None:
    engine, _, events = served(1)
    ids = [asked(engine, n).id for n in (400, 300, 250, 260, 210, 220)]
    # The first is there already; then the shortest, the oldest, the shortest …
    assert [ids.index(id_) for id_ in ended(engine, events)] == [0, 4, 1, 5, 2, 3]


def test_lower_priority_numbers_go_first() -> None:
    engine, _, events = served(1)
    first, usual, urgent = asked(engine, 200), asked(engine, 100), asked(engine, 300, priority=-1)
    assert ended(engine, events) == [first.id, urgent.id, usual.id]


def test_the_last_of_several_places_is_for_a_prompt_that_is_done_soon() -> None:
    engine, _, events = served(2)
    long, other, middle = asked(engine, 1200), asked(engine, 1100), asked(engine, 300)
    assert at_prefill(engine) == {long.id}
    short = asked(engine, 100)
    assert at_prefill(engine) == {long.id, short.id}
    order = ended(engine, events)
    assert order[:2] == [long.id, short.id], "without prefill-gate prompts go in the order of their slots"
    assert set(order[2:]) == {other.id, middle.id}


def test_the_last_of_several_places_is_for_an_urgent_prompt_too() -> None:
    engine, _, _ = served(2)
    usual, urgent = asked(engine, 1200), asked(engine, 1100, priority=-1)
    assert at_prefill(engine) == {usual.id, urgent.id}
    engine, _, _ = served(2)
    urgent = asked(engine, 1200, priority=-1)
    for priority in (0, -1):
        asked(engine, 1100, priority)
    assert at_prefill(engine) == {urgent.id}
    soon = asked(engine, 100)
    assert at_prefill(engine) == {urgent.id, soon.id}, "less urgent, but done soon"


def test_turns_at_the_last_place_are_not_those_of_the_oldest() -> None:
    """An old long prompt; one of middle length, and two short ones that pass it, come again and again."""
    engine, _, _ = served(2)
    moves = engine.scheduler.moves

    def waits(n_left: int) -> Any:
        new = SimpleNamespace(n_prompt_left=n_left, request=SimpleNamespace(priority=0))
        moves._for_prefill.append(new)
        return new

    old = waits(1000)
    for _ in range(3):
        moves._at_prefill, moves._free_prefill = [], [6, 7]
        middle = waits(400)
        chosen = moves._next_prompt()
        if chosen is old:
            return
        assert chosen is middle
        moves._at_prefill, moves._free_prefill = [SimpleNamespace(sequence=middle)], [7]
        shorts = [waits(90), waits(80)]
        for _ in shorts:
            passing = moves._next_prompt()
            assert passing in shorts
            moves._for_prefill.remove(passing)
        assert moves._next_prompt() is None, "the old one is not done soon beside the other"
        moves._for_prefill.remove(middle)
    pytest.fail("it starves")


def test_the_last_place_is_anybodys_once_nobody_is_computed() -> None:
    engine, _, events = served(2)
    first, second = asked(engine, 100), asked(engine, 90)
    order = ended(engine, events)
    assert order == [first.id, second.id]


def test_a_cancelled_prompt_keeps_no_place() -> None:
    engine, _, events = served(2)
    first, second = asked(engine, 200), asked(engine, 190)
    engine.cancel(first.id)
    assert ended(engine, events) == [second.id]
    assert sorted(engine.scheduler.moves._free_prefill) == list(engine.runner.kv.layout.prefill)


@pytest.mark.parametrize("n_prefill", [1, 2, 3])
def test_a_long_prompt_gets_its_place_however_many_short_ones_come(n_prefill: int) -> None:
    """Of those that wait the oldest is every second one; and a prompt that is passed has every second step."""
    rng = random.Random(n_prefill)
    engine, _, events = served(n_prefill, 8, PrefillGate)
    for _ in range(8):
        asked(engine, rng.randrange(70, 100))
    old = ask([99] * 400, n_predict=2)
    engine.submit(old)
    n_before = 0
    for _ in range(4000):
        if len(engine.scheduler.running) + engine.scheduler.n_waiting < 8:
            asked(engine, rng.randrange(70, 100))
        engine.step()
        n_before = sum(isinstance(event, Finished) for _, event in events)
        if any(id_ == old.id and isinstance(event, Finished) for id_, event in events):
            break
    else:
        pytest.fail("it starves")
    # Twice the seven before it, and what is computed in the steps between its own.
    assert n_before <= 2 * 7 + -(-400 // 70) + n_prefill
