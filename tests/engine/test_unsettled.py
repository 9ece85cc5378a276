"""A sequence was moved, and the batch whose decode would have copied its cells is never submitted."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from llamamg import hookimpl
from llamamg.plugins import plugin
from llamamg.request import Finished, Started
from llamamg.slotfile import SlotBusy
from llamamg.slotfile import _idle as idle
from llamamg.testing import ask, run

from .moving import DECLARE, PROMPT, alone, flights, moving, prompt, texts


@pytest.fixture
def moved(with_plugins: Callable[..., Any]) -> Any:
    """Two groups of two slots; the request of slot 3 was moved from id 3 to 2 and cancelled while its batch waited."""

    def make(**options: Any) -> Any:
        limit, moves = [9], []
        engine, runner, events = with_plugins(flights(limit, moves), n_slots=4, n_groups=2, **options)
        first, second = ask(prompt(0), n_predict=30, id_slot=0), ask(prompt(1), n_predict=30, id_slot=3)
        for request in (first, second):
            engine.submit(request)
        for _ in range(10):
            engine.step()
        limit[0] = 1
        moves.append((3, 2))
        for _ in range(10):
            engine.step()
            if runner.kv.copies:
                break
        assert runner.kv.copies == [(3, 2)]
        assert [batch.group for batch in engine._pending] == [1]
        engine.cancel(second.id)
        return engine, runner, events, first

    return make


def test_the_cells_are_copied_though_nobody_decodes(moved: Any) -> None:
    engine, runner, events, first = moved()
    assert not engine.scheduler.is_settled(1)
    for _ in range(4):
        engine.step()
    assert engine.scheduler.is_settled(1)
    assert runner.kv.settled == [1]
    run(engine)
    assert runner.kv.settled == [1]
    assert texts(events)[first.id] == alone(0, 30)


def test_a_follow_up_leaves_for_the_context_of_prompts_with_cells_that_were_copied(moved: Any) -> None:
    """The stand-in memory refuses a transfer of cells that are not where they belong yet."""
    engine, _, events, first = moved(n_prefill_slots=1)
    engine.scheduler.moves._n_prompt_local = 0
    tokens = engine.slots[3].tokens.view().tolist()
    again = ask([*tokens[:-1], *PROMPT], n_predict=3, id_slot=3)
    engine.submit(again)
    run(engine)
    assert next(e.n_cached for i, e in events if i == again.id and isinstance(e, Started)) == len(tokens) - 1
    ends = [i for i, event in events if isinstance(event, Finished)]
    assert sorted(ends) == [first.id, again.id]


def test_a_request_beside_one_that_waits_for_the_context_of_prompts_does_not_wait_too(moved: Any) -> None:
    engine, runner, events, _ = moved(n_prefill_slots=1, n_batch=8)
    engine.scheduler.moves._n_prompt_local = 20
    long, waits = ask(PROMPT, n_predict=1, id_slot=1), ask(PROMPT[::-1], n_predict=1, id_slot=2)
    for request in (long, waits):
        engine.submit(request)
    for _ in range(4):
        engine.step()
    short = ask(prompt(2), n_predict=1, id_slot=3)
    engine.submit(short)
    run(engine)
    ends = [i for i, event in events if isinstance(event, Finished)]
    assert ends.index(short.id) < ends.index(long.id) < ends.index(waits.id)
    assert runner.kv.settled == [1]


@pytest.mark.parametrize("id_slot", [2, 3])
def test_a_slot_is_not_touched_over_http_before(moved: Any, id_slot: int) -> None:
    engine, *_ = moved()
    assert not engine.scheduler.is_settled(1)
    with pytest.raises(SlotBusy):
        idle(engine, id_slot)
    for _ in range(4):
        engine.step()
    assert idle(engine, id_slot) is engine.slots[id_slot]


def test_what_the_slot_holds_is_right_then(live: Callable[..., Any], smol_model: Path) -> None:
    """With real memory: keys and values are those that are there where nobody was moved."""

    def held(is_moved: bool) -> bytes:
        limit, moves = [9], []
        options = {"n_parallel": 4, "n_groups": 2, "n_batch": 64, "n_ubatch": 64}
        made = live(smol_model, start=False, plugins=(flights(limit, moves),), **options)
        engine = made.engine
        other, gone = (
            ask([*range(60, 20, -1)], n_predict=90, id_slot=0, temperature=0.0),
            ask([*range(20, 60)], n_predict=90, id_slot=3, temperature=0.0),
        )
        for request in (other, gone):
            engine.submit(request)
        slot, n_before = engine.slots[3], 0
        for _ in range(500):
            engine.step()
            if len(slot.tokens) == 50 and not moves:
                limit[0], n_before = 1, 50
                moves.extend([(3, 2)] if is_moved else [])
            if n_before and [batch.group for batch in engine._pending] == [1] and len(slot.tokens) == 51:
                break
        assert slot.seq_id == (2 if is_moved else 3)
        engine.cancel(gone.id)
        for _ in range(8):
            engine.step()
        assert engine.scheduler.is_settled(1)
        assert len(slot.tokens) == 50
        data = engine.kv.save(slot.seq_id, flags=0)
        assert data is not None
        # Behind the rows of the context's first stream is a count for the second one: none.
        return bytes(data[:-4] if is_moved else data)[-1_000_000:]

    assert held(True) == held(False)


@pytest.mark.parametrize(("n_swa", "n_drafted"), [(16, 1), (0, 2)])
def test_no_window_is_copied_aside_for_a_draft_before_its_cells_are_there(
    with_plugins: Callable[..., Any], n_swa: int, n_drafted: int
) -> None:
    """A recurrent state goes with a move at once, so that where there is no window the step of the move has its draft."""

    @plugin(name="drafter", **DECLARE)
    class Drafter:
        @hookimpl
        def draft(self, sequence: Any, limit: int) -> list[int]:
            return [32 + (sequence.last_token + 1 - 32) % 95] if len(engine.scheduler.kv.copies) else []

    engine, runner, events = with_plugins(moving([], [(2, 0)]), Drafter, n_slots=3, n_draft_max=1, hybrid=True)
    runner.kv.n_swa = n_swa
    request = ask(prompt(0), n_predict=6, id_slot=2)
    engine.submit(request)
    for _ in range(10):
        engine.step()
        if len(runner.batches) and runner.kv.copies:
            break
    engine.step()
    rows = [row for batch in runner.batches for row in batch]
    assert [n for *_, n, _ in rows[1:] if n == 2] == [2] * n_drafted
    run(engine)
    assert texts(events)[request.id] == alone(0, 6)
