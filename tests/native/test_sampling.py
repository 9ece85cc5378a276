"""The sampling primitives against numpy and against llama.cpp's own sampler loop."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import pytest

from llamamg.abi import ffi

YES_NO = b'root ::= "yes" | "no"'


def log_softmax(logits: np.ndarray) -> np.ndarray:
    x = logits.astype(np.float64)
    return x - x.max() - np.log(np.exp(x - x.max()).sum())


def logprobs(rows: Any, idx: int, token: int, n_top: int) -> Any:
    ids, values, chosen = (
        ffi.new("int32_t[]", max(n_top, 1)),
        ffi.new("float[]", max(n_top, 1)),
        ffi.new("float *", 7.0),
    )
    n = rows.mg.mg_logprobs(rows.handle, idx, token, n_top, ids, values, chosen)
    return n, list(ids)[: max(n, 0)], list(values)[: max(n, 0)], chosen[0]


def test_greedy_is_argmax_in_every_row(rows: Any) -> None:
    idx = list(range(1, rows.n_rows))
    n_failed, tokens = rows.sample(idx)
    assert n_failed == 0
    assert tokens == [int(rows.logits(i).argmax()) for i in idx]


@pytest.mark.parametrize("best", [0, 5, 31, 32, -1])
def test_greedy_finds_the_best_at_the_edges(rows: Any, best: int) -> None:
    row = rows.logits(1)
    row[best] = row.max() + 1
    assert rows.sample([1]) == (0, [best % rows.n_vocab])


def test_lowest_id_wins_a_tie(rows: Any) -> None:
    row = rows.logits(2)
    row[[40001, 123, 7777]] = row.max() + 1
    assert rows.sample([2]) == (0, [123])


def test_nan_never_wins_and_a_row_of_nan_fails(rows: Any) -> None:
    row = rows.logits(1)
    best = int(row.argmax())
    row[best - 1] = np.nan
    assert rows.sample([1]) == (0, [best])
    row[:] = np.nan
    assert rows.sample([1, 2])[0] == 1
    assert "NaN" in str(rows.library.mg.error())


def test_a_row_without_logits_fails_alone(rows: Any) -> None:
    n_failed, tokens = rows.sample([0, 1])
    assert n_failed == 1
    assert tokens == [-1, int(rows.logits(1).argmax())]
    assert "row 0 has no logits" in str(rows.library.mg.error())


def test_a_chain_draws_what_llama_cpp_draws(rows: Any) -> None:
    llama = rows.library.llama

    def make() -> Any:
        return rows.chain(
            llama.llama_sampler_init_penalties(rows.n_vocab, 16, 1.1, 0.1, 0.1),
            llama.llama_sampler_init_top_k(50),
            llama.llama_sampler_init_temp(1.5),
            llama.llama_sampler_init_dist(42),
        )

    ours, theirs = make(), make()
    idx = list(range(1, rows.n_rows)) * 5
    tokens = [rows.sample([i], [ours])[1][0] for i in idx]
    assert tokens == [llama.llama_sampler_sample(theirs, rows.ctx, i) for i in idx]
    assert len(set(tokens)) > 5, "the draws never varied: the temperature did nothing"


def test_rows_use_their_own_chains(rows: Any) -> None:
    llama = rows.library.llama
    banned = int(rows.logits(1).argmax())
    bias = (llama.llama_logit_bias * 1)(llama.llama_logit_bias(token=banned, bias=-1e9))
    chain = rows.chain(llama.llama_sampler_init_logit_bias(rows.n_vocab, 1, bias), llama.llama_sampler_init_greedy())
    n_failed, tokens = rows.sample([1, 1], [None, chain])
    assert n_failed == 0
    assert tokens == [banned, int(np.argsort(rows.logits(1))[-2])]


def test_a_chain_that_selects_nothing_is_an_error(rows: Any) -> None:
    chain = rows.chain(rows.library.llama.llama_sampler_init_top_k(5))
    assert rows.sample([1], [chain]) == (1, [-1])
    assert "selected no token" in str(rows.library.mg.error())


def piece(rows: Any, token: int) -> bytes:
    buffer = ctypes.create_string_buffer(64)
    n = rows.library.llama.llama_token_to_piece(rows.vocab, token, buffer, 64, 0, True)
    return buffer.raw[:n]


@pytest.mark.parametrize("greedy", [True, False])
def test_a_grammar_forces_its_language(rows: Any, greedy: bool) -> None:
    llama = rows.library.llama
    chain = None if greedy else rows.chain(llama.llama_sampler_init_temp(1.0), llama.llama_sampler_init_dist(1))
    grammar = rows.grammar(YES_NO)
    text = b""
    for _ in range(8):
        n_failed, tokens = rows.sample([3], [chain], [grammar])
        assert n_failed == 0
        if llama.llama_vocab_is_eog(rows.vocab, tokens[0]):
            break
        text += piece(rows, tokens[0])
    assert text in (b"yes", b"no")


def test_greedy_with_a_grammar_takes_the_best_allowed(rows: Any) -> None:
    allowed = [t for t in range(rows.n_vocab) if piece(rows, t) in (b"y", b"ye", b"yes", b"n", b"no")]
    assert allowed
    expected = max(allowed, key=lambda t: rows.logits(4)[t])
    assert rows.sample([4], None, [rows.grammar(YES_NO)]) == (0, [expected])


def test_a_grammar_is_tested_after_the_free_draw(rows: Any) -> None:
    """When the free draw is allowed, the chain draws once: its next draw equals that of a chain without a grammar."""
    llama = rows.library.llama
    anything = rows.grammar(b"root ::= [^\\x00]*")
    with_grammar, without = (
        rows.chain(llama.llama_sampler_init_top_k(40), llama.llama_sampler_init_dist(9)) for _ in range(2)
    )
    drawn = [rows.sample([i], [with_grammar], [anything])[1][0] for i in range(1, rows.n_rows)]
    assert drawn == [rows.sample([i], [without])[1][0] for i in range(1, rows.n_rows)]


def test_a_grammar_that_permits_nothing_is_an_error_not_a_crash(rows: Any) -> None:
    row = rows.logits(1)
    row[:] = -np.inf
    row[int(rows.logits(2).argmax())] = 1.0
    assert rows.sample([1], None, [rows.grammar(YES_NO)]) == (1, [-1])
    assert "permits no token" in str(rows.library.mg.error())


def test_a_broken_grammar_is_detectable(rows: Any) -> None:
    rows.library.mg.set_log("none")
    try:
        assert not rows.grammar(b"root ::= (")
    finally:
        rows.library.mg.set_log("warn")


@pytest.mark.parametrize("n_top", [0, 1, 10])
def test_logprobs_match_float64(rows: Any, n_top: int) -> None:
    reference = log_softmax(rows.logits(5))
    n, ids, values, chosen = logprobs(rows, 5, 1234, n_top)
    assert n == n_top
    assert ids == list(np.argsort(-reference, kind="stable")[:n_top])
    assert values == pytest.approx(list(reference[ids]), abs=1e-4)
    assert chosen == pytest.approx(reference[1234], abs=1e-4)


def test_logprobs_order_ties_by_id_and_cap_n_top(rows: Any) -> None:
    row = rows.logits(5)
    row[:] = 0.0
    assert logprobs(rows, 5, 3, 3)[1] == [0, 1, 2]
    assert logprobs(rows, 5, 3, 3)[3] == pytest.approx(-np.log(rows.n_vocab), abs=1e-4)
    assert logprobs(rows, 5, 3, rows.n_vocab + 10)[0] == rows.n_vocab


def test_logprobs_without_a_token_leave_its_value_alone(rows: Any) -> None:
    assert logprobs(rows, 5, -1, 1)[3] == 7.0


def test_logprobs_reject_what_does_not_exist(rows: Any) -> None:
    assert logprobs(rows, 5, rows.n_vocab, 1)[0] == -1
    assert "outside the vocabulary" in str(rows.library.mg.error())
    assert logprobs(rows, 0, 1, 1)[0] == -1
    assert "row 0 has no logits" in str(rows.library.mg.error())


def row_probs(rows: Any, chain: Any, idx: int, n_top: int, grammar: Any = None) -> Any:
    ids, probs, token = ffi.new("int32_t[]", n_top), ffi.new("float[]", n_top), ffi.new("int32_t *")
    n = rows.mg.mg_sample_row_probs(
        rows.handle, rows.pointer(chain), rows.pointer(grammar), idx, n_top, ids, probs, token
    )
    return n, list(ids)[: max(n, 0)], list(probs)[: max(n, 0)], token[0]


def test_candidates_after_the_chain_match_numpy(rows: Any) -> None:
    llama = rows.library.llama
    chain = rows.chain(
        llama.llama_sampler_init_top_k(20), llama.llama_sampler_init_temp(0.7), llama.llama_sampler_init_dist(3)
    )
    logits = rows.logits(6)
    top = np.argsort(-logits, kind="stable")[:20]
    reference = np.exp(log_softmax(logits[top] / np.float32(0.7)))
    n, ids, probs, token = row_probs(rows, chain, 6, 20)
    assert n == 20
    assert ids == list(top)
    assert probs == pytest.approx(list(reference), abs=1e-5)
    assert token in ids
    assert row_probs(rows, chain, 6, 5)[0] == 5


def test_a_greedy_row_has_one_candidate(rows: Any) -> None:
    best = int(rows.logits(6).argmax())
    assert row_probs(rows, None, 6, 5) == (1, [best], [1.0], best)
    greedy = rows.chain(rows.library.llama.llama_sampler_init_greedy())
    assert row_probs(rows, greedy, 6, 5) == (1, [best], [1.0], best)


def test_row_probs_report_failure(rows: Any) -> None:
    assert row_probs(rows, None, 0, 5) == (-1, [], [], -1)
