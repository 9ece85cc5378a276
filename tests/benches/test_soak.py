"""Arrivals and cancels against a server, and what counts as a changed answer."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pytest
from llamamg_benches import soak
from llamamg_benches.program import run_module
from llamamg_benches.soak_client import Counts, Kept

from llamamg.guard import TIE_MARGIN


class Alone:
    """A server that answers alone: `tokens`, and at each place other candidates so far behind."""

    def __init__(self, tokens: list[int], behind: dict[int, float], otherwise: float | None = None) -> None:
        self.tokens, self.behind, self.otherwise = tokens, behind, otherwise
        self.asked: list[dict[str, Any]] = []

    def post(self, path: str, request: dict[str, Any]) -> dict[str, Any]:
        self.asked.append(request)
        behind = dict(self.behind)
        if len(self.asked) > 1 and self.otherwise is not None:
            behind = dict.fromkeys(behind, self.otherwise)
        top = [{"id": 7, "logprob": -1.0}, *({"id": i, "logprob": -1.0 - by} for i, by in behind.items())]
        return {"tokens": self.tokens, "completion_probabilities": [{"top_logprobs": top}] * len(self.tokens)}


@pytest.mark.parametrize(
    ("given", "behind", "otherwise", "verdict"),
    [
        ([7, 7, 7], {}, None, "n_equal"),
        ([7, 8, 7], {8: TIE_MARGIN / 2}, None, "n_ties"),
        ([7, 8, 7], {8: TIE_MARGIN * 2}, None, "changed"),
        ([7, 8, 7], {8: TIE_MARGIN * 2}, TIE_MARGIN / 2, "n_ties"),
        ([7, 9, 7], {8: 0.0}, None, "changed"),
        ([7, 7], {}, None, "changed"),
    ],
    ids=["equal", "tie", "far", "tie in other batches", "not a candidate", "too short"],
)
def test_what_counts_as_changed(given: list[int], behind: dict[int, float], otherwise: float, verdict: str) -> None:
    server: Any = Alone([7, 7, 7], behind, otherwise)
    found = soak.again(server, [Kept([1, 2, 3], 3, given)], "x")
    counts = {"n_equal": found["n_equal"], "n_ties": found["n_ties"], "changed": len(found["changed"])}
    assert counts == {"n_equal": 0, "n_ties": 0, "changed": 0, verdict: 1}
    assert server.asked[0]["cache_prompt"] is False


def fine() -> dict[str, Any]:
    return {
        "burst": Counts().json(), "soak": Counts().json(), "equal": {}, "n_busy_slots": 0, "alive": True,
        "bad_words_in_log": [], "memory_mib": [{"host": 1000.0, "devices": [5000.0]}] * 2,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"soak": Counts(errors=["boom"]).json()}, "boom"),
        ({"equal": {"burst": {"n": 9, "changed": [{"at": 3, "behind_nats": 0.9}]}}}, "differ"),
        ({"n_busy_slots": 1}, "busy"),
        ({"alive": False}, "ended"),
        ({"bad_words_in_log": ["quarantine"]}, "quarantine"),
        ({"memory_mib": [{"host": 1000.0, "devices": []}, {"host": 1200.0, "devices": []}]}, "main memory"),
        (
            {
                "memory_mib": [
                    {"host": 1000.0, "checkpoints": 0.0, "devices": []},
                    {"host": 1300.0, "checkpoints": 100.0, "devices": []},
                ]
            },
            "main memory",
        ),
        ({"memory_mib": [{"host": None, "devices": [5000.0]}, {"host": None, "devices": [5400.0]}]}, "GPU 0"),
    ],
)
def test_every_failure_is_said(change: dict[str, Any], word: str) -> None:
    assert soak.failures(fine()) == []
    (sentence,) = soak.failures({**fine(), **change})
    assert word in sentence


def test_what_slots_keep_is_no_leak() -> None:
    looks = [
        {"host": 1000.0, "checkpoints": 100.0, "devices": []},
        {"host": 1900.0, "checkpoints": 1000.0, "devices": []},
    ]
    assert soak.failures({**fine(), "memory_mib": looks}) == []


def test_a_control_says_how_many_change_by_themselves() -> None:
    one = {"at": 1, "behind_nats": 0.9}
    found = {**fine(), "equal": {"burst": {"n": 10, "changed": [one] * 3}, "control": {"n": 10, "changed": [one] * 2}}}
    assert soak.failures(found) == []
    found["equal"]["control"] = {"n": 10, "changed": [one]}
    assert "differ" in soak.failures(found)[0]


def test_a_control_does_not_excuse_a_token_from_far_behind() -> None:
    far = {"at": 1, "behind_nats": None}
    found = {**fine(), "equal": {"burst": {"n": 10, "changed": [far]}, "control": {"n": 10, "changed": [far] * 5}}}
    assert "not among the 20 best" in soak.failures(found)[0]


def test_a_soak_of_a_real_server(micro_model: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    words = ["--seconds", "4", "--sessions", "2", "--prompt", "64", "--n-predict", "8", "--sample", "3", "--seed", "3"]
    words += ["--bursts", "2", "--control", "plain:--enable none"]
    status = run_module(
        soak, [*words, "--results", str(tmp_path), "-m", str(micro_model), "-t", "1", "--enable", "none"], "soak"
    )
    assert status == 0, capfd.readouterr()
    (folder,) = tmp_path.glob("*/*-soak")
    result = json.loads((folder / "soak.json").read_text())
    assert result["burst"]["n_finished"] == result["equal"]["control"]["n"] == 4
    assert result["soak"]["n_finished"] > 3
    assert result["soak"]["n_cancelled"] > 0
    assert result["equal"]["soak"]["n"] == 3
    assert result["failures"] == []
    assert result["memory_mib"][-1]["checkpoints"] > 0, "a hybrid keeps states, and says what they take"
    assert "asked again alone" in (folder / "table.txt").read_text()


def test_side_and_control_at_the_same_time(
    micro_model: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    words = [
        "--seconds",
        "0",
        "--sessions",
        "2",
        "--prompt",
        "64",
        "--n-predict",
        "8",
        "--control",
        "plain:--enable none",
    ]
    words += ["--together", "--results", str(tmp_path), "-m", str(micro_model), "-t", "1", "--enable", "none"]
    status = run_module(soak, words, "soak")
    assert status == 0, capfd.readouterr()
    (file,) = tmp_path.glob("*/*-soak/soak.json")
    equal = json.loads(file.read_text())["equal"]
    assert equal["burst"]["n"] == equal["control"]["n"] == 2
    words[1] = "4"
    assert run_module(soak, words, "soak") == 1
    assert "--together is for --seconds 0" in capfd.readouterr().err


def test_options_have_bounds() -> None:
    parser = argparse.ArgumentParser()
    soak.add_arguments(parser)
    args = parser.parse_args(["--sessions", "0"])
    args.flags = []
    with pytest.raises(RuntimeError, match="--sessions"):
        soak.run(args)
