"""Native QSA over depth, on the micro model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benches import program, qsa_depth
from llamamg.library import Library


def run(*arguments: str) -> int:
    return program.run_module(qsa_depth, arguments, "llamamg bench qsa-depth")


def test_both_sides_are_measured_and_agree(library: Library, micro_model: Path, tmp_path: Path, capsys: Any) -> None:
    if "qsa" not in {switch.name for switch in library.mg.switches()}:
        pytest.skip("the build under test is the unpatched one")
    words = [
        "--gpu-layers",
        "0",
        "--threads",
        "1",
        "--depths",
        "500,900",
        "--piece",
        "64",
        "--five-at",
        "256",
        "--cache-type",
        "f16",
        "--results",
    ]
    assert run("-m", str(micro_model), *words, str(tmp_path)) == 0
    (file,) = tmp_path.glob("*/*/qsa-depth.json")
    result = json.loads(file.read_text())
    assert [row["depth"] for row in result["rows"]] == [500, 900]
    for row in result["rows"]:
        assert min(row[key] for key in ("decode_on", "decode_off", "prefill_on", "prefill_off")) > 0
        assert row["compare"]["position"] % 4 == 2
        assert row["compare"]["same_bits_twice"]
        assert row["compare"]["largest_difference"] < 0.2  # quantised weights: two graphs of one model, not two models
    assert result["five"]["decode_on"] > 0
    assert qsa_depth.table(result) in capsys.readouterr().out


def test_a_model_that_cannot_be_loaded(library: Library, tmp_path: Path, capsys: Any) -> None:
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"GGUF")
    assert run("-m", str(broken), "--results", str(tmp_path / "r")) == 1
    assert "could not be loaded" in capsys.readouterr().err
    assert not (tmp_path / "r").exists()
