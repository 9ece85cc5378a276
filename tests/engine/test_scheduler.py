"""Which rows a step computes, with no plugin on."""

from __future__ import annotations

from typing import Any

import pytest

from llamamg.batch import Batch
from llamamg.plugins.testing import on
from llamamg.plugins.testing import plugin as made_plugin
from llamamg.request import Delta, Finished, Progress, Started
from llamamg.testing import ask, fake_engine, run
from llamamg.testing.runner import FakeRunner

PROMPT = [40 + i % 80 for i in range(1000)]


def test_a_prompt_longer_than_the_batch_fills_it() -> None:
    engine, runner, _ = fake_engine(1, n_batch=64)
    engine.submit(ask(PROMPT[:150], n_predict=2))
    run(engine)
    assert runner.batches == [[(0, 0, 64, 0)], [(0, 64, 64, 0)], [(0, 128, 22, 1)], [(0, 150, 1, 1)]]


def test_decode_rows_come_first_and_the_first_prompt_takes_what_they_leave() -> None:
    engine, runner, _ = fake_engine(3, n_batch=64)
    engine.submit(ask(PROMPT[:10], n_predict=9, id_slot=2))
    engine.step()
    engine.submit(ask(PROMPT[:100], n_predict=1, id_slot=0))
    engine.submit(ask(PROMPT[:30], n_predict=1, id_slot=1))
    for _ in range(4):
        engine.step()
    assert runner.batches[1:5] == [
        [(2, 10, 1, 1), (0, 0, 63, 0)],
        [(2, 11, 1, 1), (0, 63, 37, 1), (1, 0, 26, 0)],
        [(2, 12, 1, 1), (1, 26, 4, 1)],
        [(2, 13, 1, 1)],
    ]


def test_decode_rows_go_by_sequence_id_however_they_arrived() -> None:
    engine, runner, _ = fake_engine(3)
    for slot in (2, 0, 1):
        engine.submit(ask(PROMPT[:5], n_predict=5, id_slot=slot))
    engine.step()
    engine.step()
    assert [[row[0] for row in batch] for batch in runner.batches] == [[0, 1, 2], [0, 1, 2]]


def test_a_prompt_starts_to_decode_in_the_next_step() -> None:
    engine, runner, _ = fake_engine(2, n_batch=8)
    engine.submit(ask(PROMPT[:4], n_predict=4, id_slot=0))
    engine.submit(ask(PROMPT[:8], n_predict=2, id_slot=1))
    run(engine)
    assert runner.batches == [
        [(0, 0, 4, 1), (1, 0, 4, 0)],
        [(0, 4, 1, 1), (1, 4, 4, 1)],
        [(0, 5, 1, 1), (1, 8, 1, 1)],
        [(0, 6, 1, 1)],
    ]


def test_hybrid_prompts_break_a_ubatch_and_four_tokens_before_the_end() -> None:
    engine, runner, _ = fake_engine(1, hybrid=True, n_batch=64, n_ubatch=16)
    engine.submit(ask(PROMPT[:150], n_predict=1))
    run(engine)
    assert [row[1:3] for batch in runner.batches for row in batch] == [(0, 64), (64, 64), (128, 2), (130, 16), (146, 4)]
    assert [c.n_tokens for c in engine.slots[0].checkpoints] == [130, 146]


def test_a_hybrid_break_leaves_room_for_the_next_prompt() -> None:
    engine, runner, _ = fake_engine(2, hybrid=True, n_batch=64, n_ubatch=16)
    engine.submit(ask(PROMPT[:50], n_predict=1, id_slot=0))
    engine.submit(ask(PROMPT[100:140], n_predict=1, id_slot=1))
    run(engine)
    assert runner.batches[0] == [(0, 0, 30, 0), (1, 0, 20, 0)]
    assert runner.batches[1] == [(0, 30, 16, 0), (1, 20, 16, 0)]
    assert runner.batches[2] == [(0, 46, 4, 1), (1, 36, 4, 1)]


def test_a_chat_with_one_more_message_is_not_computed_again_on_a_hybrid() -> None:
    engine, _, events = fake_engine(1, hybrid=True, n_ctx_slot=1024)
    first = ask(PROMPT[:300], n_predict=5, user_starts=(280,))
    engine.submit(first)
    run(engine)
    # The template's end of the first prompt is replaced by the answer and one more message.
    second = ask(PROMPT[:296] + PROMPT[500:540], n_predict=5, user_starts=(280, 310))
    engine.submit(second)
    run(engine)
    started = {id_: event.n_cached for id_, event in events if isinstance(event, Started)}
    assert started[second.id] == 296


def test_event_order_and_progress() -> None:
    engine, _, events = fake_engine(1, n_batch=8)
    request = ask(PROMPT[:20], n_predict=2, stream=True, return_progress=True)
    engine.submit(request)
    run(engine)
    kinds = [type(event).__name__ for _, event in events]
    assert kinds == ["Started", *["Progress"] * 4, "Delta", "Delta", "Finished"]
    progress = [(e.total, e.cache, e.processed) for _, e in events if isinstance(e, Progress)]
    assert progress == [(20, 0, 0), (20, 0, 8), (20, 0, 16), (20, 0, 20)]


def test_only_streaming_requests_get_deltas_and_the_whole_text_is_the_same() -> None:
    engine, _, events = fake_engine(2)
    still, streaming = ask("hello", n_predict=6), ask("hello", n_predict=6, stream=True)
    engine.submit(still)
    engine.submit(streaming)
    run(engine)
    of = {r.id: [event for id_, event in events if id_ == r.id] for r in (still, streaming)}
    assert [type(e).__name__ for e in of[still.id]] == ["Started", "Finished"]
    finished: Any = of[still.id][-1]
    deltas: Any = of[streaming.id][1:-1]
    assert "".join(d.text for d in deltas) + of[streaming.id][-1].tail == finished.text == "pqrstu"
    assert [d.n_decoded for d in deltas] == [1, 2, 3, 4, 5, 6]


def test_an_empty_prompt_ends_at_once_without_a_batch() -> None:
    engine, runner, events = fake_engine(1)
    request = ask([], n_predict=5)
    engine.submit(request)
    run(engine)
    assert [type(event) for _, event in events] == [Started, Finished]
    assert runner.batches == []
    assert not engine.slots[0].busy


@pytest.mark.parametrize("n_predict", [1, 7])
def test_timings_and_totals(n_predict: int) -> None:
    engine, _, events = fake_engine(1)
    engine.submit(ask(PROMPT[:20], n_predict=n_predict))
    engine.submit(ask(PROMPT[:20], n_predict=n_predict))
    run(engine)
    first, second = [event for _, event in events if isinstance(event, Finished)]
    assert (first.timings.cache_n, first.timings.prompt_n, first.timings.predicted_n) == (0, 20, n_predict)
    assert (second.timings.cache_n, second.timings.prompt_n, second.timings.predicted_n) == (19, 1, n_predict)
    stats = engine.stats
    assert (stats.n_prompt_tokens, stats.n_prompt_cached, stats.n_predicted) == (21, 19, 2 * n_predict)
    assert (stats.n_decode, stats.n_busy_sum) == (2 * n_predict, 2 * n_predict)
    assert stats.ttft.count == stats.queue.count == stats.prefill.count == 2
    assert stats.itl.count == 2 * (n_predict - 1)
    shown = second.timings.json()
    assert shown["queue_ms"] == pytest.approx(1e3 * stats.queue.sum, abs=first.timings.queue_ms + 0.01)
    assert 0 <= shown["queue_ms"] <= shown["ttft_ms"] == pytest.approx(shown["queue_ms"] + shown["prompt_ms"], abs=0.01)
    assert len(second.timings.gaps_s) == n_predict - 1
    if n_predict == 1:
        assert "itl_p50_ms" not in shown
    else:
        assert 0 < shown["itl_p50_ms"] <= shown["itl_p99_ms"] <= shown["itl_max_ms"] <= shown["predicted_ms"]
        assert sum(second.timings.gaps_s) * 1e3 == pytest.approx(shown["predicted_ms"], rel=1e-3, abs=1e-3)


def test_views_of_slots_follow_the_request_and_remember_it() -> None:
    engine, _, _ = fake_engine(2)
    request = ask(PROMPT[:100], n_predict=3, id_slot=1, echo_settings={"a": 1})
    engine.submit(request)
    engine.step()
    idle, busy = engine.slot_views()
    assert (idle.is_processing, busy.is_processing, busy.id_task) == (False, True, request.id)
    assert (busy.n_prompt_tokens, busy.n_prompt_processed, busy.n_remain) == (100, 64, 3)
    run(engine)
    view = engine.slot_views()[1]
    assert (view.is_processing, view.n_decoded, view.n_tokens, view.params) == (False, 3, 102, {"a": 1})


@pytest.mark.parametrize("n_groups", [1, 2])
def test_several_contexts_get_their_next_batches_before_anybody_is_told(n_groups: int) -> None:
    """With one context a batch blocks this thread on a CPU: its predecessor's tokens are told first."""
    engine, runner, _ = fake_engine(2, n_groups=n_groups)
    told: list[tuple[str, int]] = []  # the last token that a client got, and the batches submitted by then

    def deliver(pairs: list[tuple[int, Any]]) -> None:
        told.extend((event.text, len(runner.batches)) for _, event in pairs if isinstance(event, Delta))

    engine.deliver = deliver
    engine.submit(ask([40, 41, 42], n_predict=4, stream=True))
    run(engine)
    late = n_groups - 1
    assert told[:3] == [("+", 1 + late), (",", 2 + late), ("-", 3 + late)]
    assert len(runner.batches) == 4


def test_with_several_contexts_the_last_tokens_are_told_when_nothing_follows_them() -> None:
    engine, _, events = fake_engine(2, n_groups=2)
    engine.submit(ask([40, 41, 42], n_predict=1, stream=True))
    while engine.step():
        pass
    assert isinstance(events[-1][1], Finished)
    assert not engine.scheduler.outbox


@pytest.mark.parametrize("n_most", [1, 2])
def test_batches_begin_before_plugins_hear_of_the_last_one(monkeypatch: pytest.MonkeyPatch, n_most: int) -> None:
    """What plugins do then is done while devices compute; with one flight at most the second group's batch is a step later."""
    log: list[str] = []
    monkeypatch.setattr(FakeRunner, "start", lambda self: log.append("start") if log[-1:] == ["submit"] else None)
    real = FakeRunner.submit

    def submit(self: FakeRunner, batch: Batch) -> None:
        log.append("submit")
        real(self, batch)

    monkeypatch.setattr(FakeRunner, "submit", submit)
    hooks = {"batches_in_flight": lambda self: n_most, "batch_submitted": lambda self, batch: log.append("told")}
    engine, _, _ = fake_engine(2, n_groups=2, plugins=on(made_plugin("flights", hooks)))
    for slot in (0, 1):
        engine.submit(ask([40, 41, 42], n_predict=4, id_slot=slot))
    engine.step()
    last = ["submit", "start", "told"]
    assert log == (last if n_most == 1 else ["submit", "told", *last])
