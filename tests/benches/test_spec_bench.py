"""bench spec: scripts say what they should, a ceiling is measured, and results follow from their numbers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benches import program, spec
from benches.spec_blocks import Block
from benches.spec_history import history
from benches.spec_loads import CELLS, prompt_of, scripted
from benches.spec_steps import Step, Steps, summed_up, told
from llamamg.library import Library
from llamamg.sampler import RowSampler
from llamamg.testing import FakeVocabulary


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
    for cell in result["cells"]:
        assert sum(drafted for drafted, _, _ in cell["steps"]["drafts"]) == cell["drafted"]
        assert sum(accepted for _, accepted, _ in cell["steps"]["drafts"]) == cell["accepted"]
        assert cell["steps"]["off"]["n"] == 3 * 39
        assert f"{cell['cell']}: mean step in ms: off" in spec.table(result)
        assert cell["first_on"]["drafts_by_width"]
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
        "drafts": 3, "drafted": 37, "accepted": 30, "computed_again": 0, "lookup_s": 0.1, "verify_s": 0.2,
        "drafts_by_width": {"15": 2, "7": 1}, "no_draft": {}
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


def test_each_step_is_told_apart_by_the_draft_before_it() -> None:
    steps = Steps(10.0, 100, 50)
    for seconds, drafted, accepted in ((1, 0, 0), (3, 7, 2), (2, 0, 0), (1, 0, 0), (3, 3, 0), *[(1, 0, 0)] * 5):
        now, n_drafted, n_accepted = steps._before
        steps.end(now + seconds, n_drafted + drafted, n_accepted + accepted)
    assert steps.all[1] == Step(3.0, 7, 2)
    out = summed_up([steps.all], [[Step(1.0, 0, 0)] * 4])
    assert out["drafts"] == [[7, 2, 3000.0], [3, 0, 3000.0]]
    assert [each["n"] for each in out["behind"]] == [2, 2, 1, 1]
    assert out["behind"][0]["mean_ms"] == pytest.approx(1500.0)
    assert (out["off"]["n"], out["plain"]["n"]) == (4, 2)
    assert out["lost"] == {"drafts": pytest.approx((6 - 4) / 15), "behind": pytest.approx(1 / 15), "plain": 0.0}
    assert "lost of all time (-: gained), by steps: drafts 13.33%, behind 6.67%, plain 0.00%" in told("never", out)


def test_no_cell_continues_the_text_of_another() -> None:
    """Otherwise it would inherit what was learned there."""
    vocab: Any = FakeVocabulary()
    right, wrong = (prompt_of(vocab, CELLS[name], 0, 900).tolist() for name in ("forced", "never"))
    assert right[:8] != wrong[:8]
    assert right[-50:] == wrong[-50:]


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
