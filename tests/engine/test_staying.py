"""Idle slots that nobody may be moved to, because what they hold would be lost."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from llamamg import arrange, hookimpl, staying
from llamamg.plugins import plugin
from llamamg.request import Started
from llamamg.testing import ask, run

from .moving import DECLARE, alone, prompt, texts


@plugin(name="wanting", **DECLARE)
class Wanting:
    """Wants whatever is at sequence id 1 at 0."""

    @hookimpl
    def arrange_slots(self, state: Any) -> Any:
        busy = {slot.seq_id for slot in state.slots if slot.busy}
        return [(1, 0)] if 1 in busy and 0 not in busy else None


def storing(answers: list[bool | None]) -> type[Any]:
    """Says in turn whether a slot is stored; the last answer for ever."""

    @plugin(name="storing", **DECLARE)
    class Storing:
        @hookimpl
        def is_stored(self, slot: Any) -> Any:
            return answers.pop(0) if len(answers) > 1 else answers[0]

    return Storing


@pytest.fixture
def tiny_swaps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arrange, "SWAP_BYTES_MAX", 16)
    monkeypatch.setattr(staying, "AGAIN_S", 0.0)


@pytest.mark.parametrize("hooks", [(), (storing([None]),), (storing([False]),)])
def test_what_is_too_large_to_swap_is_not_given_up(
    with_plugins: Callable[..., Any], tiny_swaps: None, hooks: tuple[Any, ...]
) -> None:
    engine, _, events = with_plugins(Wanting, *hooks, n_slots=2)
    engine.submit(ask(prompt(0), n_predict=3, id_slot=0))
    run(engine)
    stays = ask(prompt(1), n_predict=9, id_slot=1)
    engine.submit(stays)
    run(engine)
    assert (engine.stats.n_moves, engine.stats.n_moves_dropped) == (0, 0)
    assert engine.slots[0].stays
    again = ask([*prompt(0), *engine.slots[0].tokens.view()[12:].tolist(), 50], n_predict=1, id_slot=0)
    engine.submit(again)
    run(engine)
    assert next(e.n_cached for i, e in events if i == again.id and isinstance(e, Started)) == 14
    assert texts(events)[stays.id] == alone(1, 9)


def test_once_it_is_stored_it_makes_room(with_plugins: Callable[..., Any], tiny_swaps: None) -> None:
    """The plugins are asked again without anything else having changed."""
    engine, runner, events = with_plugins(Wanting, storing([False, False, True]), n_slots=2)
    engine.submit(ask(prompt(0), n_predict=3, id_slot=0))
    run(engine)
    moved = ask(prompt(1), n_predict=9, id_slot=1)
    engine.submit(moved)
    run(engine)
    assert (engine.stats.n_moves, engine.stats.n_moves_dropped) == (1, 1)
    ids = [row[0] for batch in runner.batches for row in batch][-9:]
    assert (set(ids), ids) == ({0, 1}, sorted(ids, reverse=True))
    assert (len(engine.slots[0].tokens), runner.kv.held[1]) == (0, [])
    assert texts(events)[moved.id] == alone(1, 9)


def test_memory_is_asked_for_few_sizes(with_plugins: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """It goes through all cells of a sequence: what is known of fewer and of more tokens answers the rest."""
    engine, runner, _ = with_plugins(Wanting, n_slots=2)
    asked: list[int] = []
    size = type(runner.kv).size
    monkeypatch.setattr(
        type(runner.kv), "size", lambda self, seq_id, flags=0: asked.append(seq_id) or size(self, seq_id)
    )
    monkeypatch.setattr(arrange, "SWAP_BYTES_MAX", size(runner.kv, 0) + 1)
    marks = staying.Staying(engine.slots, runner.kv, engine.calls)
    slot = engine.slots[0]
    for n, stays in ((10, True), (8, True), (11, True), (10, True)):
        slot.tokens.keep(0)
        slot.tokens.extend(range(n))
        runner.kv.held[0] = list(range(n))
        marks.mark([slot], (0,))
        assert slot.stays == stays
    assert len(asked) == 2
    monkeypatch.setattr(arrange, "SWAP_BYTES_MAX", 1 << 30)
    marks = staying.Staying(engine.slots, runner.kv, engine.calls)
    for n in (10, 11, 9, 11):
        slot.tokens.keep(0)
        slot.tokens.extend(range(n))
        marks.mark([slot], (0,))
        assert not slot.stays
    assert len(asked) == 4


def test_a_slot_that_is_being_saved_stays_until_it_is(with_plugins: Callable[..., Any], monkeypatch: Any) -> None:
    """However small: the move would cut the copy."""
    monkeypatch.setattr(staying, "AGAIN_S", 0.0)
    cuts: list[int] = []

    class Copying:
        is_over = False

        def cut(self, n_kept: int) -> None:
            cuts.append(n_kept)

        def give_way(self, begin: int, end: int, within_s: float) -> None: ...

    copying = Copying()
    engine, _, events = with_plugins(Wanting, n_slots=2)
    engine.submit(ask(prompt(0), n_predict=3, id_slot=0))
    run(engine)
    engine.slots[0].copying = copying
    moved = ask(prompt(1), n_predict=12, id_slot=1)
    engine.submit(moved)
    for _ in range(5):
        engine.step()
    assert (engine.stats.n_moves, cuts) == (0, [])
    copying.is_over = True
    engine.step()
    assert engine.stats.n_moves == 1
    run(engine)
    assert texts(events)[moved.id] == alone(1, 12)


@pytest.mark.parametrize("is_small", [False, True])
def test_a_group_takes_nobody_where_something_would_be_lost(
    with_plugins: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, is_small: bool
) -> None:
    if not is_small:
        monkeypatch.setattr(arrange, "SWAP_BYTES_MAX", 16)

    @plugin(name="balancer", **DECLARE)
    class Balancer:
        @hookimpl
        def balance_groups(self, state: Any) -> Any:
            at = {slot.home: slot for slot in state.slots}
            return [(1, 2)] if at[1].sequence is not None and not at[2].busy and len(at[2].tokens) else None

    engine, _, events = with_plugins(Balancer, n_slots=4, n_groups=2)
    kept = ask(prompt(0), n_predict=3, id_slot=2)
    engine.submit(kept)
    run(engine)
    stays = ask(prompt(1), n_predict=9, id_slot=1)
    engine.submit(stays)
    run(engine)
    assert (engine.stats.n_hand_overs, engine.stats.n_moves_dropped) == (int(is_small), 0)
    assert len(engine.slots[2].tokens) == 14
    assert texts(events)[stays.id] == alone(1, 9)
