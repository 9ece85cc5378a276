"""Reuse, moves, full caches and failed computations with the real sequence memory of libllama."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llamamg.request import Delta, Failed, Finished, FinishReason, Request, SamplingParams

from .compacting import AlwaysCompact

RNG = np.random.default_rng(0)
TOKENS = RNG.integers(10, 400, 900).astype(np.int32)  # any tokens do for a model of random weights


def greedy(prompt: Any, n_predict: int = 8, **fields: Any) -> Request:
    sampling = SamplingParams(temperature=0.0, n_probs=fields.pop("n_probs", 0))
    return Request(np.asarray(prompt, np.int32), sampling, n_predict=n_predict, return_tokens=True, **fields)


def end_of(live: Any, request: Request) -> Finished:
    (end,) = live.ask(request)
    assert isinstance(end, Finished), end
    return end


# -- a plain cache


def test_a_reused_prefix_gives_the_same_text(live: Callable[..., Any], smol_model: Path) -> None:
    smol = live(smol_model)
    prompt = smol.engine.vocab.tokenize("The quick brown fox jumps over the lazy dog. The quick", True, True).tolist()
    first = end_of(smol, greedy(prompt))
    same = end_of(smol, greedy(prompt))
    longer = end_of(smol, greedy(prompt + list(first.tokens[:4])))
    back = end_of(smol, greedy(prompt[:8]))
    anew = end_of(smol, greedy(prompt[:8], cache_prompt=False))
    assert same.tokens == first.tokens
    assert longer.tokens[:4] == first.tokens[4:]
    assert back.tokens == anew.tokens
    n = len(prompt)
    assert [end.timings.cache_n for end in (first, same, longer, back, anew)] == [0, n - 1, n + 3, 7, 0]
    assert [end.timings.prompt_n for end in (first, same, longer, back, anew)] == [n, 1, 1, 1, 8]


def test_the_context_is_the_limit(live: Callable[..., Any], smol_model: Path) -> None:
    smol = live(smol_model, n_ctx=256, n_parallel=1)
    n_ctx = smol.engine.n_ctx_slot
    prompt = smol.engine.vocab.tokenize("and so on " * 200, True, True)
    end = end_of(smol, greedy(prompt[: n_ctx - 10], -1, cache_prompt=False))
    assert (end.reason, end.truncated, end.n_prompt + end.n_decoded) == (FinishReason.LIMIT, True, n_ctx)
    (refused,) = smol.ask(greedy(prompt[:n_ctx]))
    assert isinstance(refused, Failed)
    assert (refused.code, refused.extra) == (400, {"n_prompt_tokens": n_ctx, "n_ctx": n_ctx})


def test_context_shift_goes_on_past_the_context(live: Callable[..., Any], smol_model: Path) -> None:
    smol = live(smol_model, n_ctx=256, n_parallel=1, shift=True)
    prompt = smol.engine.vocab.tokenize("one two three four five six seven eight " * 40, True, True)[:240]
    end = end_of(smol, greedy(prompt, 40, n_keep=8))
    assert (end.n_decoded, end.truncated) == (40, True)
    held = smol.engine.call(lambda engine: (len(engine.slots[0].tokens), engine.scheduler.kv.pos_max(0))).result(60)
    assert held[0] == held[1] + 1 < 256


def test_a_full_unified_cache_fails_one_and_lets_the_other_end(live: Callable[..., Any], smol_model: Path) -> None:
    smol = live(smol_model, n_ctx=256, n_parallel=2, kv_unified=True, n_batch=64, n_ubatch=64)
    text = smol.engine.vocab.tokenize("the sea was calm and the wind was soft " * 40, True, True)
    one, two = greedy(text[:100], 60), greedy(text[100:200], 60)
    ends = smol.ask(one, two)
    failed = [end for end in ends if isinstance(end, Failed)]
    done = [end for end in ends if isinstance(end, Finished)]
    assert [end.message for end in failed] == ["Context size has been exceeded."]
    assert [end.n_decoded for end in done] == [60]
    assert not any(slot.busy for slot in smol.engine.slots)
    assert end_of(smol, greedy(text[:100], 4)).n_decoded == 4


def test_a_full_unified_cache_gives_up_an_idle_slot(live: Callable[..., Any], smol_model: Path) -> None:
    smol = live(smol_model, n_ctx=256, n_parallel=2, kv_unified=True)
    text = smol.engine.vocab.tokenize("the sea was calm and the wind was soft " * 40, True, True)
    end_of(smol, greedy(text[:150], 4, id_slot=0))
    end = end_of(smol, greedy(text[150:320], 20, id_slot=1))
    assert end.n_decoded == 20
    assert len(smol.engine.slots[0].tokens) == 0


def test_a_computation_that_fails_in_the_middle_is_repeated_and_the_text_is_right(
    live: Callable[..., Any], smol_model: Path
) -> None:
    smol = live(smol_model, n_parallel=2, n_batch=64, n_ubatch=16)
    text = smol.engine.vocab.tokenize(
        "once upon a time there was a small house by the sea, and in it a cat", True, True
    )
    prompts = [text, text[3:]]

    def requests(n_predict: int) -> list[Request]:
        return [greedy(prompt, n_predict, id_slot=i, cache_prompt=False) for i, prompt in enumerate(prompts)]

    expected = smol.tokens(*requests(6))
    countdown = [0]

    def abort(_: Any) -> bool:
        countdown[0] -= 1
        return countdown[0] == 0

    callback = ctypes.CFUNCTYPE(ctypes.c_bool, ctypes.c_void_p)(abort)

    class Failing:
        """libllama, whose aborted computations look like failed ones: an abort itself is never repeated."""

        def __init__(self, llama: Any) -> None:
            self._llama = llama

        def __getattr__(self, name: str) -> Any:
            return getattr(self._llama, name)

        def llama_decode(self, context: Any, batch: Any) -> int:
            code = self._llama.llama_decode(context, batch)
            return -3 if code == 2 else code

    def arm(engine: Any) -> None:
        engine.runner._llama.llama_set_abort_callback(engine.runner.context, callback, None)
        engine.runner._llama = Failing(engine.runner._llama)

    smol.engine.call(arm).result(60)
    countdown[0] = 10**9
    smol.tokens(*requests(1))
    n_prefill = 10**9 - countdown[0]  # how often the prompts' computation asks whether to go on
    for at in (1, n_prefill // 3, n_prefill - 1, n_prefill + 5):
        n_before = smol.engine.stats.n_kv_retries
        countdown[0] = at
        assert smol.tokens(*requests(6)) == expected
        assert smol.engine.stats.n_kv_retries == n_before + 1


# -- moves


def test_seq_compact_moves_real_sequences_without_changing_their_text(
    live: Callable[..., Any], smol_model: Path
) -> None:
    stories = ["One day a cat", "The old king of", "In the winter the", "My favourite food is", "Water is made"]

    def run(plugins: tuple[Any, ...]) -> tuple[list[list[int]], list[list[int]], Any]:
        smol = live(smol_model, n_ctx=5 * 256, n_parallel=5, plugins=plugins)
        shapes: list[list[int]] = []
        submit = smol.engine.runner.submit

        def watched(batch: Any) -> None:
            shapes.append([row.sequence.slot.seq_id for row in batch.rows])
            submit(batch)

        smol.engine.runner.submit = watched
        requests = [
            greedy(smol.engine.vocab.tokenize(story, True, True), 4 if i in (1, 3) else 20, id_slot=i)
            for i, story in enumerate(stories)
        ]
        smol.engine.call(lambda engine: [engine.submit(r) for r in requests]).result(60)
        tokens = [list(smol.last(request).tokens) for request in requests]
        return tokens, shapes, smol

    plain, plain_shapes, _ = run(())
    moved, shapes, smol = run((AlwaysCompact,))
    assert moved == plain
    assert [0, 2, 4] in plain_shapes
    assert smol.engine.stats.n_moves >= 1
    assert all(ids == list(range(ids[0], ids[0] + len(ids))) for ids in shapes)
    # What the slots that ended first held was swapped, not lost.
    vocab = smol.engine.vocab
    again = end_of(smol, greedy([*vocab.tokenize(stories[1], True, True).tolist(), *plain[1][:3], 42], 1, id_slot=1))
    assert smol.engine.stats.n_moves_dropped == 0
    assert again.timings.prompt_n == 1


# -- a hybrid


@pytest.fixture
def micro(live: Callable[..., Any], micro_model: Path) -> Any:
    return live(micro_model, n_ctx=2048, n_parallel=2, kv_unified=False, n_batch=256, n_ubatch=64)


def test_the_same_prompt_twice_on_a_hybrid(micro: Any) -> None:
    first = end_of(micro, greedy(TOKENS[:300], 10))
    second = end_of(micro, greedy(TOKENS[:300], 10))
    anew = end_of(micro, greedy(TOKENS[:300], 10, cache_prompt=False))
    assert first.tokens == second.tokens == anew.tokens
    assert second.timings.cache_n == 296
    assert (first.timings.cache_n, anew.timings.cache_n) == (0, 0)


def test_the_same_short_prompt_twice_on_a_hybrid(micro: Any) -> None:
    for n in (1, 3, 4, 5, 6):
        first = end_of(micro, greedy(TOKENS[100 : 100 + n], 6))
        second = end_of(micro, greedy(TOKENS[100 : 100 + n], 6))
        assert first.tokens == second.tokens


def test_a_chat_with_one_more_message_does_not_compute_the_rest_again(micro: Any) -> None:
    prompt, starts = TOKENS[:400].tolist(), (0, 350)
    first = end_of(micro, greedy(prompt, 10, user_starts=starts))
    # A template ends a prompt with an opening for the answer; the next prompt has the answer there.
    chat = prompt + list(first.tokens) + TOKENS[400:440].tolist()
    second = end_of(micro, greedy(chat, 10, user_starts=(*starts, 412), n_probs=1))
    assert second.timings.cache_n == 400 + 9
    other_opening = prompt[:397] + TOKENS[500:550].tolist()
    third = end_of(micro, greedy(other_opening, 10, n_probs=1))
    assert third.timings.cache_n == 396
    # Other batches round otherwise, and random weights make near ties: the state is right when the logits nearly are.
    for reused, same in ((second, chat), (third, other_opening)):
        anew = end_of(micro, greedy(same, 1, cache_prompt=False, n_probs=1))
        assert anew.timings.cache_n == 0
        assert reused.probs[0].prob == pytest.approx(anew.probs[0].prob, abs=0.1)
        assert reused.tokens[0] == anew.tokens[0]


def test_a_cancelled_prefill_of_a_hybrid_leaves_a_slot_that_works(micro: Any) -> None:
    long, after = greedy(TOKENS[:800], id_slot=0, stream=True), greedy(TOKENS[:500], 6, id_slot=0)
    micro.engine.submit(long)
    micro.wait(lambda: bool(micro.of(long)))
    micro.engine.cancel(long.id)
    with_rest = end_of(micro, after)
    assert not any(isinstance(event, Delta | Finished) for event in micro.of(long))
    anew = end_of(micro, greedy(TOKENS[:500], 6, id_slot=1, cache_prompt=False))
    assert with_rest.tokens == anew.tokens
