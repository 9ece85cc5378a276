"""CPU time in waits: what is run, kept and said."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from benches import idle_threads
from benches.program import run_module


def test_a_block_of_each_number_of_threads(micro_model: Path, tmp_path: Path, capsys: Any) -> None:
    words = ["-m", str(micro_model), "--threads", "1", "--steps", "3", "--blocks", "2", "--wait-ms", "1"]
    assert run_module(idle_threads, [*words, "--results", str(tmp_path)], "idle_threads") == 0
    (file,) = tmp_path.glob("*/*-idle-threads/result.json")
    (row,) = json.loads(file.read_text())["rows"]
    assert row["n_threads"] == 1
    assert len(row["cpu_ms"]) == 2 * 3, "the first steps of a block are not counted"
    assert "-t 1: " in capsys.readouterr().out


def test_what_a_thread_computes_in_a_wait_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """A wait that computes stands for a thread that does."""

    class Llama:
        def __getattr__(self, name: str) -> Any:
            return lambda *_: 0

    class Cell(dict[int, Any]):
        def __missing__(self, key: int) -> Any:
            return self.setdefault(key, Cell())

    class Batch:
        def __init__(self) -> None:
            self.token, self.pos, self.n_seq_id, self.seq_id, self.logits = (Cell() for _ in range(5))

    clock = iter(range(100))
    monkeypatch.setattr(time, "process_time", lambda: next(clock) / 1e3)
    monkeypatch.setattr(time, "sleep", lambda s: [next(clock) for _ in range(4)])
    steps: Any = idle_threads.Steps.__new__(idle_threads.Steps)
    steps._llama, steps._context, steps._batch = Llama(), None, Batch()
    assert steps.block(3, 0.012) == pytest.approx([5.0] * 3)


def test_the_table_has_median_and_range() -> None:
    row = {"n_threads": 2, **idle_threads.spread([1.0, *[8.0] * 8, 9.0])}
    assert (row["p50_ms"], row["p10_ms"]) == (8.0, 7.3)
    text = idle_threads.table({"wait_ms": 12.0, "rows": [row]})
    assert "-t 2: 8.0 ms (7.3 to 8.1" in text


@pytest.mark.parametrize("words", [["--wait-ms", "0"], ["--blocks", "0"], ["--steps", "9999"]])
def test_sizes_have_bounds(words: list[str], capsys: Any) -> None:
    assert run_module(idle_threads, words, "idle_threads") == 1
    assert "--wait-ms above 0" in capsys.readouterr().err
