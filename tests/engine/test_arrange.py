"""Moving sequences between sequence ids: the moved one goes on, and what idle slots hold is not lost."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from llamamg import hookimpl
from llamamg.errors import BatchError
from llamamg.plugins import plugin
from llamamg.request import Failed, Finished, Started
from llamamg.testing import ask, run

from .compacting import AlwaysCompact
from .moving import DECLARE, alone, moving, prompt, texts


def test_a_moved_sequence_goes_on_and_its_slot_number_stays(with_plugins: Callable[..., Any]) -> None:
    engine, runner, events = with_plugins(moving([(2, 0)]), n_slots=3)
    request = ask(prompt(0), n_predict=10, id_slot=2)
    engine.submit(request)
    run(engine)
    assert runner.kv.copies == [(2, 0)]
    assert [row[0] for batch in runner.batches for row in batch] == [2, *[0] * 9]
    end = next(event for _, event in events if isinstance(event, Finished))
    assert (end.text, end.id_slot) == (alone(0, 10), 2)
    assert [(slot.id, slot.seq_id) for slot in engine.slots] == [(0, 2), (1, 1), (2, 0)]
    assert engine.stats.n_moves == 1


@pytest.mark.parametrize(("n_swa", "kept"), [(16, [80]), (0, [64, 80])])
def test_no_window_is_kept_before_the_decode_that_copies_it(
    with_plugins: Callable[..., Any], n_swa: int, kept: list[int]
) -> None:
    """The second step moves the sequence, and would snapshot it first. A recurrent state goes with the move at once."""
    engine, runner, events = with_plugins(moving([(2, 0)]), n_slots=3, hybrid=not n_swa)
    runner.kv.n_swa = n_swa
    request = ask(list(range(84)), n_predict=3, id_slot=2)
    engine.submit(request)
    run(engine)
    assert runner.kv.copies == [(2, 0)]
    assert [checkpoint.n_tokens for checkpoint in engine.slots[2].checkpoints] == kept
    assert request.id in texts(events)


@pytest.mark.parametrize(("undecided", "ids"), [(0, [2]), (1, [2, 2, 0]), (3, [2, 2, 2, 2, 0])])
def test_an_empty_list_asks_again_and_none_only_at_the_next_change(
    with_plugins: Callable[..., Any], undecided: int, ids: list[int]
) -> None:
    """The sequence begins in the first step; what is said in the second is said about that."""
    plans = [*[[]] * undecided, [(2, 0)]] if undecided else [None, [(2, 0)]]
    engine, runner, events = with_plugins(moving(*plans), n_slots=3)
    request = ask(prompt(0), n_predict=10, id_slot=2)
    engine.submit(request)
    run(engine)
    where = [row[0] for batch in runner.batches for row in batch]
    assert where == (ids[:-1] + ids[-1:] * (10 - len(ids) + 1))
    assert texts(events)[request.id] == alone(0, 10)


@pytest.mark.parametrize("hybrid", [False, True])
def test_what_the_idle_slot_held_comes_back_after_the_next_decode(
    with_plugins: Callable[..., Any], hybrid: bool
) -> None:
    engine, runner, events = with_plugins(moving(None, None, [(1, 0)]), n_slots=2, hybrid=hybrid)
    engine.submit(ask(prompt(0), n_predict=3, id_slot=0))
    run(engine)
    engine.submit(ask(prompt(1), n_predict=9, id_slot=1))
    engine.step()
    engine.step()
    assert engine.slots[0].seq_id == 1
    assert engine.slots[0].tokens.view().tolist() == runner.kv.held[1]
    assert len(engine.slots[0].tokens) == 14
    run(engine)
    again = ask([*prompt(0), *engine.slots[0].tokens.view()[12:].tolist(), 50], n_predict=1, id_slot=0)
    engine.submit(again)
    run(engine)
    assert next(e.n_cached for i, e in events if i == again.id and isinstance(e, Started)) == 14
    assert engine.stats.n_moves_dropped == 0


def test_a_request_for_what_is_put_aside_waits_until_it_is_back(with_plugins: Callable[..., Any]) -> None:
    engine, _, events = with_plugins(moving(None, None, [(1, 0)]), n_slots=2)
    engine.submit(ask(prompt(0), n_predict=3, id_slot=0))
    run(engine)
    engine.submit(ask(prompt(1), n_predict=9, id_slot=1))
    engine.step()
    taken = ask(prompt(0), n_predict=4, id_slot=0)
    engine.submit(taken)
    run(engine)
    assert (engine.stats.n_moves, engine.stats.n_moves_dropped) == (1, 0)
    assert next(e.n_cached for i, e in events if i == taken.id and isinstance(e, Started)) == 11
    assert texts(events)[taken.id] == alone(0, 4)


@pytest.mark.parametrize("moves", [[(0, 1)], [(2, 0)], [(1, 1)], [(1, 9)], [(1, 2), (1, 0)]])
def test_impossible_moves_are_refused_as_a_whole(with_plugins: Callable[..., Any], moves: Any) -> None:
    engine, runner, events = with_plugins(moving(moves), n_slots=3)
    request = ask(prompt(0), n_predict=5, id_slot=1)
    engine.submit(request)
    run(engine)
    assert runner.kv.copies == []
    assert engine.plugins.enabled() == []
    assert texts(events)[request.id] == alone(0, 5)


def test_a_chain_of_moves(with_plugins: Callable[..., Any]) -> None:
    engine, runner, events = with_plugins(moving([(1, 2), (0, 1)]), n_slots=3)
    requests = [ask(prompt(i), n_predict=6, id_slot=i) for i in range(2)]
    for request in requests:
        engine.submit(request)
    run(engine)
    assert runner.kv.copies == [(1, 2), (0, 1)]
    assert [texts(events)[r.id] for r in requests] == [alone(0, 6), alone(1, 6)]


def test_five_slots_of_which_two_have_ended_stay_together(with_plugins: Callable[..., Any]) -> None:
    engine, runner, events = with_plugins(AlwaysCompact, n_slots=5)
    requests = [ask(prompt(i), n_predict=4 if i in (1, 3) else 20, id_slot=i) for i in range(5)]
    for request in requests:
        engine.submit(request)
    run(engine)
    ids = [[row[0] for row in batch] for batch in runner.batches]
    assert ids[0] == [0, 1, 2, 3, 4]
    assert all(batch == list(range(batch[0], batch[0] + len(batch))) for batch in ids)
    assert len(ids[-1]) == 3
    assert [texts(events)[r.id] for r in requests] == [alone(i, 4 if i in (1, 3) else 20) for i in range(5)]


def test_nothing_is_restored_before_the_decode_that_copies_a_moved_sequence(with_plugins: Callable[..., Any]) -> None:
    """libllama copies the cells of a move in the next decode: what was put there before would be what it copies."""
    begun: list[int] = []
    made: list[Any] = []

    class Hit:
        n_tokens = 8

        def start(self, slot: Any, n_kept: int) -> None:
            begun.append(len(made[0].batches))

        def ready(self) -> bool:
            return True

        def restore(self, slot: Any) -> None:
            made[0].kv.held[slot.seq_id] = prompt(1)[:8]

        def abandon(self) -> None: ...

    @plugin(name="store", **DECLARE)
    class Store:
        @hookimpl
        def find_prefix(self, request: Any, slot: Any) -> Any:
            return Hit() if list(request.prompt) == prompt(1) else None

    engine, runner, events = with_plugins(moving([(2, 0)]), Store, n_slots=3)
    made.append(runner)
    first, second = ask(prompt(0), n_predict=12, id_slot=2), ask(prompt(1), n_predict=3, id_slot=0)
    engine.submit(first)
    engine.step()
    engine.submit(second)
    n_before = len(runner.batches)
    engine.step()
    assert runner.kv.copies == [(2, 0)]
    assert not begun
    run(engine)
    assert begun == [n_before + 1]
    assert texts(events) == {first.id: alone(0, 12), second.id: alone(1, 3)}


def test_a_move_whose_decode_never_comes_holds_nobody_back(with_plugins: Callable[..., Any]) -> None:
    """And nothing is restored over cells that a later decode copies."""
    offered: list[int] = []

    @plugin(name="store", **DECLARE)
    class Store:
        @hookimpl
        def find_prefix(self, request: Any, slot: Any) -> Any:
            offered.append(request.id)

    engine, runner, events = with_plugins(moving([(2, 0)]), Store, n_slots=3)
    first, second, third = ask(prompt(0), n_predict=12, id_slot=2), ask(prompt(1), n_predict=3), ask(prompt(2))
    engine.submit(first)
    engine.step()
    runner.fail = lambda batch: BatchError(-3, "Compute error.")
    for _ in range(3):
        engine.step()
        if any(isinstance(event, Failed) for _, event in events):
            break
    assert runner.kv.copies == [(2, 0)]
    assert [id_ for id_, event in events if isinstance(event, Failed)] == [first.id]
    assert not engine.scheduler.is_settled(0)
    runner.fail = lambda batch: None
    engine.submit(second)
    run(engine)
    assert engine.scheduler.is_settled(0)
    engine.submit(third)
    run(engine)
    assert texts(events)[second.id] == alone(1, 3)
    assert offered == [first.id, third.id]
