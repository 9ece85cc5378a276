"""What the answers of a cell say, and the prompts that are asked."""

from __future__ import annotations

import json

import numpy as np
import pytest
from llamamg_benches.client import Answer
from llamamg_benches.grid_measure import Stream, generate_row, prefill_row, stream_of, token_gaps
from llamamg_benches.grid_prompts import Prompts
from llamamg_benches.sides import SideError


def answer(t_sent: float, stamps: list[float], n_prompt: int = 0, events: tuple[bytes, ...] = ()) -> Answer:
    final = {"timings": {"prompt_n": n_prompt, "prompt_per_second": 1.0}}
    return Answer(t_sent, np.array(stamps), (stamps or [t_sent])[-1] + 0.5, final, events)


def test_prefill_together_and_for_each_session() -> None:
    row = prefill_row([answer(10.0, [12.0], 1000), answer(10.0, [14.0], 1000)])
    assert row["tps"] == pytest.approx(2000 / 4)
    assert row["slot_tps"] == pytest.approx((1000 / 2 + 1000 / 4) / 2)
    assert row["ttft_ms"] == [2000.0, 4000.0]


def test_a_first_token_without_an_event_of_its_own_counts_at_the_end() -> None:
    assert prefill_row([answer(1.0, [], 100)])["ttft_ms"] == [500.0]


def test_prefill_without_a_count_of_tokens_is_no_measurement() -> None:
    with pytest.raises(SideError, match="prompt_n"):
        prefill_row([answer(0.0, [1.0], 0)])


def test_generation_counts_only_while_all_sessions_decode() -> None:
    early = Stream(np.array([0.0, 1.0, 2.0, 3.0]), np.array([1, 2, 3, 4]))
    late = Stream(np.array([1.5, 2.5, 3.5, 4.5]), np.array([1, 2, 3, 4]))
    row = generate_row([early, late])
    assert row["window_s"] == pytest.approx(1.5)
    assert row["n_tokens"] == 3  # 2.0 and 3.0 of the first, 2.5 of the second
    assert row["tps"] == pytest.approx(2.0)
    assert row["slot_tps"] == pytest.approx(1.0)
    assert row["itl_ms"]["max"] == pytest.approx(1000)


def test_latencies_are_percentiles_of_all_gaps() -> None:
    gaps = np.arange(1, 102) / 1000  # 1 to 101 ms
    stamps = np.concatenate([[0.0], np.cumsum(gaps)])
    itl = generate_row([Stream(stamps, np.arange(1, len(stamps) + 1))])["itl_ms"]
    assert itl == {key: pytest.approx(ms) for key, ms in (("p50", 51.0), ("p90", 91.0), ("p99", 100.0), ("max", 101.0))}


def test_sessions_that_never_decode_together_are_an_error() -> None:
    with pytest.raises(SideError, match="--n-predict"):
        generate_row([Stream(np.array([0.0, 1.0]), np.array([1, 2])), Stream(np.array([2.0, 3.0]), np.array([1, 2]))])


def test_an_event_with_several_tokens_counts_them_all() -> None:
    events = tuple(json.dumps({"tokens_predicted": n}).replace(" ", "").encode() for n in (1, 4))
    stream = stream_of(answer(0.0, [1.0, 1.3], events=events))
    assert stream.counts.tolist() == [1, 4]
    assert token_gaps(stream, 1.0, 1.3) == pytest.approx([100.0] * 3)
    assert generate_row([stream])["n_tokens"] == 3


def test_a_server_that_does_not_count_sends_one_token_an_event() -> None:
    assert stream_of(answer(0.0, [1.0, 2.0], events=(b"{}", b"{}"))).counts.tolist() == [1, 2]


def test_prompts_are_alike_on_all_sides_and_new_for_every_run() -> None:
    a, b = Prompts(1, 50_000), Prompts(1, 50_000)
    assert a.make(0, 300, 0) == b.make(0, 300, 0)
    assert len(a.make(0, 300, 0)) == 300
    different = [a.make(*key) for key in ((0, 300, 0), (1, 300, 0), (0, 300, 1))] + [Prompts(2, 50_000).make(0, 300, 0)]
    assert len({tuple(prompt[:2]) for prompt in different}) == 4  # not even a common beginning
    assert max(max(prompt) for prompt in different) < 50_000


def test_the_second_prompt_only_adds() -> None:
    ids, words = Prompts(1, 1000).make(0, 50, 0), Prompts(1, None).make(0, 50, 0)
    assert Prompts(1, 1000).longer(ids)[:-1] == ids
    assert str(Prompts(1, None).longer(words)).startswith(str(words))
    assert len(str(words).split()) == 50
