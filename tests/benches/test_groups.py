"""bench groups: what is compared with what, bad input, and a run over two rpc-servers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benches import groups, program
from llamamg import paths
from llamamg.library import Library


def row(n_groups: int, n_sessions: int, tps: float, threads: int | None = None) -> dict[str, Any]:
    return {"rpc_threads": threads, "n_groups": n_groups, "n_sessions": n_sessions, "tps": tps, "runs": [tps]}


def test_groups_are_compared_with_the_best_single_context() -> None:
    rows = [row(1, 2, 100.0, 1), row(1, 2, 80.0, 2), row(2, 2, 130.0, 1), row(3, 2, 90.0, 1)]
    (best,) = groups._best(rows, 0)
    assert best == {"n_sessions": 2, "one": 100.0, "several": 130.0, "n_groups": 2, "ratio": 1.3}
    text = groups.table({"rows": [{**r, "overlaps": 1} for r in rows], "best": [best]})
    assert "2 groups are 1.30x of the best single context" in text


def test_what_is_possible_comes_from_the_times_of_one_context() -> None:
    # a step of b sessions takes b seconds: two stages and two groups could do twice as much
    rows = [row(1, b, 1.0) for b in (1, 2)] + [row(2, 2, 1.8)]
    assert groups._best(rows, 2)[1]["ideal"] == {"tps": 2.0, "n_groups": 2}
    assert "ideal" not in groups._best(rows[1:], 2)[0]  # one time is missing


def run(capsys: Any, *arguments: str) -> tuple[int, str, str]:
    code = program.run_module(groups, arguments, "llamamg bench groups")
    out = capsys.readouterr()
    return code, out.out, out.err


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("--sessions", "x"), "--sessions x"),
        (("--tokens", "1"), "--tokens must be at least 16"),
        (("--rpc-servers", "2", "--rpc-program", "nowhere"), "llamamg build --upstream --server"),
        (("-m", "nowhere.gguf"), "nowhere.gguf"),
    ],
)
def test_bad_input(tmp_path: Path, micro_model: Path, capsys: Any, arguments: tuple[str, ...], sentence: str) -> None:
    model = () if "-m" in arguments else ("-m", str(micro_model))
    code, _, err = run(capsys, *model, *arguments, "--results", str(tmp_path / "r"))
    assert (code, sentence in err) == (1, True), err
    assert not list(tmp_path.glob("r/*/*"))


def test_over_two_rpc_servers(library: Library, micro_model: Path, tmp_path: Path, capsys: Any) -> None:
    if not (paths.build("upstream") / "bin" / "ggml-rpc-server").is_file():
        pytest.skip("there is no rpc-server: run `llamamg build --upstream --server`")
    code, out, err = run(
        capsys, "-m", str(micro_model), "--rpc-servers", "2", "--rpc-threads", "1", "--tokens", "16", "--repeats", "1",
        "-t", "1", "--no-warmup", "--stages", "2", "--sessions", "1,2", "--results", str(tmp_path / "r"),
    )  # fmt: skip
    assert code == 0, err
    (file,) = tmp_path.glob("r/*/*/result.json")
    result = json.loads(file.read_text())
    assert [(r["n_groups"], r["n_sessions"]) for r in result["rows"]] == [(1, 1), (1, 2), (2, 1), (2, 2)]
    assert all(r["tps"] > 0 for r in result["rows"])
    assert [r["overlaps"] > 0 for r in result["rows"]] == [False, False, False, True]
    assert "ideal" in result["best"][1]
    assert out == groups.table(result) + "\n"
