"""The run on several GPUs, without any."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tarfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from llamamg_benches import grid_sides, groups, multi_gpu, multi_gpu_rows, record
from llamamg_benches.errors import BenchError
from llamamg_benches.multi_gpu_rows import FULL, TINY, Left, Row, Setting
from llamamg_benches.program import run_module

ROOT = Path(__file__).resolve().parents[2]


def setting(devices: tuple[str, ...] = ("CUDA0", "CUDA1"), tmp: Path = Path("x")) -> Setting:
    return Setting(Path("m.gguf"), ("-t", "1"), devices, FULL, tmp, "made so", 300.0)


def sides_of(row: Row) -> dict[str, grid_sides.Side]:
    texts = [row.argv[i + 1] for i, word in enumerate(row.argv) if word == "--side"]
    return {side.name: side for side in grid_sides.parse(texts, None)}


@pytest.fixture(params=[True, False], ids=["groups", "no groups"])
def has_plugin(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    monkeypatch.setattr(multi_gpu_rows, "has_plugin", lambda: request.param)
    return bool(request.param)


def test_the_grid_compares_upstream_and_groups(has_plugin: bool) -> None:
    row = multi_gpu_rows.grid(setting())
    sides = sides_of(row)
    assert list(sides) == ["upstream", "groups-off"] + ["groups-auto"] * has_plugin
    assert sides["upstream"].is_upstream
    assert row.argv[row.argv.index("--copy-from") + 1] == "50k"
    if has_plugin:
        assert sides["groups-off"].flags == ("--disable", "decode-groups")
        assert sides["groups-auto"].flags == ("--enable", "decode-groups")
        single = sides_of(multi_gpu_rows.grid(setting(devices=("CUDA0",))))
        assert single["groups-auto"].flags[-1] == "decode-groups.groups=2", "one device has no groups by itself"


def words_of(row: Row) -> dict[str, str]:
    """The options of `bench groups` in a row."""
    return {word: row.argv[i + 1] for i, word in enumerate(row.argv) if word.startswith("--")}


def test_groups_up_to_twice_the_cards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(multi_gpu_rows, "has_plugin", lambda: True)
    monkeypatch.setenv("GROUPS_ARGS", "--repeats 7 -ts auto")
    row = multi_gpu_rows.groups(setting())
    words = words_of(row)
    assert (words["--groups"], words["--depth"], words["--one"]) == ("1,2,3,4", "4k,20k", "CUDA0,CUDA1")
    assert words["--stages"] == "2"
    assert (words["--repeats"], words["--sessions"]) == ("7", "5")
    assert "--stock" in row.argv
    assert row.argv[row.argv.index("-ts") + 1] == "auto"
    four = words_of(multi_gpu_rows.groups(setting(("CUDA0", "CUDA1", "CUDA2", "CUDA3"))))
    assert (four["--groups"], four["--one"]) == ("1,2,3,4,5", "CUDA0,CUDA1"), "five sessions make five groups at most"
    assert "--one" not in multi_gpu_rows.groups(setting(())).argv
    remote = replace(setting(("RPC0", "RPC1")), flags=("--rpc", "a:1,b:1"))
    assert words_of(multi_gpu_rows.groups(remote))["--one"] == "RPC0"
    monkeypatch.setattr(multi_gpu_rows, "has_plugin", lambda: False)
    with pytest.raises(Left, match="decode-groups"):
        multi_gpu_rows.groups(setting())


def test_the_rows_options_are_those_of_the_bench(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(multi_gpu_rows, "has_plugin", lambda: True)
    parser = argparse.ArgumentParser()
    groups.add_arguments(parser)
    for make in (multi_gpu_rows.groups, multi_gpu_rows.p2p):
        row = make(setting())
        args, flags = parser.parse_known_args(row.argv[row.argv.index("groups") + 1 :])
        assert args.sessions == "5"
        assert args.stock
        assert flags == ["-m", "m.gguf", "-t", "1"]


def test_peer_copies_are_a_variable_of_everything_in_the_row(has_plugin: bool) -> None:
    if has_plugin:
        row = multi_gpu_rows.p2p(setting())
        assert dict(row.env) == {"GGML_CUDA_P2P": "1"}
        assert "--one" not in row.argv


def test_what_was_a_row_once_says_where_it_is_now() -> None:
    with pytest.raises(Left, match="the row groups"):
        multi_gpu_rows.ideal(setting())


def test_the_pipeline_has_its_own_bench(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PIPELINE_ARGS", raising=False)
    argv = multi_gpu_rows.pipeline(setting()).argv
    assert argv[argv.index("--env") + 1] == "GGML_CUDA_P2P=1"
    assert argv[argv.index("--tokens") + 1] == "16384"
    monkeypatch.setenv("PIPELINE_ARGS", "--tokens 9")
    argv = multi_gpu_rows.pipeline(setting(("RPC0",))).argv
    assert argv[argv.index("--tokens") + 1] == "9"
    assert "--env" not in argv
    monkeypatch.setattr(multi_gpu_rows.bench_cli, "available", lambda: ["grid"])
    with pytest.raises(Left, match="pipeline"):
        multi_gpu_rows.pipeline(setting())


def test_rows_are_named() -> None:
    assert multi_gpu_rows.parse("all") == list(multi_gpu_rows.ROWS)
    assert multi_gpu_rows.parse("soak,grid") == ["soak", "grid"]
    with pytest.raises(BenchError, match="mixd"):
        multi_gpu_rows.parse("mixd")
    for name, make in multi_gpu_rows.ROWS.items():
        if name not in ("groups", "p2p", "ideal", "pipeline", "check"):
            row = make(setting())
            assert row.name == name
            assert row.least_s < row.limit_s


@pytest.mark.parametrize(
    ("steps", "n_stages", "best"),
    [
        ({1: 1.0, 2: 1.0, 3: 1.0, 4: 1.0, 5: 1.0}, 2, (5.0, 1)),  # a batch costs nothing: one group is best
        ({1: 1.0, 2: 2.0, 3: 3.0, 4: 4.0, 5: 5.0}, 2, (2.0, 3)),  # no gain from batching: both stages always busy
        ({1: 1.0, 2: 1.2, 3: 1.3, 4: 1.4, 5: 1.5}, 1, (3.3, 1)),
        ({3: 1.4, 2: 1.2, 5: 2.0}, 2, (3.6, 2)),  # only what was measured
    ],
)
def test_the_ideal_of_groups(steps: dict[int, float], n_stages: int, best: tuple[float, int]) -> None:
    found = multi_gpu_rows.ideal_rate(steps, 5, n_stages)
    assert (found["tps"], found["n_groups"]) == best


def test_a_row_that_takes_too_long_ends_with_all_it_started(tmp_path: Path) -> None:
    script = (
        "import subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        "print('begun', child.pid, flush=True)\n"
        "time.sleep(600)\n"
    )
    begin = time.monotonic()
    status, output = multi_gpu.command([sys.executable, "-c", script], dict(os.environ), 2.0)
    assert status is None
    assert time.monotonic() - begin < 300  # not the ten minutes it would take
    pid = int(output.split()[1])
    for _ in range(100):  # its parent is gone: whoever adopts it needs a moment
        state = Path(f"/proc/{pid}/stat")
        if not state.exists() or state.read_text().rpartition(")")[2].split()[0] == "Z":
            break
        time.sleep(0.05)
    else:
        pytest.fail("the row's child still runs")


def test_rows_are_kept_at_once_and_not_done_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def make(name: str, text: str) -> Any:
        return lambda s: Row(name, (sys.executable, "-c", text, "--results", str(s.results)), 30)

    kept = (
        "import json, pathlib, sys\n"
        "f = pathlib.Path(sys.argv[2]) / 'box' / '2026-01-01-x'\n"
        "f.mkdir(parents=True)\n"
        "row = {'n_sessions': 1, 'depth': 64, 'side': 'a', 'prefill': {'tps': 3.0}, 'generate': {'tps': 2.0}}\n"
        "(f / 'grid.json').write_text(json.dumps({'rows': [row], 'left_out': []}))\n"
    )

    def left(_: Setting) -> Row:
        raise Left("not here")

    rows = {"one": make("one", kept), "two": make("two", "raise SystemExit('no')"), "three": left}
    monkeypatch.setattr(multi_gpu_rows, "ROWS", rows)
    monkeypatch.delenv("LLAMAMG_SURVEY", raising=False)
    words = [
        "--rows",
        "one,two,three",
        "--out",
        str(tmp_path / "out"),
        "--minutes",
        "2",
        "-m",
        str(tmp_path / "m.gguf"),
    ]
    assert run_module(multi_gpu, words, "multi-gpu") == 1
    entries = [json.loads(line) for line in (tmp_path / "out" / "rows.jsonl").read_text().splitlines()]
    assert [(entry["row"], entry["status"]) for entry in entries] == [
        ("one", "done"), ("two", "failed"), ("three", "left out"),
    ]  # fmt: skip
    assert entries[0]["summary"]["prefill and generation t/s"] == {"1x64": {"a": [3.0, 2.0]}}
    with tarfile.open(tmp_path / "out" / "results.tgz") as archive:
        names = archive.getnames()
    assert any(name.startswith("box/") and name.endswith("-multi-one/grid.json") for name in names)
    run_module(multi_gpu, words, "multi-gpu")
    again = [json.loads(line)["row"] for line in (tmp_path / "out" / "rows.jsonl").read_text().splitlines()]
    assert again == ["one", "two", "three", "two", "three"], "the finished row was left alone"
    words[5] = "0.1"
    (tmp_path / "out" / "rows.jsonl").unlink()
    run_module(multi_gpu, words, "multi-gpu")
    entry = json.loads((tmp_path / "out" / "rows.jsonl").read_text().splitlines()[0])
    assert entry["status"] == "left out"
    assert "were left" in entry["why"]


def test_doctor_goes_into_the_machine_record(
    micro_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("LLAMAMG_SURVEY", raising=False)
    assert "survey" not in record.machine()
    monkeypatch.setattr(multi_gpu_rows, "FULL", TINY)
    words = ["--rows", "doctor", "--tiny", "--out", str(tmp_path), "-m", str(micro_model), "-t", "1", "-c", "512"]
    assert run_module(multi_gpu, words, "multi-gpu") == 0
    survey = tmp_path / "results" / "devices.json"
    monkeypatch.setenv("LLAMAMG_SURVEY", str(survey))
    found = record.machine()["survey"]
    assert found["devices"][0]["read_gb_s"] > 0
    assert len(found["layers"]["decode"]["layers_ms"]) == 4
    survey.write_text("{}")
    with pytest.raises(record.ResultsError, match="doctor --devices --json"):
        record.machine()


@pytest.mark.parametrize("script", ["gpu_pack.sh", "gpu_run.sh", "multi_gpu.sh"])
def test_scripts_are_shell_and_say_how_they_are_called(script: str) -> None:
    path = ROOT / "benches" / script
    assert subprocess.run(["sh", "-n", path], check=False).returncode == 0
    if script != "gpu_pack.sh":
        done = subprocess.run(["sh", path], capture_output=True, text=True, check=False)
        assert done.returncode == 2
        assert "usage:" in done.stderr


@pytest.mark.parametrize(
    ("text", "name", "upstream", "env", "flags"),
    [
        ("g2:--a b", "g2", False, {}, ("--a", "b")),
        ("x:upstream A=1 B=c -t 1", "x", True, {"A": "1", "B": "c"}, ("-t", "1")),
        ("q:--o 'two words' C=1", "q", False, {}, ("--o", "two words", "C=1")),
        ("e:", "e", False, {}, ()),
    ],
)
def test_a_side_with_words_of_its_own(
    text: str, name: str, upstream: bool, env: dict[str, str], flags: tuple[str, ...]
) -> None:
    (side,) = grid_sides.parse([text], None)
    assert (side.name, side.is_upstream, dict(side.env), side.flags) == (name, upstream, env, flags)
    assert side.json(["-c", "1"])["flags"] == ["-c", "1", *flags]


def test_an_open_quote_is_said() -> None:
    with pytest.raises(BenchError, match="quotation"):
        grid_sides.parse(["x:'oops"], None)
