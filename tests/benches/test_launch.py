"""How a bench with a bar ends: what is printed and kept, and its exit status."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benches import launch
from benches.errors import BenchError
from benches.sides import SideError


@pytest.mark.parametrize("passed", [True, False])
def test_the_status_says_whether_the_bar_was_met(
    passed: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "result.json"
    assert launch.close({"bench": "x", "passed": passed}, "a table", file) == (0 if passed else 1)
    assert capsys.readouterr().out == "a table\n"
    kept = json.loads(file.read_text())
    assert (kept["bench"], kept["passed"]) == ("x", passed)
    assert kept["record"]


def test_without_a_file_nothing_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert launch.close({"passed": True}, "", None) == 0
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("problem", "status"), [(KeyboardInterrupt(), 130), (SideError("it broke off"), 1)])
def test_what_ends_a_bench_early_is_a_sentence(
    problem: BaseException, status: int, capsys: pytest.CaptureFixture[str]
) -> None:
    def main() -> int:
        raise problem

    with pytest.raises(SystemExit) as ended:
        launch.run(main)
    assert ended.value.code == status
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_a_bug_keeps_its_traceback() -> None:
    def main() -> int:
        raise BenchError("not one of the expected")

    with pytest.raises(BenchError):
        launch.run(main)
