"""Prefill over several devices: two rpc-servers on this machine stand for them, and what the trace says of a made-up run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benches import pipeline, pipeline_trace, program
from llamamg.library import Library


def run(*arguments: str) -> int:
    return program.run_module(pipeline, arguments, "llamamg bench pipeline")


def test_every_switch_does_its_part_and_changes_no_bit(
    library: Library, micro_model: Path, two_rpc_devices: str, tmp_path: Path, capsys: Any
) -> None:
    if not library.patched:
        pytest.skip("the build under test is the unpatched one")
    words = [
        "--tokens",
        "512",
        "-b",
        "512",
        "-ub",
        "64",
        "--repeats",
        "1",
        "-t",
        "1",
        "-ngl",
        "all",
        "-ts",
        "1,4",
        "-fa",
        "on",
    ]
    words += ["--no-upstream", "--trace"]  # -ts: the hop is in front of a plain layer
    assert run("-m", str(micro_model), "--rpc", two_rpc_devices, *words, "--results", str(tmp_path)) == 0
    (file,) = tmp_path.glob("*/*/pipeline.json")
    result = json.loads(file.read_text())
    assert pipeline.table(result) in capsys.readouterr().out
    rows = {(row["devices"], row["label"]): row for row in result["rows"]}
    every, none = rows["all", "all"], rows["all", "none"]
    # The mask grows every 256 tokens, so most of the 8 ubatches could take the graph before theirs.
    assert none["counts"]["ubatch"] == every["counts"]["ubatch"] == 8
    assert none["counts"]["reused"] == every["counts"]["rebuilt"] >= 4
    assert none["counts"]["rebuilt"] == every["counts"]["reused"] == every["counts"]["drained"] == 0
    assert none["counts"]["drained"] == none["counts"]["reused"]
    # One device reuses without waiting.
    assert rows["one", "all"]["counts"]["reused"] >= 4
    assert rows["one", "all"]["counts"]["drained"] == 0
    assert every["trace"]["n_drains"] == every["counts"]["realloc"]
    assert rows["all", "no prefill-rebuild"]["counts"]["reused"] == none["counts"]["reused"]
    # One device has no pipeline: nothing to rebuild.
    assert rows["one", "all"]["counts"]["rebuilt"] == 0
    assert len({row["digest"] for row in result["rows"]}) == 1

    def inputs_of_last_split(label: str) -> int:
        cells = [row["label"] for row in result["rows"] if row["devices"] == "all" and "queue" not in row["label"]]
        (trace,) = file.parent.glob(f"process-1/trace-{cells.index(label)}.json")
        stamps = json.loads(trace.read_text())
        assert {device for _, _, _, device in stamps if device} == set(every["trace"]["busy_ms"])
        return int([number for _, what, number, _ in stamps if what == "copied"][-1])

    assert inputs_of_last_split("no hop-once") == inputs_of_last_split("all") + 1
    assert len(every["trace"]["busy_ms"]) == 2
    assert every["trace"]["n_ubatches"] == 8


def test_a_trace_is_summed_up() -> None:
    stamps = [
        (0, "ubatch", 512, ""),
        (2000, "built", 0, ""),
        (3000, "realloc", 9, ""),
        (7000, "allocated", 0, ""),
        (7000, "begin", 1, "A"),
        (8000, "submitted", 1, ""),
        (17000, "end", 1, "A"),
        (17000, "begin", 2, "B"),
        (17000, "begin", 1, "A"),
        (22000, "end", 2, "B"),
        (27000, "end", 1, "A"),
        (28000, "ubatch", 512, ""),
        (28100, "reused", 0, ""),
        (29000, "ubatch", 512, ""),
        (31000, "drained", 0, ""),
        (31100, "reused", 0, ""),
    ]
    found = pipeline_trace.summary(stamps)
    assert found["busy_ms"] == {"A": 20.0, "B": 5.0}
    assert found["wall_ms"] == 20.0
    assert found["parallelism"] == 1.25
    assert (found["n_ubatches"], found["n_drains"]) == (3, 2)  # the first reuse waits for nobody
    assert found["host_ms"]["waiting for the devices"] == 2.0
    assert found["host_ms"]["taking the graph of before"] == pytest.approx(0.2)
    assert found["host_ms"]["building the graph"] == 2.0
    assert pipeline_trace.summary([])["parallelism"] == 0.0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["-b", "x"], "-b x: give positive numbers"),
        (["-b", "256", "-ub", "512"], "a ubatch is a part of a batch"),
        (["--env", "GGML_CUDA_P2P"], "give NAME=VALUE"),
        (["--warp", "9"], "--warp"),
        (["-m", "micro"], "give one model with -m"),
    ],
)
def test_nonsense_is_refused(words: list[str], message: str, tmp_path: Path, capsys: Any) -> None:
    assert run("-m", "micro", "--no-upstream", "--results", str(tmp_path / "r"), *words) == 1
    assert message in capsys.readouterr().err
    assert not (tmp_path / "r").exists()


def test_a_model_that_cannot_be_loaded(library: Library, tmp_path: Path, capsys: Any) -> None:
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"GGUF")
    assert run("-m", str(broken), "--no-upstream", "--results", str(tmp_path / "r")) == 1
    assert "broken.gguf" in capsys.readouterr().err
    assert not (tmp_path / "r").exists()
