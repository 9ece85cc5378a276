"""bench steps: shapes, and a run on a small model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benches import steps
from benches.errors import BenchError
from benches.program import run_module
from llamamg.library import Library


def test_shapes() -> None:
    assert steps.parse_shape("1+1+p64") == [(1, True), (1, True), (64, False)]
    for wrong in ("", "1+", "q3", "0", "p0", "1-2"):
        with pytest.raises(BenchError, match="--shapes"):
            steps.parse_shape(wrong)


def measured(tmp_path: Path, model: Path, *words: str) -> tuple[int, dict[str, Any]]:
    argv = ["-m", str(model), "-t", "1", "--enable", "none", "--depth", "300", "--steps", "3", "--rounds", "1"]
    status = run_module(steps, [*argv, "--results", str(tmp_path), *words], "bench steps")
    found = list(tmp_path.glob("*/*/result.json"))
    return status, json.loads(found[0].read_text()) if found else {}


def test_a_switch_that_changes_what_is_computed_is_seen(tmp_path: Path, micro_model: Path, library: Library) -> None:
    if not library.patched:
        pytest.skip("the build under test is the unpatched one")
    status, result = measured(
        tmp_path, micro_model, "--switch", "small-graphs", "--shapes", "1,1+p8", "--compare", "40"
    )
    assert status == 0
    alone, mixed = result["rows"]
    assert [one["n_reused"] for one in alone["values"]] == [3, 3]
    assert [one["n_reused"] for one in mixed["values"]] == [0, 6], "two ubatches a step, each with a graph of its own"
    assert result["closeness"][1]["same_bits"], "that switch is exact"
    assert "1+p8" in steps.table(result)
    assert result["cuda_graphs"] is False, "there is no CUDA device here"
    assert "GGML_CUDA_DISABLE_GRAPHS=1" not in steps.table(result)
    assert "GGML_CUDA_DISABLE_GRAPHS=1" in steps.table({**result, "cuda_graphs": True})


def test_what_cannot_be_measured_is_said(tmp_path: Path, micro_model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert measured(tmp_path, micro_model, "--switch", "no-such-switch")[0] == 1
    assert "no-such-switch" in capsys.readouterr().err
    assert measured(tmp_path, micro_model, "--switch", "qsa", "--values", "on")[0] == 1
    assert "--values" in capsys.readouterr().err
    assert not list(tmp_path.glob("*/*/result.json"))
