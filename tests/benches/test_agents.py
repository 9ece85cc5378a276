"""`llamamg bench agents` on a real small model, and its counting."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benches import agents
from benches.agents_load import Agent, Sizes, Step, figures, longest
from benches.client import ServerError
from benches.grid_prompts import Prompts
from benches.program import run_module

SMALL = ["-t", "1", "--prompt", "200", "--tool", "20", "--n-predict", "8", "--pause", "0.05", "--turns", "3"]


@pytest.fixture
def bench(micro_model: Path, library: object, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Any:
    """`bench(*arguments)`: exit status, what was kept (None: nothing), stderr."""

    def run(*arguments: str) -> tuple[int, dict[str, Any] | None, str]:
        root = tmp_path / "results"
        status = run_module(agents, ["-m", str(micro_model), "--results", str(root), *SMALL, *arguments], "bench")
        kept = sorted(root.glob("*/*/result.json"))
        out = capsys.readouterr()
        if not kept:
            return status, None, out.err
        stored = json.loads(kept[0].read_text())
        assert kept[0].with_name("table.txt").read_text() == agents.table(stored) + "\n" == out.out
        return status, stored, out.err

    return run


def test_with_a_slot_for_each_nothing_is_computed_twice(bench: Any, micro_model: Path) -> None:
    status, result, _ = bench("--agents", "2", "--side", "ours", "--side", "upstream")
    assert status == 0
    turns = [step for i in range(2) for step in Sizes(200, 20, 8, 0.05).draw(1, i, 3)]
    for row in result["rows"]:
        (run,) = row["runs"]
        assert (run["n_turns"], run["n_again"], run["n_lost"]) == (6, 0, 0), row["side"]
        assert run["n_predicted"] == sum(step.n_predict for step in turns)
        answers_known = 2 * 2  # the last token of an answer is computed in the next turn
        assert run["n_new"] == sum(step.n_new for step in turns) + answers_known
    assert [row["side"] for row in result["rows"]] == ["ours", "upstream"]
    assert str(micro_model) not in json.dumps(result), "no paths in what is published"


def test_more_agents_than_slots_need_a_cache(bench: Any) -> None:
    status, result, _ = bench("--agents", "3", "--slots", "1", "--side", "ours", "--side", "none:-cram 0")
    assert status == 0
    ours, none = (row["runs"][0] for row in result["rows"])
    assert ours["n_again"] == 0
    assert none["n_lost"] > 0
    assert none["n_again"] > 100
    assert none["n_new"] == ours["n_new"]


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--agents", "0"], "--agents must be at least 1"),
        (["--slots", "0"], "--slots must be at least 1"),
        (["--n-predict", "1"], "--n-predict must be at least 2"),
        (["--repeats", "2", "--side", "x=http://127.0.0.1:1"], "leave it out"),
        (["--prompt", "2000", "-c", "512"], "tokens of context per slot"),
    ],
)
def test_what_cannot_be_is_said(bench: Any, words: list[str], sentence: str) -> None:
    status, result, said = bench("--agents", "2", *words)
    assert (status, result) == (1, None)
    assert sentence in said
    assert "Traceback" not in said


def test_turns_are_the_same_for_the_same_seed_and_agent() -> None:
    sizes = Sizes(1000, 100, 64, 0.3)
    assert sizes.draw(1, 0, 5) == sizes.draw(1, 0, 5) != sizes.draw(1, 1, 5)
    steps = sizes.draw(3, 2, 2000)
    assert 500 <= steps[0].n_new <= 1000
    assert 80 < sum(step.n_new for step in steps[1:]) / 1999 < 120
    assert max(step.n_new for step in steps[1:]) <= 401
    assert {step.n_predict for step in steps} == set(range(16, 65))
    assert 0.25 < sum(step.pause_s for step in steps) / 2000 < 0.35


def answer(n: int, cached: int, **timings: Any) -> dict[str, Any]:
    return {"tokens": list(range(n)), "timings": {"cache_n": cached, "predicted_ms": 30.0, **timings}}


def test_what_was_known_and_not_cached_is_counted() -> None:
    agent = Agent(0, [], Prompts(1, 1000))
    agent.tokens = [1] * 100
    first = agent._turn(answer(4, 0), 50.0, Step(100, 4, 0.0))
    assert (first.n_again, first.ttft_ms, first.itl_ms) == (0, 20.0, 10.0)
    assert agent.n_known == 103
    agent.tokens += [1] * 10
    second = agent._turn(answer(4, 60), 50.0, Step(10, 4, 0.0))
    assert (second.n_prompt, second.n_cached, second.n_again) == (114, 60, 43)
    agent.turns = [first, second]
    assert longest([Agent(0, [Step(100, 4, 0.0), Step(10, 4, 0.0)], Prompts(1, 9))]) == 118
    made = figures([agent], 2.0)
    assert (made["n_again"], made["n_lost"], made["n_new"]) == (43, 1, 111)
    assert made["ttft_ms"]["p50"] == made["first_ttft_ms"]["max"] == 20.0


@pytest.mark.parametrize("wrong", [answer(3, 0), {"tokens": [1] * 4, "timings": {}}, {}])
def test_an_answer_that_lacks_something_is_an_error(wrong: dict[str, Any]) -> None:
    with pytest.raises(ServerError, match="agent 0 got"):
        Agent(0, [], Prompts(1, 1000))._turn(wrong, 50.0, Step(100, 4, 0.0))
