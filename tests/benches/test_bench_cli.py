"""`llamamg bench`: the list, names, help, and flags that go through to `llamamg serve`."""

from __future__ import annotations

import argparse
import re
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benches.errors import BenchError
from benches.flags import config_of, take_models, with_plugin
from benches.program import run_module
from llamamg import bench_cli, cli


def test_it_lists_every_benchmark_it_has(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench"]) == 1, "nothing was measured"
    listed = capsys.readouterr().out
    assert {"ab", "ablation", "mixed", "aa"} <= set(bench_cli.available())
    for name in bench_cli.available():
        module = import_module(f"llamamg_benches.{name}")
        assert module.HELP in listed
        dashed = name.replace("_", "-")
        assert dashed == module.NAME


def test_no_benchmark_was_forgotten() -> None:
    """One that has all a benchmark has is in the list."""
    folder = Path(import_module("llamamg_benches").__path__[0])
    texts = {path.stem: path.read_text(encoding="utf-8") for path in folder.glob("*.py")}
    whole = {name for name, text in texts.items() if re.search(r"^NAME = ", text, re.M) and "\nHELP = " in text}
    whole.remove("multi_gpu")  # runs the others
    assert whole == set(bench_cli.available())


def test_a_wrong_name_is_corrected(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", "ablatoin"]) == 1
    assert "did you mean ablation?" in capsys.readouterr().err


@pytest.mark.parametrize("word", ["-h", "--help"])
@pytest.mark.parametrize("name", ["ab", "ablation", "mixed", "aa"])
def test_every_option_has_help(name: str, word: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        cli.main(["bench", name, word])
    assert left.value.code == 0
    assert "--results" in capsys.readouterr().out
    parser = argparse.ArgumentParser()
    import_module(f"llamamg_benches.{name}").add_arguments(parser)
    assert [action.dest for action in parser._actions if not action.help] == []


def _module(run: Any, **more: Any) -> Any:
    return SimpleNamespace(
        __doc__="A test.", add_arguments=lambda parser: parser.add_argument("--own"), run=run, **more
    )


def test_what_is_not_its_own_goes_to_the_server() -> None:
    seen: list[Any] = []
    words = ["-hf", "a/b", "--own", "1", "-mg", "0", "-ot", "x=CPU", "-c", "-1", "--model=m"]
    assert run_module(_module(seen.append, SERVE_FLAGS=True), words, "p") == 0
    assert seen[0].own == "1"
    assert seen[0].flags == ["-hf", "a/b", "-mg", "0", "-ot", "x=CPU", "-c", "-1", "--model=m"]


def test_a_bug_keeps_its_traceback_and_a_sentence_does_not(capsys: pytest.CaptureFixture[str]) -> None:
    def bug(args: Any) -> int:
        raise KeyError("x")

    def sentence(args: Any) -> int:
        raise BenchError("do this instead")

    with pytest.raises(KeyError):
        run_module(_module(bug), [], "p")
    assert run_module(_module(sentence), [], "p") == 1
    assert capsys.readouterr().err == "p: error: do this instead\n"


def test_models_are_taken_out_of_the_flags(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LLAMA_ARG_MODEL", raising=False)
    assert take_models(["-m", "a", "-t", "1", "--model=b", "--model", "c"]) == (["a", "b", "c"], ["-t", "1"])
    assert take_models(["-t", "1"]) == ([], ["-t", "1"])
    monkeypatch.setenv("LLAMA_ARG_MODEL", "d")
    assert take_models(["-t", "1"]) == (["d"], ["-t", "1"])
    with pytest.raises(BenchError, match="-m needs a model file"):
        take_models(["-m"])


@pytest.mark.parametrize(
    ("given", "on", "off"),
    [
        ([], {"seq-compact", "prefill-gate"}, {"prefill-gate"}),
        (["--enable", "none"], {"seq-compact"}, set()),
        (["--enable", "only:prefill-gate"], {"seq-compact", "prefill-gate"}, {"prefill-gate"}),
        (["--enable", "only:seq-compact"], {"seq-compact"}, set()),
        (["--disable", "seq-compact"], {"seq-compact", "prefill-gate"}, {"prefill-gate"}),
    ],
)
def test_both_sides_of_a_start_differ_in_one_plugin(
    micro_model: Any, given: list[str], on: set[str], off: set[str]
) -> None:
    from llamamg.plugins import PluginSet

    config = config_of(["-m", str(micro_model), "-np", "4", "--no-kv-unified", *given])
    for enabled, expected in ((True, on), (False, off)):
        made = with_plugin(config, "seq-compact", enabled)
        plugins = PluginSet.discover(made.plugins)
        plugins.configure(made, [])
        assert set(plugins.enabled()) & {"seq-compact", "prefill-gate"} == expected
