"""`llamamg bench ab` and `ablation` on a real small model."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benches import ab, ablation, rpc_servers
from benches.judge import ACTED, NO_EFFECT, NOT_APPLICABLE
from benches.program import run_module
from llamamg import paths
from llamamg.library import Library
from llamamg.plugins import Found, discover
from llamamg.plugins import testing as kit

ALWAYS = ("--seq-compact-always", "on")  # whatever is faster on this machine
SMALL = ["-t", "1", "--pairs", "3", "--depth", "16", "--tokens", "4", "--prompt", "600", "--no-warmup"]


@pytest.fixture
def model(synth_model: Callable[..., Path]) -> Path:
    """Not quantized: in `mixed`, times decide how the prompt is cut, and rounding may not decide what follows."""
    return synth_model(weights="f32")


@pytest.fixture
def bench(model: Path, library: object, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Any:
    """`bench(module, *arguments)`: exit status, what was kept (None: nothing), stderr."""

    def run(module: Any, *arguments: str) -> tuple[int, dict[str, Any] | None, str]:
        root = tmp_path / "results"
        status = run_module(module, ["-m", str(model), "--results", str(root), *SMALL, *arguments], "bench")
        kept = sorted(root.glob("*/*/result.json"))
        assert not list(root.glob("*/.unfinished*"))
        assert bool(kept) == bool(list(root.glob("*/*"))), "half a result"
        out = capsys.readouterr()
        if kept:
            stored = json.loads(kept[0].read_text())
            assert kept[0].with_name("table.txt").read_text() == module.table(stored) + "\n" == out.out
            return status, stored, out.err
        return status, None, out.err

    return run


def test_a_plugin_that_acts_gets_its_numbers(bench: Any, model: Path) -> None:
    status, result, _ = bench(ab, "--plugin", "seq-compact", "--load", "five", *ALWAYS)
    assert status == 0
    row = result["rows"][0]
    assert row["status"] == ACTED
    assert row["effect"] >= 3, "one move in each block with the plugin on"
    assert set(row["metrics"]) == {"decode_tps", "itl_p99_ms", "itl_max_ms"}
    assert all(len(m["on"]) == len(m["off"]) == 3 for m in row["metrics"].values())
    assert row["tokens"]["on"]["n_changed"] == 0
    assert result["record"]["models"][0]["bytes"] == model.stat().st_size
    assert result["record"]["build"], "which libraries"
    assert str(model) not in json.dumps(result), "no paths in what is published"


def test_a_plugin_without_effect_is_an_error(bench: Any) -> None:
    status, result, _ = bench(ab, "--plugin", "seq-compact", "--load", "solo", "-np", "2")
    assert status == 1
    assert result["rows"][0]["status"] == NO_EFFECT


def test_a_plugin_that_does_not_apply_says_why(bench: Any) -> None:
    status, result, _ = bench(ab, "--plugin", "seq-compact", "--load", "solo")
    assert status == 0
    assert result["rows"][0]["status"] == NOT_APPLICABLE
    assert "there is one slot" in ab.table(result)


def test_two_processes(bench: Any) -> None:
    status, result, _ = bench(ab, "--plugin", "seq-compact", "--load", "five", "--restart", *ALWAYS)
    assert (status, result["rows"][0]["how"]) == (0, "two processes")
    assert result["rows"][0]["effect"] >= 3


def test_two_processes_say_when_a_plugin_does_not_apply(bench: Any) -> None:
    status, result, _ = bench(ab, "--plugin", "seq-compact", "--load", "solo", "--restart")
    assert (status, result["rows"][0]["status"]) == (0, NOT_APPLICABLE)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--plugin", "seq-compcat", "--load", "five"], "there is no plugin named 'seq-compcat'"),
        (["--plugin", "seq-compact", "--load", "five", "-c", "1280", "--depth", "400"], "use -c "),
        (["--plugin", "seq-compact", "--load", "five", "-np", "3"], "use -np 5"),
        (["--plugin", "seq-compact", "--load", "five", "--pairs", "2"], "--pairs 2 is too few"),
        (["--plugin", "seq-compact", "--load", "five", "--depth", "0"], "--depth must be at least 8"),
        (["--plugin", "seq-compact", "--load", "five", "--no-such-flag"], "no-such-flag"),
        (["--plugin", "seq-compact", "--load", "five", "-m", "another.gguf"], "give one model"),
    ],
)
def test_bad_input_is_one_sentence_and_keeps_nothing(bench: Any, arguments: list[str], sentence: str) -> None:
    status, result, said = bench(ab, *arguments)
    assert (status, result) == (1, None)
    assert sentence in said
    assert "Traceback" not in said


def test_a_results_folder_that_cannot_be_written_is_said_first(bench: Any, tmp_path: Path) -> None:
    (tmp_path / "results").write_text("a file")
    began = time.monotonic()
    status, result, said = bench(ab, "--plugin", "seq-compact", "--load", "five")
    assert (status, result) == (1, None)
    assert "results cannot be written" in said
    assert "loading" not in said, f"it measured for {time.monotonic() - began:.1f} s first"


def test_a_plugin_that_needs_a_restart_is_told_how(bench: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    cls = kit.declared("fixed", toggle="restart")
    found = {**discover(), "fixed": Found("fixed", False, "a test", cls, cls.declaration)}
    monkeypatch.setattr(ab, "discover", lambda: found)
    status, result, said = bench(ab, "--plugin", "fixed", "--load", "five")
    assert (status, result) == (1, None)
    assert "fixed can only be switched at the start of a server: add --restart" in said


@pytest.mark.skipif(os.name != "posix", reason="signals")
@pytest.mark.parametrize("how", [(), ("--restart",)])
def test_ctrl_c_keeps_nothing(model: Path, tmp_path: Path, how: tuple[str, ...]) -> None:
    root = tmp_path / "results"
    words = ["--plugin", "seq-compact", "--load", "five", "--results", str(root), *SMALL, "--pairs", "3000", *how]
    child = subprocess.Popen(
        [sys.executable, "-m", "benches.ab", "-m", str(model), *words],
        cwd=paths.checkout(),
        stderr=subprocess.PIPE,
    )
    deadline = time.monotonic() + 60
    while not list(root.glob("*/.unfinished*")) and time.monotonic() < deadline:
        time.sleep(0.05)
    time.sleep(2.0)  # somewhere in the loading or in the measurement
    child.send_signal(signal.SIGINT)
    _, said = child.communicate(timeout=60)
    assert child.returncode == 130
    assert b"interrupted" in said
    assert b"Traceback" not in said
    assert not list(root.glob("*/*"))
    assert not list(root.glob("*/.unfinished*"))


def test_every_shipped_plugin_acts_somewhere(bench: Any) -> None:
    status, result, _ = bench(ablation, *ALWAYS)
    assert status == 0, ablation.table(result)
    shipped = [name for name, entry in discover().items() if entry.shipped]
    assert sorted(result["plugins"]) == sorted(discover())
    for name in shipped:
        assert result["plugins"][name]["acted"] or "not applicable" in result["plugins"][name]["says"], name
    bars = ablation.plot(result)["bars"]
    assert {bar["plugin"] for bar in bars} == {name for name in shipped if result["plugins"][name]["acted"]}
    assert all(bar["interval"][0] <= bar["change_percent"] <= bar["interval"][1] for bar in bars)


def test_a_load_that_does_not_fit_is_said_before_another_one_is_measured(
    bench: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ablation, "judge", lambda *_, **__: pytest.fail("it measured"))
    status, result, said = bench(ablation, "--load", "five", "--load", "mixed", "--plugin", "seq-compact", "-c", "1280")
    assert (status, result) == (1, None)
    assert "load mixed needs 1224 tokens in each slot and a slot has 256" in said


def test_what_needs_two_devices_acts_over_rpc_servers(model: Path, library: Library, tmp_path: Path) -> None:
    """The default run, of one load and with one small model. In a process of its own, which keeps the devices."""
    if not library.patched or rpc_servers.program() is None:
        pytest.skip("it takes a patched build and an rpc-server: run `llamamg build --upstream --server`")
    script = (
        "import sys; from pathlib import Path; from benches import ablation, program; "
        "ablation.DEFAULT_MODELS = (sys.argv.pop(1),); sys.exit(program.alone(ablation))"
    )
    words = [
        *SMALL,
        "--load",
        "mixed",
        "--plugin",
        "prefill-pipeline",
        "--plugin",
        "decode-groups",
        "--results",
        str(tmp_path),
    ]
    command = [sys.executable, "-c", script, str(model), *words]
    done = subprocess.run(command, cwd=paths.checkout(), capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    [file] = tmp_path.glob("*/*/result.json")
    plugins = json.loads(file.read_text())["plugins"]
    for name in ("prefill-pipeline", "decode-groups"):
        assert plugins[name]["acted"] == [f"mixed on {model.name} on two rpc-servers"], plugins


def test_a_plugin_that_acts_nowhere_fails_the_ablation(bench: Any) -> None:
    status, result, _ = bench(ablation, "--plugin", "seq-compact", "--load", "mixed")
    assert status == 1
    assert "no effect" in result["plugins"]["seq-compact"]["says"]


def test_a_plugin_that_is_off_is_switched_on(bench: Any) -> None:
    _, result, _ = bench(ablation, "--plugin", "seq-compact", "--load", "five", "--disable", "seq-compact")
    assert result["rows"][0]["mode"] == "one on"
    assert result["rows"][0]["status"] == ACTED


def test_a_plugin_outside_only_is_switched_on(bench: Any) -> None:
    _, result, _ = bench(ablation, "--load", "five", "--enable", "only:prefill-gate")
    modes = {row["plugin"]: row["mode"] for row in result["rows"]}
    assert (modes["prefill-gate"], modes["seq-compact"]) == ("one off", "one on")
