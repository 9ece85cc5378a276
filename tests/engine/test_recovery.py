"""Batches that cannot be computed: who gets an error, and who does not notice."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from llamamg import hookimpl
from llamamg.decisions import Fail, Retry, Shrink
from llamamg.errors import BatchError, KVFull
from llamamg.guard import Guard
from llamamg.plugins import plugin
from llamamg.request import Failed, Finished
from llamamg.testing import ask, fake_engine, run

DECLARE: dict[str, Any] = {"summary": "", "helps": "", "hurts": "", "guard": Guard.same_tokens()}
PROMPT = list(range(40, 120))


class Room:
    """A cache that holds `n_cells` tokens over all sequences."""

    def __init__(self, runner: Any, n_cells: int) -> None:
        self.runner, self.n_cells, self.n_refused = runner, n_cells, 0

    def __call__(self, batch: Any) -> BatchError | None:
        held = sum(len(tokens) for tokens in self.runner.kv.held.values())
        if held + batch.n_tokens <= self.n_cells:
            return None
        self.n_refused += 1
        return KVFull(1, "no room")


def last(events: list[Any], request: Any) -> Any:
    ends = [event for id_, event in events if id_ == request.id and isinstance(event, Finished | Failed)]
    assert len(ends) == 1
    return ends[0]


def text_alone(prompt: list[int], n_predict: int) -> str:
    engine, _, events = fake_engine(1)
    request = ask(prompt, n_predict=n_predict)
    engine.submit(request)
    run(engine)
    text: str = last(events, request).text
    return text


def test_full_cache_gives_up_the_oldest_idle_slot_first() -> None:
    engine, runner, events = fake_engine(3)
    for slot in (0, 1):
        engine.submit(ask(PROMPT[:40], n_predict=1, id_slot=slot))
        run(engine)
    runner.fail = room = Room(runner, 100)
    request = ask(PROMPT[40:80], n_predict=2, id_slot=2)
    engine.submit(request)
    run(engine)
    assert isinstance(last(events, request), Finished)
    assert [len(slot.tokens) for slot in engine.slots] == [0, 40, 41]
    assert [len(runner.kv.held[i]) for i in range(3)] == [0, 40, 41]
    assert room.n_refused == 1
    assert runner.batches[-2] == [(2, 0, 40, 1)]  # not halved: there was room after that


def test_full_cache_without_idle_slots_is_tried_in_halves_and_the_texts_are_right() -> None:
    engine, runner, events = fake_engine(2, n_batch=64)
    one, two = ask(PROMPT[:30], n_predict=3, id_slot=0), ask(PROMPT[30:70], n_predict=3, id_slot=1)
    sizes: list[int] = []

    def fail(batch: Any) -> BatchError | None:
        sizes.append(batch.n_tokens)
        return KVFull(1, "only small ones today") if batch.n_tokens > 20 else None

    runner.fail = fail
    engine.submit(one)
    engine.submit(two)
    run(engine)
    assert sizes[:4] == [64, 32, 16, 16]
    assert last(events, one).text == text_alone(PROMPT[:30], 3)
    assert last(events, two).text == text_alone(PROMPT[30:70], 3)
    assert last(events, two).timings.prompt_n == 40


def test_full_at_one_token_fails_that_sequence_and_the_other_goes_on_with_its_room() -> None:
    engine, runner, events = fake_engine(2, n_ctx_slot=512)
    runner.fail = Room(runner, 60)
    one, two = ask(PROMPT[:20], n_predict=30, id_slot=0), ask(PROMPT[20:50], n_predict=30, id_slot=1)
    engine.submit(one)
    engine.submit(two)
    run(engine)
    ends = [last(events, one), last(events, two)]
    failed = [end for end in ends if isinstance(end, Failed)]
    assert [(end.code, end.type, end.message) for end in failed] == [
        (500, "server_error", "Context size has been exceeded.")
    ]
    survivor = next(end for end in ends if isinstance(end, Finished))
    assert survivor.text == text_alone(PROMPT[:20] if ends[0] is survivor else PROMPT[20:50], 30)


def test_a_prompt_too_large_for_the_cache_fails_and_leaves_it_empty() -> None:
    engine, runner, events = fake_engine(1)
    runner.fail = Room(runner, 30)
    request = ask(PROMPT[:50], n_predict=1)
    engine.submit(request)
    run(engine)
    assert last(events, request).message == "Context size has been exceeded."
    assert (runner.kv.held[0], len(engine.slots[0].tokens), engine.slots[0].busy) == ([], 0, False)


def broken(*, n_times: int, only: int | None = None) -> Callable[[Any], BatchError | None]:
    left = [n_times]

    def fail(batch: Any) -> BatchError | None:
        if left[0] > 0 and (only is None or any(row.sequence.slot.id == only for row in batch.rows)):
            left[0] -= 1
            return BatchError(-3, "Compute error.")
        return None

    return fail


def test_compute_error_once_is_not_noticed() -> None:
    engine, runner, events = fake_engine(2)
    requests = [ask(PROMPT[:10], n_predict=4), ask(PROMPT[10:20], n_predict=4)]
    for request in requests:
        engine.submit(request)
    engine.step()
    runner.fail = broken(n_times=1)
    run(engine)
    assert [last(events, r).text for r in requests] == [text_alone(PROMPT[i : i + 10], 4) for i in (0, 10)]


def test_compute_error_of_one_sequence_fails_only_that_one() -> None:
    engine, runner, events = fake_engine(2)
    good, bad = ask(PROMPT[:10], n_predict=8, id_slot=0), ask(PROMPT[10:20], n_predict=8, id_slot=1)
    engine.submit(good)
    engine.submit(bad)
    engine.step()
    runner.fail = broken(n_times=10**9, only=1)
    run(engine)
    assert last(events, bad) == Failed(500, "server_error", "Compute error.")
    assert last(events, good).text == text_alone(PROMPT[:10], 8)
    assert (runner.kv.held[1], len(engine.slots[1].tokens)) == ([], 0)


def test_a_batch_that_fails_twice_is_not_tried_for_ever() -> None:
    engine, runner, events = fake_engine(1)
    tries: list[int] = []

    def fail(batch: Any) -> BatchError | None:
        tries.append(batch.n_tokens)
        return BatchError(-3, "Compute error.")

    runner.fail = fail
    request = ask(PROMPT[:40], n_predict=1)
    engine.submit(request)
    run(engine)
    assert isinstance(last(events, request), Failed)
    assert tries == [40, 20]


@pytest.mark.parametrize("hybrid", [False, True])
def test_what_a_failed_batch_left_in_the_cache_is_taken_back_or_its_sequence_fails(hybrid: bool) -> None:
    """libllama computes a batch in ubatches: those before the failing one stay in its memory."""
    engine, runner, events = fake_engine(2, hybrid=hybrid)
    one, two = ask(PROMPT[:10], n_predict=6, id_slot=0), ask(PROMPT[10:20], n_predict=6, id_slot=1)
    engine.submit(one)
    engine.submit(two)
    engine.step()
    times = [0]

    def fail(batch: Any) -> BatchError | None:
        times[0] += 1
        if times[0] != 1:
            return None
        row = batch.rows[0]
        runner.kv.put(row.sequence.slot.seq_id, row.pos0, [int(t) for t in row.tokens])
        return BatchError(-3, "Compute error.")

    runner.fail = fail
    run(engine)
    assert last(events, two).text == text_alone(PROMPT[10:20], 6)
    if hybrid:
        assert isinstance(last(events, one), Failed)
        assert runner.kv.held[0] == []
    else:
        assert last(events, one).text == text_alone(PROMPT[:10], 6)


def test_a_failed_slot_serves_the_next_request() -> None:
    engine, runner, events = fake_engine(1)
    runner.fail = broken(n_times=2)
    bad, good = ask(PROMPT[:10], n_predict=3), ask(PROMPT[:10], n_predict=3)
    engine.submit(bad)
    engine.submit(good)
    run(engine)
    assert isinstance(last(events, bad), Failed)
    assert last(events, good).text == text_alone(PROMPT[:10], 3)


def test_logits_that_give_no_token_fail_one_sequence() -> None:
    def model(sequence: Any, so_far: list[int]) -> int:
        return -1 if sequence.slot.id == 1 and sequence.n_decoded == 2 else 65

    engine, _, events = fake_engine(2, next_token=model)
    good, bad = ask("a", n_predict=5, id_slot=0), ask("b", n_predict=5, id_slot=1)
    engine.submit(good)
    engine.submit(bad)
    run(engine)
    assert last(events, good).text == "AAAAA"
    assert "not finite" in last(events, bad).message


# -- plugins decide


def deciding(decision: Any) -> type[Any]:
    @plugin(name="decider", **DECLARE)
    class Decider:
        @hookimpl
        def batch_failed(self, error: Exception) -> Any:
            return decision

    return Decider


def test_fail_ends_the_sequences_of_the_batch(with_plugins: Callable[..., Any]) -> None:
    engine, runner, events = with_plugins(deciding(Fail()))
    request = ask(PROMPT[:10], n_predict=3)
    runner.fail = broken(n_times=1)
    engine.submit(request)
    run(engine)
    assert isinstance(last(events, request), Failed)


def test_retry_in_more_parts(with_plugins: Callable[..., Any]) -> None:
    engine, runner, events = with_plugins(deciding(Retry(4)))
    runner.fail = broken(n_times=1)
    request = ask(PROMPT[:40], n_predict=3)
    engine.submit(request)
    run(engine)
    assert [row[2] for batch in runner.batches[:4] for row in batch] == [10, 10, 10, 10]
    assert last(events, request).text == text_alone(PROMPT[:40], 3)


def test_shrink_gives_up_as_much_as_asked(with_plugins: Callable[..., Any]) -> None:
    engine, runner, events = with_plugins(deciding(Shrink(50)), n_slots=4)
    for slot in (0, 1, 2):
        engine.submit(ask(PROMPT[:30], n_predict=1, id_slot=slot))
        run(engine)
    runner.fail = broken(n_times=1)
    request = ask(PROMPT[40:60], n_predict=1, id_slot=3)
    engine.submit(request)
    run(engine)
    assert isinstance(last(events, request), Finished)
    assert [len(slot.tokens) for slot in engine.slots] == [0, 0, 30, 20]


def test_a_draft_that_finds_no_room_is_dropped(with_plugins: Callable[..., Any]) -> None:
    @plugin(name="drafter", **DECLARE)
    class Drafter:
        @hookimpl
        def draft(self, sequence: Any, limit: int) -> list[int]:
            return [sequence.last_token + 1 + i for i in range(limit)]

    engine, runner, events = with_plugins(Drafter, n_slots=1, n_draft_max=4)
    runner.fail = lambda batch: KVFull(1, "no room") if batch.rows[0].n_logits > 1 else None
    request = ask(PROMPT[:10], n_predict=6)
    engine.submit(request)
    run(engine)
    assert last(events, request).text == text_alone(PROMPT[:10], 6)
    assert engine.stats.n_draft == 0
    assert engine.slots[0].tokens.view().tolist() == runner.kv.held[0]


class Late:
    """Stored state that never comes. Its slot is emptied once the batch of the step is on its way."""

    starts_early, n_tokens = True, 30

    def start(self, slot: Any, n_kept: int) -> None:
        """Nothing is copied."""

    def ready(self) -> bool:
        return False


@pytest.mark.parametrize(("n_free", "n_failed"), [(0, 0), (-60, 1)], ids=["enough", "not enough"])
def test_room_that_was_put_off_is_made_before_a_batch_is_given_up(
    with_plugins: Callable[..., Any], n_free: int, n_failed: int
) -> None:
    """A unified cache is full of what is to be emptied in this very step."""

    @plugin(name="late", **DECLARE)
    class Finder:
        @hookimpl
        def find_prefix(self, request: Any, slot: Any) -> Any:
            return Late() if len(request.prompt) == 31 else None

    engine, runner, events = with_plugins(Finder, n_slots=2)
    engine.submit(ask(PROMPT[:40], n_predict=1, id_slot=1))
    run(engine)
    decoding = ask(PROMPT[:20], n_predict=9, id_slot=0)
    engine.submit(decoding)
    while len(engine.slots[0].tokens) < 22:
        engine.step()
    runner.fail = room = Room(runner, sum(len(held) for held in runner.kv.held.values()) + n_free)
    engine.submit(ask([7] * 31, id_slot=1))  # waits for its state, for as long as the others run
    engine.step()
    assert (room.n_refused, len(runner.kv.held[1])) == (1 + n_failed, 0)
    while engine.slots[0].busy:
        engine.step()
    assert isinstance(last(events, decoding), Failed) == bool(n_failed)
    if not n_failed:
        assert last(events, decoding).text == text_alone(PROMPT[:20], 9)
        assert room.n_refused == 1
