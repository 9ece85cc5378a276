"""The lookup index against a plain search of the text, for every kind; and where it differs from llama.cpp's lookups on purpose."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest

from llamamg import Draft, DraftIndex, DraftRule, Options
from llamamg.library import Library
from llamamg_plugins.spec_options import declare
from llamamg_plugins.spec_types import NAMES, Kind, kind, kinds


def sizes(**changes: Any) -> dict[str, Any]:
    declared = Options("spec")
    declare(declared)
    return declared.values({}) | changes


def tokens(*values: int) -> Any:
    return np.array(values, np.int32)


def index_of(text: Any, *orders: int) -> DraftIndex:
    index = DraftIndex(orders, 64)
    index.follow(np.asarray(text, np.int32))
    return index


@pytest.fixture(autouse=True)
def _loaded(library: Library) -> None:
    """The index is native."""


def searched(text: list[int], orders: tuple[int, ...], rule: DraftRule, n_max: int) -> list[int]:
    """The same draft by looking at every position of the text, whose last token is the sampled one."""
    at: list[int] = []
    for n in sorted(orders, reverse=True):
        key = text[len(text) - n :]
        ends = [e for e in range(n - 1, len(text) - 1) if text[e + 1 - n : e + 1] == key] if len(text) >= n else []
        ends = ends[::-1][: max(rule.min_hits, rule.n_candidates)]
        if len(ends) < max(1, rule.min_hits):
            continue
        if rule.longest:
            back = {e: matched_back(text, e) for e in ends}
            ends = [e for e in ends if back[e] == max(back.values())]
        at = [e + 1 for e in ends[: rule.n_candidates]]
        break
    out: list[int] = []
    product = 1.0
    while at and len(out) < n_max:
        whole = text + out
        votes = Counter(whole[i] for i in at)
        most = max(votes.values())
        token = next(whole[i] for i in at if votes[whole[i]] == most)
        share = np.float32(most) / np.float32(len(at))
        if share < np.float32(rule.min_share) or product * share < np.float32(rule.p_min):
            break
        product *= share
        at = [i + 1 for i in at if whole[i] == token]
        out.append(token)
    return out if len(out) >= rule.n_min else []


def matched_back(text: list[int], end: int) -> int:
    n = 0
    while n < 64 and n <= end and text[end - n] == text[len(text) - 1 - n]:
        n += 1
    return n


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("n_words", [2, 3, 20])
def test_drafts_are_those_of_a_search(name: str, n_words: int) -> None:
    small = {f"{k}_size_n": 3 for k in ("ngram_simple", "ngram_map_k", "ngram_map_k4v")}
    chosen = kind(name, sizes(ngram_mod_n_match=4, ngram_mod_n_min=2, ngram_simple_min_hits=2, **small))
    random = np.random.default_rng(n_words)
    phrases = [random.integers(0, n_words, 12) for _ in range(4)]
    n_drafts = 0
    for _ in range(30):
        parts = [
            phrases[random.integers(4)] if random.random() < 0.6 else random.integers(0, n_words, 5) for _ in range(12)
        ]
        text = np.concatenate(parts).astype(np.int32)
        index = DraftIndex(chosen.orders, 64)
        for n in range(40, len(text)):
            index.follow(text[:n])
            got = index.draft(int(text[n]), chosen.rule, 20).tokens
            assert got == searched(text[: n + 1].tolist(), chosen.orders, chosen.rule, 20)
            n_drafts += bool(got)
    assert n_drafts > 50


def test_an_index_that_was_cut_is_the_index_of_what_is_left() -> None:
    random = np.random.default_rng(5)
    rule = DraftRule(8, longest=True)
    index = DraftIndex((2, 4), 64)
    text = random.integers(0, 3, 400).astype(np.int32)
    for _ in range(60):
        n = int(random.integers(0, 400))
        at = int(random.integers(0, 400))
        text[at:] = random.integers(0, 3, 400 - at)
        index.follow(text[:n], whole=True)
        assert len(index) == n
        fresh = index_of(text[:n], 2, 4)
        assert [index.draft(t, rule, 9).tokens for t in range(3)] == [fresh.draft(t, rule, 9).tokens for t in range(3)]


@pytest.mark.parametrize("kept", [0, 15_000])
def test_texts_that_went_leave_nothing_behind(kept: int) -> None:
    """A slot has thousands of them in its time."""
    random = np.random.default_rng(1)
    index, text, taken = DraftIndex((4, 8), 64), random.integers(0, 50_000, 20_000).astype(np.int32), []
    for _ in range(60):
        text[kept:] = random.integers(0, 50_000, len(text) - kept)
        index.follow(text, whole=True)
        taken.append(index.n_bytes)
    assert max(taken) <= 4 * taken[0]
    fresh = index_of(text, 4, 8)
    ends = [text[:n] for n in (5_000, 16_000, 19_999)]
    assert [drafted(index, end) for end in ends] == [drafted(fresh, end) for end in ends]


def drafted(where: DraftIndex, end: Any) -> list[int]:
    """What another text that ends like this would be told by an index."""
    return index_of(end[-20:-1], 4, 8).draft(int(end[-1]), DraftRule(8, longest=True), 9, where).tokens


def test_a_long_text_is_taken_in_piece_by_piece() -> None:
    random = np.random.default_rng(2)
    text = random.integers(0, 9, 5000).astype(np.int32)
    index = index_of(text, 4, 8)
    text[4900:] = random.integers(0, 9, 100)
    assert index.follow(text, whole=True, n_most=700) <= 100  # a few tokens differ: no more are taken out
    text = np.concatenate([text[:50], random.integers(0, 9, 2950)]).astype(np.int32)
    taken = [index.follow(text, whole=True, n_most=700)]  # thousands are: that begins anew
    assert len(index) == 700
    while taken[-1] == 700:
        taken.append(index.follow(text, n_most=700))
    assert taken == [700, 700, 700, 700, 200]
    fresh, rule = index_of(text, 4, 8), DraftRule(8, longest=True)
    assert [index.draft(t, rule, 9) for t in range(9)] == [fresh.draft(t, rule, 9) for t in range(9)]


def test_drafts_that_missed_are_remembered_up_to_a_number() -> None:
    index = index_of(range(100), 2)
    for key in range(1, 60_000):
        index.judge(Draft([1], key, 2, 1), 1, 0)
    assert index.n_bytes < 1 << 20


def test_a_short_look_back_notices_a_text_that_changed() -> None:
    index = index_of(range(100), 2)
    shifted = np.arange(30, 200, dtype=np.int32)
    index.follow(shifted)  # as after a context shift, longer by now
    assert len(index) == 170
    assert index.draft(199, DraftRule(), 4).tokens == []


def test_a_period_is_continued_beyond_the_end_of_the_text() -> None:
    assert index_of([1, 2, 3, 1, 2], 2).draft(3, DraftRule(), 7).tokens == [1, 2, 3, 1, 2, 3, 1]


def test_the_winning_continuation_is_what_is_drafted() -> None:
    """llama.cpp's map copies from the place that matched, not from the continuation that won."""
    k4v = kind("ngram-map-k4v", sizes(ngram_map_k4v_size_n=2))
    text = [1, 2, 5, 6, 7, 1, 2, 5, 6, 8, 1, 2, 5, 6, 7, 1, 2, 9, 9, 9]
    assert index_of([*text, 1], *k4v.orders).draft(2, k4v.rule, 2).tokens == [5, 6]  # 3 votes of 4; the latest says 9
    equal = [1, 2, 5, 1, 2, 9]
    assert index_of([*equal, 1], *k4v.orders).draft(2, k4v.rule, 2).tokens == []  # nobody has twice the others' votes


@pytest.mark.parametrize("name", ["ngram-simple", "ngram-map-k", "ngram-map-k4v"])
def test_fewer_hits_than_asked_for_draft_nothing(name: str) -> None:
    """llama.cpp does not look at min-hits for the first two."""
    key = name.replace("-", "_")
    chosen = kind(name, sizes(**{f"{key}_size_n": 2, f"{key}_min_hits": 2}))
    assert index_of([1, 2, 3, 4, 1], *chosen.orders).draft(2, chosen.rule, 3).tokens == []
    assert index_of([1, 2, 3, 4, 1, 2, 3, 4, 1], *chosen.orders).draft(2, chosen.rule, 3).tokens == [3, 4, 1]


@pytest.mark.parametrize("name", ["ngram-map-k", "ngram-map-k4v"])
def test_a_key_that_missed_drafts_less_and_comes_back(name: str) -> None:
    """In llama.cpp a key drafts nothing for ever after one draft of which nothing was accepted."""
    chosen = kind(name, sizes(ngram_map_k_size_n=2, ngram_map_k4v_size_n=2))
    index = index_of([*range(60), 1], *chosen.orders)
    lengths = []
    for accepted in (0, 1, 3, 7, 10, 10):
        draft = index.draft(2, chosen.rule, 10)
        lengths.append(len(draft.tokens))
        index.judge(draft, len(draft.tokens), accepted)
    assert lengths == [10, 1, 3, 7, 10, 10]


def test_another_index_is_searched_when_asked_for() -> None:
    mine, theirs = index_of([1, 2], 2), index_of([7, 1, 2, 3, 4, 5], 2)
    assert mine.draft(3, DraftRule(), 9).tokens == []
    assert mine.draft(3, DraftRule(), 9, theirs).tokens == [4, 5]  # and not beyond its end


def test_a_draft_goes_on_in_another_place_where_a_text_ends() -> None:
    theirs = index_of([5, 6, 7, 8, 9, 1, 2, 5, 6], 2)
    assert index_of([1], 2).draft(2, DraftRule(), 5, theirs).tokens == [5, 6]
    assert index_of([1], 2).draft(2, DraftRule(extend=True), 5, theirs).tokens == [5, 6, 7, 8, 9]


def test_short_drafts_are_dropped() -> None:
    rule = DraftRule(n_min=4)
    assert index_of([1, 2, 3, 4, 5, 6, 1], 2).draft(2, rule, 3).tokens == []
    assert index_of([1, 2, 3, 4, 5, 6, 1], 2).draft(2, rule, 4).tokens == [3, 4, 5, 6]


def test_many_tokens_and_many_occurrences() -> None:
    text = np.zeros(300_000, np.int32)
    index = index_of(text, 4, 8)
    assert index.draft(0, DraftRule(64, longest=True), 64).tokens == [0] * 64
    assert index.n_bytes < 40 * len(text)
    distinct = np.arange(300_000, dtype=np.int32)
    index.follow(distinct, whole=True)
    assert index.draft(7, DraftRule(), 3).tokens == []
    index.follow(np.append(distinct, distinct[500:520]))
    assert index.draft(520, DraftRule(64, longest=True), 3).tokens == [521, 522, 523]


@pytest.mark.parametrize("orders", [(), (0,), (3, -1)])
def test_lengths_that_mean_nothing_are_refused(orders: tuple[int, ...]) -> None:
    with pytest.raises(RuntimeError, match="n-gram"):
        DraftIndex(orders, 8)


def test_kinds_are_asked_in_a_fixed_order_and_once() -> None:
    assert [k.name for k in kinds("suffix, ngram-map-k,ngram-simple,suffix", sizes())] == [
        "ngram-simple",
        "ngram-map-k",
        "suffix",
    ]
    assert kinds("none", sizes()) == ()
    with pytest.raises(ValueError, match="no kind 'ngram-cache'; use one of ngram-simple"):
        kinds("ngram-cache", sizes())


def test_the_sizes_are_llama_servers() -> None:
    found: list[Kind] = [kind(name, sizes()) for name in NAMES]
    assert [(k.orders, k.n_max, k.rule.min_hits, k.rule.n_min) for k in found] == [
        ((12,), 48, 1, 1),
        ((12,), 48, 1, 1),
        ((12,), 48, 1, 1),
        ((24,), 64, 1, 48),
        ((32, 16, 8, 4), 1024, 1, 1),
    ]
