"""When a sequence ends, and what is told about it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from llamamg.config import Config, GenerationConfig, ModelConfig, PluginsConfig
from llamamg.request import Failed, Finished, FinishReason
from llamamg.testing import EOS, ask, fake_engine, run


def script(text: bytes) -> Callable[..., int]:
    """A stand-in model that says `text` after any prompt, then ends."""

    def next_token(sequence: Any, so_far: list[int]) -> int:
        n = sequence.n_decoded
        return text[n] if n < len(text) else EOS

    return next_token


def finish(text: bytes, *, n_ctx_slot: int = 512, config: Config | None = None, **fields: Any) -> Finished:
    engine, runner, events = fake_engine(1, next_token=script(text), n_ctx_slot=n_ctx_slot, config=config)
    engine.submit(ask("prompt", **fields))
    run(engine)
    last = events[-1][1]
    assert isinstance(last, Finished)
    assert engine.slots[0].tokens.view().tolist() == runner.kv.held[0][: len(engine.slots[0].tokens)]
    return last


def test_end_of_generation() -> None:
    end = finish(b"hello")
    assert (end.reason, end.text, end.n_decoded, end.truncated) == (FinishReason.EOS, "hello", 6, False)


@pytest.mark.parametrize(("n_predict", "n_decoded"), [(0, 1), (1, 1), (3, 3)])
def test_limit(n_predict: int, n_decoded: int) -> None:
    end = finish(b"hello", n_predict=n_predict)
    assert (end.reason, end.n_decoded, end.text) == (FinishReason.LIMIT, n_decoded, "hello"[:n_decoded])


def test_the_end_counts_before_the_limit() -> None:
    assert finish(b"hello", n_predict=6).reason is FinishReason.EOS


def test_stop_string_ends_before_itself() -> None:
    end = finish(b"The quick brown fox jumps", stop=("own fox",))
    assert (end.reason, end.text, end.stopping_word, end.tail) == (FinishReason.WORD, "The quick br", "own fox", "")


def test_text_held_back_is_in_the_tail_at_the_limit_and_at_the_end() -> None:
    for fields in ({"n_predict": 8}, {}):
        end = finish(b"The brow", stop=("own fox",), **fields)
        assert (end.text, end.tail) == ("The brow", "ow")


def test_without_limit_the_context_is_the_limit() -> None:
    end = finish(b"x" * 100, n_ctx_slot=32)
    assert (end.reason, end.truncated) == (FinishReason.LIMIT, True)
    assert end.n_prompt + end.n_decoded == 32
    assert end.n_cached_slot == 31


def test_prompt_as_long_as_the_context_is_refused_with_the_numbers() -> None:
    engine, runner, events = fake_engine(1, n_ctx_slot=16)
    fits, too_long = ask("x" * 15), ask("x" * 16)
    engine.submit(too_long)
    engine.submit(fits)
    run(engine)
    refused = events[0][1]
    assert isinstance(refused, Failed)
    assert (events[0][0], refused.code, refused.type) == (too_long.id, 400, "exceed_context_size_error")
    assert refused.extra == {"n_prompt_tokens": 16, "n_ctx": 16}
    assert isinstance(events[-1][1], Finished)
    assert len(runner.batches) == 1


@pytest.mark.parametrize("token", [-1, 256])
def test_tokens_outside_the_vocabulary_are_refused(token: int) -> None:
    engine, runner, events = fake_engine(1)
    engine.submit(ask([65, token, 66]))
    run(engine)
    assert isinstance(events[0][1], Failed)
    assert events[0][1].code == 400
    assert runner.batches == []


def test_time_limit_waits_for_a_new_line(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter(range(10_000))
    monkeypatch.setattr(
        "llamamg.scheduler.time.perf_counter", lambda: float(next(clock))
    )  # each look is a second later
    assert finish(b"one line only, " * 3, t_max_predict_ms=2000).reason is FinishReason.EOS
    end = finish(b"one line\nand another", t_max_predict_ms=2000)
    assert (end.reason, end.text) == (FinishReason.LIMIT, "one line\n")
    end = finish(b"1\n2 goes on and on\n3", t_max_predict_ms=9000)
    assert (end.reason, end.text) == (FinishReason.LIMIT, "1\n2 goes on and on\n")


@pytest.mark.parametrize(
    ("text", "shown"),
    [(b"if x:\n    a\nb = 1\n", "if x:\n    a\nb"), (b"a\n    b\n    c", None), (b"a\n    b\n\n    c", "a\n    b\n\n")],
)
def test_indentation_limit(text: bytes, shown: str | None) -> None:
    end = finish(text, n_indent=4)
    if shown is None:
        assert (end.reason, end.text) == (FinishReason.EOS, text.decode())
    else:
        assert (end.reason, end.text) == (FinishReason.LIMIT, shown)


def test_generated_tokens_only_when_asked_for() -> None:
    assert finish(b"abc", return_tokens=True).tokens == (97, 98, 99, EOS)
    assert finish(b"abc").tokens == ()


# -- context shift

SHIFT = Config(
    ModelConfig(Path("fake.gguf")),
    generation=GenerationConfig(context_shift=True),
    plugins=PluginsConfig(none=True),
)


def test_shift_forgets_half_behind_the_kept_beginning() -> None:
    engine, runner, events = fake_engine(1, n_ctx_slot=32, config=SHIFT)
    prompt = list(range(40, 60))
    engine.submit(ask(prompt, n_predict=13, n_keep=4))
    run(engine)
    # With the 12th token the context was full: 31 held, 4 kept, of the 27 others the older 13 forgotten.
    held = runner.kv.held[0]
    assert len(held) == 19
    assert held[:7] == prompt[:4] + prompt[17:20]
    assert engine.slots[0].tokens.view().tolist() == held
    end = events[-1][1]
    assert isinstance(end, Finished)
    assert (end.n_decoded, end.truncated, end.reason) == (13, True, FinishReason.LIMIT)


@pytest.mark.parametrize(("n_keep", "n_discard", "first_left"), [(-1, 0, None), (0, 5, 5), (2, 7, 9)])
def test_shift_keeps_and_discards_as_asked(n_keep: int, n_discard: int, first_left: int | None) -> None:
    engine, runner, _ = fake_engine(1, n_ctx_slot=32, config=SHIFT)
    prompt = list(range(40, 60))
    engine.submit(ask(prompt, n_predict=14, n_keep=n_keep, n_discard=n_discard))
    run(engine)
    held = runner.kv.held[0]
    if first_left is None:
        assert held[:20] == prompt
    else:
        assert held[:n_keep] == prompt[:n_keep]
        assert held[n_keep] == prompt[first_left]


def test_a_sequence_that_ends_as_the_context_fills_is_not_shifted() -> None:
    engine, runner, events = fake_engine(1, n_ctx_slot=32, config=SHIFT)
    engine.submit(ask(list(range(40, 60)), n_predict=12))
    run(engine)
    end = events[-1][1]
    assert isinstance(end, Finished)
    assert (end.truncated, end.n_decoded, len(runner.kv.held[0])) == (False, 12, 31)


def test_generation_without_end_goes_on_shifting() -> None:
    engine, runner, events = fake_engine(1, n_ctx_slot=32, config=SHIFT)
    engine.submit(ask("abc", n_predict=500))
    run(engine)
    end = events[-1][1]
    assert isinstance(end, Finished)
    assert (end.n_decoded, end.truncated) == (500, True)
    assert max(len(batch) for batch in runner.batches) == 1
    assert all(row[1] < 32 for batch in runner.batches for row in batch)


def test_a_hybrid_cannot_shift() -> None:
    engine, _, events = fake_engine(1, n_ctx_slot=32, config=replace(SHIFT), hybrid=True)
    engine.submit(ask("abc", n_predict=500))
    run(engine)
    end = events[-1][1]
    assert isinstance(end, Finished)
    assert (end.n_prompt + end.n_decoded, end.truncated) == (32, True)
