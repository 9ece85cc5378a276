"""Several contexts under random arrivals, cancels, failures, moves and toggles: nothing leaks and no text changes.

The stand-in memory refuses to be touched while its context computes, so a test that passes also waited for nobody.
"""

from __future__ import annotations

import random
from typing import Any

import pytest

from llamamg import hookimpl
from llamamg.errors import BatchError, KVFull
from llamamg.plugins import plugin
from llamamg.request import Failed, Finished
from llamamg.testing import EOS, FakeSampler, ask, fake_engine, run

from .compacting import AlwaysCompact
from .guesser import DECLARE, N_CTX_SLOT, Drafter, model


def text_of(prompt: list[int], n_predict: int) -> list[int]:
    """What the stand-in says by itself."""
    so_far, given = list(prompt), []
    while len(given) != n_predict:
        given.append(model(None, so_far))
        so_far.append(given[-1])
        if given[-1] == EOS or len(so_far) >= N_CTX_SLOT:
            break
    return given


def mover(rng: random.Random, n_most: int) -> type[Any]:
    """A plugin that moves sequences between groups whether that helps or not."""

    @plugin(name="mover", **DECLARE)
    class Mover:
        @hookimpl
        def batches_in_flight(self) -> int:
            return n_most

        @hookimpl
        def balance_groups(self, state: Any) -> Any:
            busy = [slot for slot in state.slots if slot.sequence is not None]
            idle = [slot for slot in state.slots if slot.sequence is None]
            if not busy or not idle or rng.random() < 0.4:
                return None
            a, b = rng.choice(busy), rng.choice(idle)
            return [(a.home, b.home)] if a.group != b.group else None

    return Mover


def check_places(engine: Any, runner: Any) -> None:
    """Every slot has a home of its own, and lies there unless it is at the prompts' context."""
    slots, layout = engine.slots, runner.kv.layout
    assert sorted(slot.home for slot in slots) == list(range(len(slots)))
    away = [slot.seq_id for slot in slots if slot.seq_id != slot.home]
    assert len(set(away)) == len(away)
    assert set(away) <= set(layout.prefill)
    for slot in slots:
        assert (slot.context, slot.group) == (layout.context(slot.seq_id), layout.context(slot.home))
        planned = any(row.sequence.slot is slot for batch in engine._pending for row in batch.rows)
        if not slot.busy and not planned and slot.context not in runner.kv.computing:
            held = slot.tokens.view().tolist()
            assert runner.kv.held[slot.seq_id][: len(held)] == held


@pytest.mark.parametrize("seed", range(80))
def test_whatever_happens(with_plugins: Any, seed: int) -> None:
    rng = random.Random(seed)
    n_slots = rng.randrange(2, 6)
    n_groups, n_prefill = rng.randrange(1, 4), rng.randrange(0, 3)
    fails = rng.random() < 0.4
    classes = [mover(rng, rng.choice((1, 2, 9))), Drafter, AlwaysCompact]
    engine, runner, events = with_plugins(
        *classes,
        n_slots=n_slots,
        n_groups=n_groups,
        n_prefill_slots=n_prefill,
        n_draft_max=rng.choice((0, 3)),
        hybrid=rng.random() < 0.4,
        n_rs_seq=rng.choice((0, 4)),
        next_token=model,
        n_ctx_slot=N_CTX_SLOT,
        n_batch=rng.choice((16, 64)),
        n_ubatch=8,
    )
    engine.scheduler.moves._n_prompt_local = rng.choice((0, 5))
    runner.pick = rng.randrange
    samplers: list[FakeSampler] = []
    new_sampler = engine._new_sampler

    def tracked(request: Any) -> Any:
        samplers.append(new_sampler(request))
        return samplers[-1]

    def fail(batch: Any) -> BatchError | None:
        assert all(not row.sequence.sampler.closed for row in batch.rows)
        if not fails or rng.random() > 0.1:
            return None
        return KVFull(1, "no room") if rng.random() < 0.5 else BatchError(-3, "Compute error.")

    engine._new_sampler, runner.fail = tracked, fail
    runner.kv.fail_transfer = lambda source, target: fails and rng.random() < 0.1
    requests: list[Any] = []
    cancelled: set[int] = set()
    stem = [40 + (i * 7) % 50 for i in range(80)]
    for _ in range(rng.randrange(20, 150)):
        if rng.random() < 0.3:
            prompt = stem[: rng.randrange(0, 60)] + [rng.randrange(32, 120) for _ in range(rng.randrange(1, 30))]
            id_slot = rng.choice((-1, -1, rng.randrange(n_slots)))
            requests.append(ask(prompt, n_predict=rng.choice((1, 5, 30)), return_tokens=True, id_slot=id_slot))
            engine.submit(requests[-1])
        if requests and rng.random() < 0.1:
            gone = rng.choice(requests)
            engine.cancel(gone.id)
            cancelled.add(gone.id)
        if rng.random() < 0.1:
            name = rng.choice(classes).declaration.name
            engine.plugins.toggle(name, name not in engine.plugins.enabled())
        engine.step()
        check_places(engine, runner)
    run(engine)
    check_places(engine, runner)

    assert not any(slot.busy or slot.seq_id != slot.home for slot in engine.slots)
    assert not runner.kv.computing
    assert engine.runner.n_in_flight == engine.scheduler.n_waiting == 0
    assert sorted(engine.scheduler.moves._free_prefill) == list(runner.kv.layout.prefill)
    assert not engine.scheduler.moves.wanted
    assert all(sampler.closed for sampler in samplers)
    assert len(samplers) == len(requests)
    assert not any(view.quarantined for view in engine.plugins.views())
    for request in requests:
        ends = [e for id_, e in events if id_ == request.id and isinstance(e, Finished | Failed)]
        assert len(ends) == 1 or (request.id in cancelled and not ends)
        for end in ends:
            if isinstance(end, Failed):
                assert fails
            else:
                assert list(end.tokens) == text_of(request.prompt.tolist(), request.n_predict)


def test_two_groups_are_in_flight_together_and_each_finishes_in_its_own_time() -> None:
    """The first group is never collected before the second one is through."""
    plugins_on = fake_engine(4, n_groups=2, next_token=model)
    engine, runner, events = plugins_on
    requests = [ask([40 + i, 50, 60], n_predict=12, return_tokens=True) for i in range(4)]
    for request in requests:
        engine.submit(request)
    run(engine)
    assert runner.n_most == 1  # nobody asked for more
    tokens = {id_: list(event.tokens) for id_, event in events if isinstance(event, Finished)}
    assert [tokens[r.id] for r in requests] == [text_of(r.prompt.tolist(), 12) for r in requests]


def test_a_failing_group_takes_down_only_its_own(with_plugins: Any) -> None:
    engine, runner, events = with_plugins(mover(random.Random(0), 2), n_slots=4, n_groups=2, next_token=model)
    engine.plugins.hooks.balance_groups = ()
    runner.fail = lambda batch: BatchError(-3, "Compute error.") if batch.group == 1 else None
    requests = [ask([40 + i, 50, 60], n_predict=12, return_tokens=True, id_slot=i) for i in range(4)]
    for request in requests:
        engine.submit(request)
    run(engine)
    ends = {id_: event for id_, event in events if isinstance(event, Finished | Failed)}
    assert [type(ends[r.id]) for r in requests] == [Finished, Finished, Failed, Failed]
    assert runner.n_most == 2
    assert not any(slot.busy for slot in engine.slots)


def test_a_cancel_in_flight_keeps_the_sampler_until_the_batch_is_back(with_plugins: Any) -> None:
    engine, runner, _ = with_plugins(mover(random.Random(0), 2), n_slots=2, n_groups=2, next_token=model)
    engine.plugins.hooks.balance_groups = ()
    requests = [ask([40 + i, 50, 60], n_predict=40, id_slot=i) for i in range(2)]
    for request in requests:
        engine.submit(request)
    runner.pick = lambda n: n - 1  # the second group always ends first
    engine.step()
    samplers = [sequence.sampler for sequence in engine.scheduler.running]
    assert not runner.is_free(0)
    engine.cancel(requests[0].id)
    engine.step()
    assert not engine.slots[0].busy
    assert not samplers[0].closed
    runner.pick = lambda n: 0
    engine.step()
    assert samplers[0].closed
    assert not samplers[1].closed


def test_a_sampler_is_closed_when_the_batch_of_a_request_that_left_has_failed(with_plugins: Any) -> None:
    engine, runner, _ = with_plugins(mover(random.Random(0), 2), n_slots=2, n_groups=2, next_token=model)
    engine.plugins.hooks.balance_groups = ()
    runner.fail = lambda batch: BatchError(-3, "Compute error.") if batch.group == 0 else None
    requests = [ask([40 + i, 50, 60], n_predict=40, id_slot=i) for i in range(2)]
    for request in requests:
        engine.submit(request)
    runner.pick = lambda n: n - 1  # the second group always ends first
    engine.step()
    sampler = next(sequence.sampler for sequence in engine.scheduler.running if sequence.slot.id == 0)
    engine.cancel(requests[0].id)
    engine.step()
    assert not sampler.closed
    runner.pick = lambda n: 0
    engine.step()
    assert sampler.closed
    run(engine)


def test_a_context_that_a_move_waits_for_gets_no_new_batch(with_plugins: Any) -> None:
    """Two contexts that end in turns would never be free together, and the move would wait for ever."""
    engine, _, _ = with_plugins(mover(random.Random(0), 3), n_slots=3, n_groups=3, next_token=model)
    engine.plugins.hooks.balance_groups = ()
    engine.submit(ask([40, 50, 60], n_predict=40, id_slot=0))
    engine.step()
    moves = engine.scheduler.moves
    moves.request(0, 1)
    assert moves.start((0, 2)) == (2,)
    assert moves.start((1, 2)) == (2,)
    assert moves.wanted
    assert moves.start((0, 1, 2)) == (2,)
    assert not moves.wanted
    run(engine)
