"""Random arrivals, cancels, failures and toggles: whatever happens, nothing leaks and no text changes."""

from __future__ import annotations

import random
from typing import Any

import pytest

from llamamg import hookimpl
from llamamg.errors import BatchError, KVFull
from llamamg.plugins import plugin
from llamamg.request import Delta, Failed, Finished, Progress, Started
from llamamg.testing import FakeSampler, ask, fake_engine, run
from llamamg_plugins.prefill_gate import PrefillGate

from .compacting import AlwaysCompact
from .guesser import DECLARE, N_CTX_SLOT, Drafter, model


@plugin(name="splitter", **DECLARE)
class Splitter:
    """Several batches a step, so that cancels and failures fall between them."""

    @hookimpl
    def plan_step(self, plan: Any) -> None:
        rows = plan.batches[0].rows
        plan.split(plan.batches[0], [rows[::2], rows[1::2]])


@plugin(name="shuffler", **DECLARE)
class Shuffler:
    """Moves some busy sequence to some idle id."""

    def __init__(self) -> None:
        self.rng = random.Random(3)

    @hookimpl
    def arrange_slots(self, state: Any) -> Any:
        busy = [slot.seq_id for slot in state.slots if slot.busy]
        idle = [slot.seq_id for slot in state.slots if not slot.busy]
        return [(self.rng.choice(busy), self.rng.choice(idle))] if busy and idle else None


def random_request(rng: random.Random, n_slots: int) -> Any:
    stem = [40 + (i * 7) % 50 for i in range(80)]
    prompt = stem[: rng.randrange(0, 60)] + [rng.randrange(32, 120) for _ in range(rng.randrange(0, 40))]
    return ask(
        prompt,
        n_predict=rng.choice((-1, 0, 1, 5, 30)),
        stop=rng.choice(((), ("e", "xy"), ("?",))),
        stream=rng.random() < 0.5,
        cache_prompt=rng.random() < 0.8,
        return_progress=rng.random() < 0.2,
        id_slot=rng.choice((-1, -1, -1, rng.randrange(n_slots))),
        priority=rng.choice((0, 0, 1)),
    )


def alone(request: Any) -> tuple[Any, str, int, bool]:
    engine, _, events = fake_engine(1, next_token=model, n_ctx_slot=N_CTX_SLOT)
    copy = ask(request.prompt.tolist(), n_predict=request.n_predict, stop=request.stop)
    engine.submit(copy)
    run(engine)
    end = events[-1][1]
    assert isinstance(end, Finished)
    return end.reason, end.text, end.n_decoded, end.truncated


def check_running(engine: Any, runner: Any) -> None:
    slots = engine.slots
    assert sorted(slot.seq_id for slot in slots) == list(range(len(slots)))
    running = engine.scheduler.running
    assert {id(slot.sequence) for slot in slots if slot.busy} == {id(sequence) for sequence in running}
    for slot in slots:
        if not slot.busy and not engine._pending:  # what a cancel left in planned batches is cut when they are reached
            held = slot.tokens.view().tolist()
            assert runner.kv.held[slot.seq_id][: len(held)] == held


@pytest.mark.parametrize("seed", range(60))
def test_whatever_happens(with_plugins: Any, seed: int) -> None:
    rng = random.Random(seed)
    n_slots, hybrid, fails = rng.randrange(1, 5), rng.random() < 0.4, rng.random() < 0.5
    classes = [Drafter, Splitter, *((Shuffler, AlwaysCompact, PrefillGate) if n_slots > 1 else ())]
    engine, runner, events = with_plugins(
        *classes,
        n_slots=n_slots,
        n_draft_max=rng.choice((0, 4)),
        hybrid=hybrid,
        n_rs_seq=rng.choice((0, 4)),
        next_token=model,
        n_ctx_slot=N_CTX_SLOT,
        n_batch=rng.choice((16, 64)),
        n_ubatch=8,
    )
    samplers: list[FakeSampler] = []
    new_sampler = engine._new_sampler

    def tracked(request: Any) -> Any:
        samplers.append(new_sampler(request))
        return samplers[-1]

    def fail(batch: Any) -> BatchError | None:
        assert len({id(row.sequence) for row in batch.rows}) == len(batch.rows)
        if not fails or rng.random() > 0.15:
            return None
        if rng.random() < 0.5:
            return KVFull(1, "no room")
        for row in batch.rows[: rng.randrange(len(batch.rows) + 1)]:
            runner.kv.put(row.sequence.slot.seq_id, row.pos0, [int(t) for t in row.tokens])
        return BatchError(-3, "Compute error.")

    engine._new_sampler, runner.fail = tracked, fail
    requests: list[Any] = []
    cancelled_at: dict[int, int] = {}
    for _ in range(rng.randrange(20, 120)):
        if rng.random() < 0.25:
            requests.append(random_request(rng, n_slots))
            engine.submit(requests[-1])
        if requests and rng.random() < 0.06:
            gone = rng.choice(requests)
            engine.cancel(gone.id)
            cancelled_at.setdefault(gone.id, len(events))
        if rng.random() < 0.2:
            name = rng.choice(classes).declaration.name
            engine.plugins.toggle(name, name not in engine.plugins.enabled())
        engine.step()
        check_running(engine, runner)
    run(engine)
    check_running(engine, runner)

    assert not any(slot.busy for slot in engine.slots)
    assert engine.scheduler.n_waiting == 0
    assert len(samplers) == len(requests)
    assert all(sampler.closed for sampler in samplers)
    assert not any(view.quarantined for view in engine.plugins.views())
    for request in requests:
        mine = [event for id_, event in events if id_ == request.id]
        ends = [event for event in mine if isinstance(event, Finished | Failed)]
        if request.id in cancelled_at:
            assert all(id_ != request.id for id_, _ in events[cancelled_at[request.id] :])
            assert len(ends) <= 1
        else:
            assert len(ends) == 1
        if not ends:
            continue
        assert ends == mine[-1:]
        assert isinstance(mine[0], Started)
        if isinstance(ends[0], Failed):
            assert fails
            continue
        end = ends[0]
        if len(request.prompt):
            assert (end.reason, end.text, end.n_decoded, end.truncated) == alone(request)
        deltas = [event for event in mine if isinstance(event, Delta)]
        assert all(isinstance(event, Delta | Progress) for event in mine[1:-1])
        if request.stream:
            assert "".join(delta.text for delta in deltas) + end.tail == end.text
            assert [d.n_decoded for d in deltas] == sorted({d.n_decoded for d in deltas})
        else:
            assert deltas == []
