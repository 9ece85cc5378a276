"""The grid as a command: its errors, and once against real servers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from llamamg_benches import grid, grid_run, grid_table
from llamamg_benches.program import run_module

from llamamg import paths


def command(*arguments: str) -> int:
    return run_module(grid, list(arguments), "llamamg bench grid")


def test_an_unreachable_server_is_a_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from llamamg_benches.record import free_port

    status = command("--side", f"x=http://127.0.0.1:{free_port()}", "--depths", "64", "--results", str(tmp_path))
    assert status == 1
    assert "is the server running there?" in capsys.readouterr().err
    assert list(tmp_path.glob("*/*")) == []  # nothing half-written


def test_a_missing_model_is_a_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command("--side", "off", "-m", str(tmp_path / "no.gguf"), "--results", str(tmp_path)) == 1
    assert "give a model with -m" in capsys.readouterr().err


def test_ctrl_c_keeps_what_was_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, micro_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    measured, real = [], grid_run.measure

    def measure(server: Any, cell: Any, *more: Any) -> Any:
        if len(measured) == 2:
            raise KeyboardInterrupt
        measured.append((cell.n_sessions, cell.depth))
        return real(server, cell, *more)

    monkeypatch.setattr(grid_run, "measure", measure)
    status = command(
        "--side", "off", "-m", str(micro_model), "--slots", "1,2", "--depths", "70,200", "--repeats", "1",
        "--n-predict", "150", "--results", str(tmp_path), "-t", "1", "-b", "256", "-ub", "64",
    )  # fmt: skip
    assert status == 130
    assert "what was measured is kept in" in capsys.readouterr().err
    [folder] = tmp_path.glob("*/*")
    result = json.loads((folder / "grid.json").read_text())
    assert [(row["n_sessions"], row["depth"]) for row in result["rows"]] == measured == [(1, 70), (2, 70)]
    left_out = [(left["n_sessions"], left["depth"], left["side"], left["reason"]) for left in result["left_out"]]
    assert left_out == [(1, 200, "off", "interrupted"), (2, 200, "off", "interrupted")]
    assert "left out: 2 x 200" in (folder / "table.md").read_text()


def test_ctrl_c_before_anything_is_measured_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, micro_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(grid, "one_by_one", interrupted)
    assert command("--side", "off", "-m", str(micro_model), "--results", str(tmp_path)) == 130
    assert list(tmp_path.glob("*/*")) == []
    assert "interrupted" in capsys.readouterr().err


@pytest.mark.parametrize(
    "side", ["off", "upstream", "groups:--enable decode-groups --plugin-option decode-groups.groups=2"]
)
def test_sessions_are_copies_of_one(
    tmp_path: Path, micro_model: Path, capsys: pytest.CaptureFixture[str], side: str
) -> None:
    if side == "upstream" and not (paths.build("upstream") / "bin" / "llama-server").is_file():
        pytest.skip("there is no llama-server: run `llamamg build --upstream --server`")
    status = command(
        "--side", side, "-m", str(micro_model), "--slots", "1,3", "--depths", "70,200", "--repeats", "1", "--copy-from", "200",
        "--n-predict", "150", "--results", str(tmp_path), "-t", "1", "-b", "256", "-ub", "64",
    )  # fmt: skip
    assert status == 0, capsys.readouterr().err
    [folder] = tmp_path.glob("*/*")
    result = json.loads((folder / "grid.json").read_text())
    rows = {(row["n_sessions"], row["depth"]): row for row in result["rows"]}
    assert {cell: row["prefill"] is None for cell, row in rows.items()} == {
        (1, 70): False, (1, 200): False, (3, 70): False, (3, 200): True,
    }  # fmt: skip
    copied = rows[3, 200]["generate"]
    assert copied["n_recomputed"] == 0  # the file held all of it, recurrent layers included
    assert copied["n_tokens"] > 150  # of more than one session
    assert "| 3 | 200 |  |" in (folder / "table.md").read_text()


def test_copies_need_somebody_to_copy(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command("--side", "off", "--slots", "2,3", "--copy-from", "200", "--results", str(tmp_path)) == 1
    assert "give --slots from 1 on" in capsys.readouterr().err


def test_one_side_of_a_real_grid(tmp_path: Path, micro_model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Our own server on the synthetic hybrid: rows, files and no path of this machine."""
    flags = ("-t", "1", "-b", "256", "-ub", "64")
    status = command(
        "--side", "off", "-m", str(micro_model), "--slots", "1,2", "--depths", "70,200", "--repeats", "1",
        "--n-predict", "150", "--results", str(tmp_path), *flags,
    )  # fmt: skip
    assert status == 0, capsys.readouterr().err
    [folder] = tmp_path.glob("*/*")
    result = json.loads((folder / "grid.json").read_text())
    assert [(r["n_sessions"], r["depth"]) for r in result["rows"]] == [(1, 70), (2, 70), (1, 200), (2, 200)]
    for row in result["rows"]:
        assert row["prefill"]["n_prompt"] == [row["depth"]] * row["n_sessions"]
        assert row["generate"]["n_recomputed"] == 0  # what the slots held was used, recurrent layers included
        assert 1 <= row["generate"]["n_tokens"] < 150 * row["n_sessions"]
        assert row["generate_watch"]["host_rss_mib"] > 0
    assert result["left_out"] == []
    assert result["record"]["model"]["sha256"]
    assert str(tmp_path) not in (folder / "grid.json").read_text()
    assert str(micro_model.parent) not in "".join(p.read_text() for p in folder.iterdir() if p.suffix != ".svg")
    assert (folder / "table.md").read_text().rstrip() == grid_table.markdown(result)
    assert (folder / "off-ub64.log").is_file()
