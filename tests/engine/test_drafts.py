"""Drafted tokens: the text never depends on them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from llamamg import hookimpl
from llamamg.errors import BatchError
from llamamg.guard import Guard
from llamamg.plugins import plugin
from llamamg.request import Finished, FinishReason
from llamamg.testing import EOS, ask, count_up, fake_engine, run

from .compacting import AlwaysCompact

DECLARE: dict[str, Any] = {"summary": "", "helps": "", "hurts": "", "guard": Guard.same_tokens()}
Drafter = Callable[[Any, int], list[int]]


def drafting(propose: Drafter, limit: int | None = None) -> tuple[type[Any], list[Any]]:
    told: list[Any] = []

    @plugin(name="drafter", **DECLARE)
    class Draft:
        @hookimpl
        def draft(self, sequence: Any, limit: int) -> list[int]:
            return propose(sequence, limit)

        @hookimpl
        def spec_limit(self, state: Any) -> int | None:
            return limit

        @hookimpl
        def draft_verified(self, sequence: Any, proposed: int, accepted: int) -> None:
            told.append((proposed, accepted))

    return Draft, told


def right(sequence: Any, limit: int) -> list[int]:
    tokens = [sequence.last_token]
    for _ in range(limit):
        tokens.append(count_up(sequence, tokens))
    return tokens[1:]


def wrong(sequence: Any, limit: int) -> list[int]:
    return [7] * limit


def half_right(sequence: Any, limit: int) -> list[int]:
    return right(sequence, limit)[: limit // 2] + [7] * (limit - limit // 2)


def drafted(runner: Any) -> list[Any]:
    """The batches from the first draft on."""
    first = next(i for i, batch in enumerate(runner.batches) if batch[0][3] > 1)
    return list(runner.batches[first:])


def answer(engine: Any, events: list[Any], **fields: Any) -> Finished:
    request = ask("prompt", **fields)
    engine.submit(request)
    run(engine)
    end = events[-1][1]
    assert isinstance(end, Finished)
    return end


@pytest.mark.parametrize("propose", [right, wrong, half_right, lambda s, n: [], lambda s, n: right(s, n + 9)])
@pytest.mark.parametrize("stream", [False, True])
def test_text_is_that_without_drafts(with_plugins: Callable[..., Any], propose: Drafter, stream: bool) -> None:
    plain_engine, _, plain_events = fake_engine(1)
    plain = answer(plain_engine, plain_events, n_predict=30, return_tokens=True)
    cls, _ = drafting(propose)
    engine, runner, events = with_plugins(cls, n_slots=1, n_draft_max=4)
    end = answer(engine, events, n_predict=30, stream=stream, return_tokens=True)
    assert (end.text, end.tokens, end.n_decoded, end.reason) == (plain.text, plain.tokens, 30, FinishReason.LIMIT)
    n = len(engine.slots[0].tokens)
    assert engine.slots[0].tokens.view().tolist() == runner.kv.held[0][:n]
    assert n == end.n_prompt + 29


def test_accepted_tokens_come_in_one_step(with_plugins: Callable[..., Any]) -> None:
    cls, told = drafting(right)
    engine, runner, events = with_plugins(cls, n_slots=1, n_draft_max=3)
    end = answer(engine, events, n_predict=9)
    assert runner.batches == [[(0, 0, 6, 1)], [(0, 6, 4, 4)], [(0, 10, 4, 4)]]
    assert told == [(3, 3), (3, 3)]
    assert (end.timings.draft_n, end.timings.draft_n_accepted) == (6, 6)
    stats = engine.stats
    assert (stats.n_drafts, stats.n_draft, stats.n_draft_accepted, stats.accepted_per_pos) == (2, 6, 6, [2, 2, 2])


def test_rejected_tokens_leave_the_cache(with_plugins: Callable[..., Any]) -> None:
    cls, told = drafting(half_right)
    engine, runner, events = with_plugins(cls, n_slots=1, n_draft_max=4)
    answer(engine, events, n_predict=7)
    assert runner.batches == [[(0, 0, 6, 1)], [(0, 6, 5, 5)], [(0, 9, 3, 3)], [(0, 11, 1, 1)]]
    assert told == [(4, 2), (2, 1)]
    assert engine.stats.accepted_per_pos == [2, 1]


def test_an_end_inside_a_draft_cuts_what_follows(with_plugins: Callable[..., Any]) -> None:
    text = [*b"abc", EOS, *b"never"]

    def model(sequence: Any, so_far: list[int]) -> int:
        return text[len(so_far) - 6]

    cls, _ = drafting(lambda sequence, limit: text[sequence.n_decoded :][:limit])
    engine, runner, events = with_plugins(cls, n_slots=1, n_draft_max=6, next_token=model)
    end = answer(engine, events, n_predict=50, return_tokens=True)
    assert (end.reason, end.text, end.n_decoded) == (FinishReason.EOS, "abc", 4)
    assert end.tokens == (*b"abc", EOS)
    assert engine.slots[0].tokens.view().tolist() == [*b"prompt", *b"abc"]
    again = ask([*b"promptabc", 77], n_predict=1)
    engine.submit(again)
    run(engine)
    assert runner.batches[-1] == [(0, 9, 1, 1)]


def test_a_stop_string_inside_a_draft(with_plugins: Callable[..., Any]) -> None:
    cls, _ = drafting(right)
    engine, _, events = with_plugins(cls, n_slots=1, n_draft_max=6)
    end = answer(engine, events, stop=("xy",))
    assert (end.text, end.stopping_word, end.n_decoded) == ("uvw", "xy", 5)
    assert engine.stats.n_predicted == 5  # not those that were right too and came behind it


def test_drafts_stay_inside_the_context_and_the_limit(with_plugins: Callable[..., Any]) -> None:
    cls, _ = drafting(right)
    engine, runner, events = with_plugins(cls, n_slots=1, n_draft_max=8, n_ctx_slot=32)
    end = answer(engine, events)
    assert (end.truncated, end.n_prompt + end.n_decoded) == (True, 32)
    assert max(pos0 + n for batch in runner.batches for _, pos0, n, _ in batch) <= 32
    end = answer(engine, events, n_predict=2)
    assert end.n_decoded == 2


@pytest.mark.parametrize(("limit", "longest"), [(0, 1), (2, 3), (None, 5), (99, 5), (-4, 1)])
def test_spec_limit(with_plugins: Callable[..., Any], limit: int | None, longest: int) -> None:
    cls, _ = drafting(right, limit)
    engine, runner, events = with_plugins(cls, n_slots=1, n_draft_max=4)
    answer(engine, events, n_predict=20)
    assert max(n for batch in runner.batches[1:] for _, _, n, _ in batch) == longest


def test_a_hybrid_without_snapshots_never_drafts(with_plugins: Callable[..., Any]) -> None:
    cls, told = drafting(right)
    engine, runner, events = with_plugins(cls, n_slots=1, n_draft_max=4, hybrid=True, snapshots=False)
    answer(engine, events, n_predict=10)
    assert told == []
    assert all(n == 1 for batch in runner.batches[-9:] for _, _, n, _ in batch)


def test_a_state_that_can_go_back_two_tokens_drafts_two(with_plugins: Callable[..., Any]) -> None:
    cls, told = drafting(wrong)
    engine, _, events = with_plugins(cls, n_slots=1, n_draft_max=4, hybrid=True, n_rs_seq=2, snapshots=False)
    end = answer(engine, events, n_predict=10)
    assert {proposed for proposed, _ in told[:-2]} == {2}
    assert {accepted for _, accepted in told} == {0}
    plain_engine, _, plain_events = fake_engine(1)
    assert end.text == answer(plain_engine, plain_events, n_predict=10).text


@pytest.mark.parametrize("propose", [right, wrong, half_right])
@pytest.mark.parametrize("n_rs_seq", [0, 1, 3])
def test_a_hybrid_goes_back_by_snapshots(with_plugins: Callable[..., Any], propose: Drafter, n_rs_seq: int) -> None:
    cls, told = drafting(propose)
    engine, runner, events = with_plugins(cls, n_slots=1, n_draft_max=4, hybrid=True, n_rs_seq=n_rs_seq)
    end = answer(engine, events, n_predict=31, return_tokens=True)
    plain_engine, _, plain_events = fake_engine(1)
    assert end.tokens == answer(plain_engine, plain_events, n_predict=31, return_tokens=True).tokens
    assert max(proposed for proposed, _ in told) == 4
    held = engine.slots[0].tokens.view().tolist()
    assert held == runner.kv.held[0][: len(held)]


def test_accepted_tokens_are_computed_again_at_the_head_of_the_next_row(with_plugins: Callable[..., Any]) -> None:
    cls, _ = drafting(half_right)
    engine, runner, events = with_plugins(cls, n_slots=1, n_draft_max=4, hybrid=True)
    answer(engine, events, n_predict=10)
    # 1 sampled + 4 drafted of which 2 are right; these 3 again with the one sampled then, and no draft; and so on.
    assert drafted(runner)[:4] == [[(0, 6, 5, 5)], [(0, 6, 4, 1)], [(0, 10, 5, 5)], [(0, 10, 4, 1)]]


def test_a_row_that_computes_again_drafts_what_can_go_back_without_a_snapshot(with_plugins: Callable[..., Any]) -> None:
    cls, _ = drafting(half_right)
    engine, runner, events = with_plugins(cls, n_slots=1, n_draft_max=8, hybrid=True, n_rs_seq=2)
    answer(engine, events, n_predict=14)
    assert drafted(runner)[:2] == [[(0, 6, 9, 9)], [(0, 6, 8, 3)]]


def test_an_end_before_the_replay_leaves_what_the_memory_holds(with_plugins: Callable[..., Any]) -> None:
    cls, _ = drafting(half_right)
    engine, runner, events = with_plugins(cls, n_slots=1, n_draft_max=10, hybrid=True)
    end = answer(engine, events, stop=("xy",))
    assert (end.text, end.stopping_word) == ("uvw", "xy")
    assert engine.slots[0].tokens.view().tolist() == runner.kv.held[0]
    again = answer(engine, events, n_predict=20)
    assert again.n_decoded == 20


@pytest.mark.parametrize("n_rs_seq", [0, 2])
def test_a_failed_batch_with_a_draft_is_tried_again_from_the_snapshot(
    with_plugins: Callable[..., Any], n_rs_seq: int
) -> None:
    cls, _ = drafting(half_right)
    engine, runner, events = with_plugins(cls, n_slots=1, n_draft_max=4, hybrid=True, n_rs_seq=n_rs_seq)
    failed: list[int] = []

    def fail(batch: Any) -> BatchError | None:
        row = batch.rows[0]
        if row.n_logits > 1 and len(failed) < 2:
            failed.append(len(row))
            runner.kv.put(0, row.pos0, [7, 7])  # a part of it was computed
            return BatchError(-3, "a compute error")
        return None

    runner.fail = fail
    end = answer(engine, events, n_predict=20)
    plain_engine, _, plain_events = fake_engine(1)
    assert end.text == answer(plain_engine, plain_events, n_predict=20).text
    assert failed


def test_neighbours_with_and_without_drafts(with_plugins: Callable[..., Any]) -> None:
    cls, _ = drafting(lambda sequence, limit: half_right(sequence, limit) if sequence.slot.id == 0 else [])
    engine, _, events = with_plugins(cls, n_slots=2, n_draft_max=4)
    one, two = ask("prompt", n_predict=20, id_slot=0), ask("other", n_predict=20, id_slot=1)
    engine.submit(one)
    engine.submit(two)
    run(engine)
    plain_engine, _, plain_events = fake_engine(1)
    texts = {id_: event.text for id_, event in events if isinstance(event, Finished)}
    assert texts[one.id] == answer(plain_engine, plain_events, n_predict=20).text
    assert len(texts[two.id]) == 20


def test_what_goes_back_at_its_next_decode_is_not_moved_before_it(with_plugins: Callable[..., Any]) -> None:
    """A sequence ends with a rejection, and the prompt that continues it in its slot has to wait."""
    cls, _ = drafting(lambda sequence, limit: half_right(sequence, limit) if sequence.slot.id == 2 else [])

    @plugin(name="holder", **DECLARE)
    class Holder:
        n_steps = 5

        @hookimpl
        def order_prefills(self, state: Any, waiting: list[Any]) -> list[Any]:
            if not state.decoding or type(self).n_steps == 0:
                return waiting
            type(self).n_steps -= 1
            return []

    engine, runner, events = with_plugins(
        cls, Holder, AlwaysCompact, n_slots=3, n_draft_max=4, hybrid=True, n_rs_seq=3, n_batch=12
    )
    Holder.n_steps = 0
    engine.submit(ask("prompt", id_slot=2, stop=("x",)))
    run(engine)
    assert engine.slots[2].goes_back
    engine.submit(ask("neighbour", n_predict=60, id_slot=0))
    for _ in range(3):
        engine.step()
    Holder.n_steps = 5
    prompt = "promptuvw" + 5 * "and so on "
    again = ask(prompt, n_predict=20, id_slot=2)
    engine.submit(again)
    run(engine)
    assert (2, 1) in runner.kv.copies
    assert any(seq_id == 1 and n_logits == 0 for batch in runner.batches for seq_id, *_, n_logits in batch)  # soon
    texts = {id_: event.text for id_, event in events if isinstance(event, Finished)}
    plain_engine, _, plain_events = fake_engine(1)
    plain_engine.submit(ask(prompt, n_predict=20))
    run(plain_engine)
    assert texts[again.id] == plain_events[-1][1].text
