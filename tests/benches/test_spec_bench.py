"""bench spec: scripts say what they should, a ceiling is measured, and results follow from their numbers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benches import program, spec
from benches.spec_blocks import Block
from benches.spec_history import history
from benches.spec_loads import scripted
from llamamg.library import Library
from llamamg.sampler import RowSampler


def run(*arguments: str) -> int:
    return program.run_module(spec, arguments, "llamamg bench spec")


def test_scripted_drafts_on_a_hybrid(library: Library, micro_model: Path, tmp_path: Path, capsys: Any) -> None:
    where = ["--results", str(tmp_path / "r"), "--history", "4000"]
    small = [
        "--cells",
        "forced,never",
        "--pairs",
        "3",
        "--tokens",
        "40",
        "--depth",
        "600",
        "-t",
        "1",
        "--spec-always",
        "on",
    ]
    assert run("-m", str(micro_model), *small, *where) == 0
    (file,) = tmp_path.glob("r/*/*/result.json")
    result = json.loads(file.read_text())
    forced, never = result["cells"]
    assert forced["drafted"] > 0
    assert forced["accepted"] == forced["drafted"]
    assert never["accepted"] == 0
    assert set(forced["ceilings"]["ceiling"]) == {"1", "3", "7", "15", "31"}
    assert forced["of_ceiling"] == pytest.approx(forced["gain"]["median"] / forced["ceiling"])
    assert {h["kind"] for h in result["history"]} >= {"suffix", "ngram-map-k4v"}
    assert spec.table(result) in capsys.readouterr().out


def test_a_script_is_said_whatever_the_model_wants(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RowSampler, "sample", lambda self, samplers, index: [7] * len(index))
    sampler, rows = object(), object.__new__(RowSampler)
    with scripted("right", [1, 2, 3]):
        assert rows.sample([sampler], [0]) == [1]  # type: ignore[list-item]
        assert rows.sample_run(sampler, 0, [2, 3, 9]) == [2, 3, 1]  # type: ignore[arg-type]
    assert rows.sample([sampler], [0]) == [7]  # type: ignore[list-item]
    other = object()
    with scripted("wrong", [1, 2, 3]):
        assert rows.sample_run(other, 0, [1, 2]) == [2]  # type: ignore[arg-type]
        assert rows.sample([other], [0]) == [2]  # type: ignore[list-item]


def test_a_summary_follows_from_its_blocks() -> None:
    counts: dict[str, Any] = {
        "drafts": 3, "drafted": 37, "accepted": 30, "computed_again": 0, "drafts_by_width": {"15": 2, "7": 1}, "no_draft": {}
    }  # fmt: skip
    blocks = {
        True: [Block(200.0 + i, 95.0 + i, counts=counts) for i in range(3)],
        False: [Block(100.0 + i, 100.0 + i, counts=counts) for i in range(3)],
    }
    found = {"ceiling": {"7": 2.0, "15": 2.5}}
    out = spec.summary("four", blocks, found)
    assert (out["width"], out["ceiling"], out["drafted"], out["accepted"]) == (15, 2.5, 111, 90)
    assert out["gain"]["median"] == pytest.approx(201 / 101)
    assert out["of_ceiling"] == pytest.approx(201 / 101 / 2.5)
    assert out["neighbours"]["median"] == pytest.approx(96 / 101)


def test_the_index_is_timed_for_every_kind(library: Library) -> None:
    rows = history(6000)
    assert all(row["draft_us"]["median"] > 0 and row["n_tokens"] >= 6000 for row in rows)
    assert all(row["n_drafted"] > 30 for row in rows if row["kind"] != "ngram-mod")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--cells", "repeat,poem"], "no cell 'poem': use repeat, list"),
        (["--pairs", "1"], "--pairs must be at least 3"),
        (["--spec-type", "none"], "add --spec-type with one of"),
    ],
)
def test_what_cannot_be_measured_is_said(
    arguments: list[str], words: str, micro_model: Path, tmp_path: Path, capsys: Any
) -> None:
    assert run("-m", str(micro_model), "--results", str(tmp_path), *arguments) == 1
    assert words in capsys.readouterr().err
