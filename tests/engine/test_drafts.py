"""Drafted tokens: the text never depends on them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from llamamg import hookimpl
from llamamg.guard import Guard
from llamamg.plugins import plugin
from llamamg.request import Finished, FinishReason
from llamamg.testing import EOS, ask, count_up, fake_engine, run

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


def test_a_hybrid_never_drafts(with_plugins: Callable[..., Any]) -> None:
    asked: list[int] = []
    cls, _ = drafting(lambda sequence, limit: asked.append(1) or right(sequence, limit))
    engine, runner, events = with_plugins(cls, n_slots=1, n_draft_max=4, hybrid=True)
    answer(engine, events, n_predict=10)
    assert asked == []
    assert all(n == 1 for batch in runner.batches[-9:] for _, _, n, _ in batch)


def test_a_state_that_can_go_back_two_tokens_drafts_two(with_plugins: Callable[..., Any]) -> None:
    cls, told = drafting(wrong)
    engine, _, events = with_plugins(cls, n_slots=1, n_draft_max=4, hybrid=True, n_rs_seq=2)
    end = answer(engine, events, n_predict=10)
    assert {proposed for proposed, _ in told[:-2]} == {2}
    assert {accepted for _, accepted in told} == {0}
    plain_engine, _, plain_events = fake_engine(1)
    assert end.text == answer(plain_engine, plain_events, n_predict=10).text


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
