"""Native QSA over depth, on the micro model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benches import program, qsa_depth, qsa_depth_table
from benches.errors import BenchError
from llamamg import paths
from llamamg.library import Library


def run(*arguments: str) -> int:
    return program.run_module(qsa_depth, arguments, "llamamg bench qsa-depth")


SMALL = ["--gpu-layers", "0", "--threads", "1", "--cache-type", "f16", "--repeats", "1"]
SIZES = ["--depths", "500,900", "--piece", "64", "--tokens", "4", "--five-at", "256", "--memory", "2x2048"]


def test_all_sides_are_measured_and_agree(library: Library, micro_model: Path, tmp_path: Path, capsys: Any) -> None:
    if not (paths.build("upstream") / "bin" / "libllamamg.so").is_file():
        pytest.skip("the unpatched build is missing: run `llamamg build --upstream`")
    lines = tmp_path / "lines"
    where = ["--results", str(tmp_path / "r"), "--lines", str(lines)]
    assert run("-m", str(micro_model), *SMALL, *SIZES, *where) == 0
    (file,) = tmp_path.glob("r/*/*/qsa-depth.json")
    result = json.loads(file.read_text())
    assert [json.loads(line) for line in lines.read_text().splitlines()] == result["rows"]
    measured = [row for row in result["rows"] if "n_sessions" in row]
    assert [(row["n_sessions"], row["depth"], row["side"]) for row in measured] == [
        (n, depth, side) for n, depth in ((5, 256), (1, 500), (1, 900)) for side in ("on", "off", "upstream")
    ]
    assert all(row["decode_tps"] > 0 and (row["n_sessions"] == 5 or row["prefill_tps"] > 0) for row in measured)
    compared = [row for row in result["rows"] if "compare" in row]
    assert [row["position"] for row in compared] == [498, 898]
    for row in compared:
        found = row["compare"]
        assert found["on/again"]["same_bits"]
        assert found["off/upstream"]["same_bits"]  # on the state that the native graph computed
        assert 0 < found["on/upstream"]["largest"] < 0.2  # quantised weights: two graphs of one model, not two models
    buffers = {row["side"]: row["compute_mib"]["CPU"] for row in result["rows"] if "compute_mib" in row}
    assert buffers["on"] < buffers["off"] == buffers["upstream"]
    assert result["record"]["builds"]["on"]["patched"]
    assert not result["record"]["builds"]["upstream"]["patched"]
    out = capsys.readouterr().out
    assert qsa_depth_table.table(result) in out
    assert "switched off and unpatched, a token at each depth: same bits, same best token 2 of 2" in out


def test_ratios_follow_from_rates() -> None:
    rows = [
        {"n_sessions": 1, "depth": 5000, "side": "on", "prefill_tps": 4000.0, "decode_tps": 100.0},
        {"n_sessions": 1, "depth": 5000, "side": "off", "prefill_tps": 3200.0, "decode_tps": 80.0},
        {"n_sessions": 1, "depth": 250_000, "side": "on", "prefill_tps": 3000.0, "decode_tps": 80.0},
        {"n_sessions": 1, "depth": 250_000, "side": "on", "prefill_tps": 3400.0, "decode_tps": 100.0},
        {"n_sessions": 1, "depth": 250_000, "side": "off", "prefill_tps": 800.0, "decode_tps": 20.0},
        {"n_sessions": 5, "depth": 100_000, "side": "on", "decode_tps": 300.0},
    ]
    text = qsa_depth_table.table({"sides": ["on", "off"], "rows": rows}).splitlines()
    assert text[2] == "| prefill | 1 | 5k | 4000 | 3200 | 1.25 | 1.00 |"
    assert text[3] == "| prefill | 1 | 250k | 3200 | 800 | 4.00 | 0.80 |"
    assert text[5] == "| decode | 1 | 250k | 90.0 | 20.0 | 4.50 | 0.90 |"
    assert text[6] == "| decode | 5 | 100k | 300 |  |  |  |"


def test_the_graph_that_ran_must_be_the_one_that_was_asked_for() -> None:
    qsa_depth.said(4, True, 4)
    qsa_depth.said(0, False, 4)
    with pytest.raises(BenchError, match="the native graph was not used"):
        qsa_depth.said(3, True, 4)
    with pytest.raises(BenchError, match="although it was switched off"):
        qsa_depth.said(1, False, 4)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("--sides", "off,upstream"), "--sides off,upstream: a list of on, off, upstream, with `on` among them"),
        (("--sides", "on,none"), "--sides on,none: a list of on, off, upstream"),
        (("--depths", "5q"), "--depths takes numbers of at least 2"),
        (("--five-at", "1k,2k"), "--five-at takes one depth"),
        (("--memory", "5x"), "--memory 5x: sequences and tokens of each, such as 5x262144, or 0"),
        (("--piece", "0"), "--piece must be at least 1"),
        (("--upstream", "nowhere"), "there is no unpatched build in nowhere: run `llamamg build --upstream`"),
    ],
)
def test_bad_input(
    library: Library, micro_model: Path, tmp_path: Path, capsys: Any, words: tuple[str, ...], sentence: str
) -> None:
    assert run("-m", str(micro_model), "--gpu-layers", "0", *words, "--results", str(tmp_path)) == 1
    assert sentence in capsys.readouterr().err
    assert not list(tmp_path.glob("*/*"))


def test_the_unpatched_side_must_be_unpatched(library: Library, micro_model: Path, tmp_path: Path, capsys: Any) -> None:
    words = ["--gpu-layers", "0", "--upstream", str(library.dir), "--results", str(tmp_path)]
    assert run("-m", str(micro_model), *words) == 1
    assert "--upstream names a patched build" in capsys.readouterr().err


def test_a_model_that_cannot_be_loaded(library: Library, tmp_path: Path, capsys: Any) -> None:
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"GGUF")
    words = ["--sides", "on,off", "--results", str(tmp_path / "r")]
    assert run("-m", str(broken), *words) == 1
    assert "could not be loaded" in capsys.readouterr().err
    assert not list(tmp_path.glob("r/*/*"))
    assert run("-m", str(tmp_path / "none.gguf"), *words) == 1
    assert "is no file: give a model with -m" in capsys.readouterr().err
