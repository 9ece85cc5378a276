"""Sampling on the real demo model: reproducible, steered as asked, and told truthfully."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llamamg.request import Failed, Finished, FinishReason, Request, SamplingParams, TokenProb

GREEDY = 0.0


@pytest.fixture
def smol(live: Callable[..., Any], smol_model: Path) -> Any:
    return live(smol_model, n_ctx=1024, n_parallel=2)


def request(smol: Any, text: str, n_predict: int = 8, **fields: Any) -> Request:
    names = SamplingParams.__dataclass_fields__
    sampling = SamplingParams(**{key: fields.pop(key) for key in list(fields) if key in names})
    tokens = smol.engine.vocab.tokenize(text, True, True)
    return Request(tokens, sampling, n_predict=n_predict, return_tokens=True, **fields)


def reference_logits(smol: Any, tokens: list[int]) -> np.ndarray:
    """The logits behind `tokens`, computed in an empty sequence of the same context, between two steps."""

    def compute(engine: Any) -> np.ndarray:
        llama, context = engine.runner._llama, engine.runner.context
        seq_id = next(slot.seq_id for slot in engine.slots if not slot.busy)
        slot = next(slot for slot in engine.slots if slot.seq_id == seq_id)
        engine.scheduler.clear(slot)
        batch = llama.llama_batch_init(len(tokens), 0, 1)
        for i, token in enumerate(tokens):
            batch.token[i], batch.pos[i], batch.n_seq_id[i], batch.seq_id[i][0] = token, i, 1, seq_id
            batch.logits[i] = i == len(tokens) - 1
        batch.n_tokens = len(tokens)
        assert llama.llama_decode(context, batch) == 0
        llama.llama_batch_free(batch)
        pointer = llama.llama_get_logits_ith(context, len(tokens) - 1)
        logits = np.ctypeslib.as_array(ctypes.cast(pointer, ctypes.POINTER(ctypes.c_float)), (engine.vocab.n_vocab,))
        copy = logits.astype(np.float64)
        engine.scheduler.clear(slot)
        return copy

    return smol.engine.call(compute).result(60)


def test_greedy_answers_as_the_logits_say(smol: Any) -> None:
    (end,) = smol.ask(request(smol, "The capital of France is", temperature=GREEDY))
    assert isinstance(end, Finished)
    assert "Paris" in end.text
    assert end.text == smol.engine.vocab.detokenize(end.tokens)
    prompt = smol.engine.vocab.tokenize("The capital of France is", True, True).tolist()
    assert end.tokens[0] == int(reference_logits(smol, prompt).argmax())
    assert end.tokens[2] == int(reference_logits(smol, prompt + list(end.tokens[:2])).argmax())


def test_a_seed_makes_sampling_reproducible_and_another_seed_does_not(smol: Any) -> None:
    def tokens(seed: int) -> list[int]:
        (out,) = smol.tokens(request(smol, "Once upon a time", 16, seed=seed, temperature=1.0, cache_prompt=False))
        return out

    assert tokens(7) == tokens(7)
    assert len({tuple(tokens(seed)) for seed in (7, 8, 9)}) > 1


def test_a_neighbour_with_other_sampling_does_not_mix_in(smol: Any) -> None:
    alone = smol.tokens(request(smol, "One, two,", 6, seed=3, top_k=1))
    both = smol.tokens(request(smol, "One, two,", 6, seed=3, top_k=1), request(smol, "Red, green,", 6, seed=4))
    assert both[0] == alone[0]


def test_repetition_penalty_looks_at_the_prompt_and_at_what_was_said(smol: Any) -> None:
    text = "na na na na na na na na"
    (plain,) = smol.tokens(request(smol, text, 8, temperature=GREEDY))
    (penalized,) = smol.tokens(request(smol, text, 8, temperature=GREEDY, repeat_penalty=5.0, repeat_last_n=64))
    prompt = smol.engine.vocab.tokenize(text, True, True).tolist()
    assert plain[0] in prompt
    assert penalized[0] not in prompt
    assert len(set(penalized)) == len(penalized)


def test_a_grammar_is_obeyed(smol: Any) -> None:
    grammar = 'root ::= "yes" | "no"'
    for sampling in ({"temperature": GREEDY}, {"temperature": 1.5, "seed": 1}):
        (end,) = smol.ask(request(smol, "Is the sky blue? Answer:", 10, grammar=grammar, **sampling))
        assert isinstance(end, Finished)
        assert (end.text in ("yes", "no"), end.reason) == (True, FinishReason.EOS)


def test_a_grammar_that_does_not_parse_is_refused(smol: Any) -> None:
    (end,) = smol.ask(request(smol, "a", grammar="root ::= ("))
    assert isinstance(end, Failed)
    assert end.code == 400


def test_logit_bias_forbids_and_forces(smol: Any) -> None:
    text = "The capital of France is"
    (plain,) = smol.tokens(request(smol, text, 1, temperature=GREEDY))
    (other,) = smol.tokens(request(smol, text, 1, temperature=GREEDY, logit_bias=((plain[0], float("-inf")),)))
    assert other[0] != plain[0]
    (forced,) = smol.tokens(request(smol, text, 3, temperature=GREEDY, logit_bias=((1000, 1e4),)))
    assert forced == [1000, 1000, 1000]


@pytest.mark.parametrize("n_banned", [1, 3])
def test_forbidden_tokens_leave_greedy_the_best_of_the_rest(smol: Any, n_banned: int) -> None:
    text = "The capital of France is"
    logits = reference_logits(smol, smol.engine.vocab.tokenize(text, True, True).tolist())
    best = np.argsort(-logits)[: n_banned + 1].tolist()
    bias = tuple((token, float("-inf")) for token in best[:n_banned])
    fields = {"temperature": GREEDY, "n_predict": 4, "cache_prompt": False}
    (end,) = smol.ask(request(smol, text, logit_bias=bias, **fields))
    assert end.tokens[0] == best[n_banned]
    assert not set(best[:n_banned]) & set(end.tokens)
    elsewhere = next(token for token in range(100, 200) if token not in best)
    (free,) = smol.ask(request(smol, text, **fields))
    (unaffected,) = smol.ask(request(smol, text, logit_bias=((elsewhere, float("-inf")),), **fields))
    assert free.tokens[0] == best[0]
    assert unaffected.tokens == free.tokens


def test_ignore_eos_never_ends(smol: Any) -> None:
    text = "<|im_start|>user\nSay ok.<|im_end|>\n<|im_start|>assistant\nok"
    bias = tuple((token, 50.0) for token in smol.engine.vocab.eog_tokens())
    (ending,) = smol.ask(request(smol, text, 6, temperature=GREEDY, logit_bias=bias))
    (going,) = smol.ask(request(smol, text, 6, temperature=GREEDY, ignore_eos=True))
    assert (ending.reason, ending.n_decoded) == (FinishReason.EOS, 1)
    assert (going.reason, going.n_decoded) == (FinishReason.LIMIT, 6)


def test_logprobs_are_those_of_the_logits(smol: Any) -> None:
    text = "The capital of France is"
    (end,) = smol.ask(request(smol, text, 3, temperature=GREEDY, n_probs=5))
    assert isinstance(end, Finished)
    prompt = smol.engine.vocab.tokenize(text, True, True).tolist()
    assert len(end.probs) == 3
    for i in (0, 2):
        # The reference computes the prompt in one batch, the engine token by token: close, not the same bits.
        logits = reference_logits(smol, prompt + list(end.tokens[:i]))
        logprobs = logits - logits.max() - np.log(np.exp(logits - logits.max()).sum())
        prob: TokenProb = end.probs[i]
        assert prob.id == end.tokens[i]
        assert prob.prob == pytest.approx(logprobs[prob.id], abs=0.02)
        assert [token for token, _ in prob.top][:2] == np.argsort(-logprobs)[:2].tolist()
        assert [value for _, value in prob.top] == pytest.approx([logprobs[token] for token, _ in prob.top], abs=0.02)
        assert [value for _, value in prob.top] == sorted((value for _, value in prob.top), reverse=True)


def test_probabilities_after_sampling_add_up(smol: Any) -> None:
    fields = {"n_probs": 4, "post_sampling_probs": True, "top_k": 3, "temperature": 1.0, "seed": 2, "min_p": 0.0}
    (end,) = smol.ask(request(smol, "I like", 4, top_p=1.0, **fields))
    assert isinstance(end, Finished)
    for prob in end.probs:
        assert len(prob.top) == 3
        assert sum(p for _, p in prob.top) == pytest.approx(1.0, abs=1e-3)
        assert prob.prob == pytest.approx(dict(prob.top)[prob.id])


def test_text_of_several_byte_tokens_streams_whole(smol: Any) -> None:
    emoji = smol.engine.vocab.tokenize("🙂", False, False).tolist()
    assert len(emoji) > 1
    grammar = 'root ::= "🙂🙂 ok"'
    asked = request(smol, "Smile:", 24, temperature=GREEDY, grammar=grammar, stream=True)
    (end,) = smol.ask(asked)
    parts = [event.text for event in smol.of(asked)[1:-1]]
    assert end.text == "".join(parts) + end.tail == "🙂🙂 ok"
    assert not any("\ufffd" in part for part in parts)
