"""The program as a user starts it: exit status, stderr, help, docs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from llamamg.config import Config, ModelConfig
from llamamg.library import Library
from llamamg.options import command, docs
from llamamg.options.describe import help_text
from llamamg.options.option import OptionError
from llamamg.options.table import Table


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "llamamg", *arguments], capture_output=True, text=True, timeout=60, check=False
    )


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["serve"], "no model"),
        (["serve", "-m", "none.gguf"], "there is no model at none.gguf"),
        (["serve", "-m", __file__], "is not a GGUF file"),
        (["serve", "-m", "x.gguf", "--ctx-sise", "5"], "did you mean --ctx-size?"),
        (["serve", "-m", "x.gguf", "--lora", "a"], "--lora is not supported"),
        (["serve", "-m", "x.gguf", "--plugin-option", "mine.x=1"], "needs the plugin mine"),
        (["serve", "-m", "x.gguf", "--port", "99999"], "at most 65535"),
        (["serve", "-m", "x.gguf", "--enable", "seq-compat"], "there is no plugin named 'seq-compat'"),
        (["serve", "-m", "x.gguf", "--enable", "seq-compact", "--disable", "seq-compact"], "both enabled and disabled"),
        (["sreve"], "did you mean serve?"),
    ],
)
def test_errors_exit_with_one_sentence(arguments: list[str], words: str) -> None:
    done = run(*arguments)
    assert done.returncode == 1
    assert done.stdout == ""
    assert words in done.stderr
    assert "Traceback" not in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
    assert done.stderr.startswith("llamamg: error: ")


def test_missing_plugin_is_a_remark_when_asked(tmp_path: Path) -> None:
    done = run("serve", "-m", str(tmp_path / "x.gguf"), "--plugin-option", "mine.x=1", "--ignore-missing-plugins")
    assert "there is no model" in done.stderr  # got past the plugin


def test_help_lists_every_option(table: Table) -> None:
    text = help_text(table, 100)
    for option in table:
        for name in (*option.names, *option.negatives):
            assert name in text
        if not option.names:
            assert option.env in text
    assert max(len(line) for line in text.splitlines() if not line.startswith("  -")) <= 120
    done = run("serve", "--help")
    assert done.returncode == 0
    assert "--override-tensor" in done.stdout


def test_overview_names_every_command() -> None:
    done = run("--help")
    assert done.returncode == 0
    assert all(name in done.stdout for name in ("serve", "plugins", "doctor", "build", "synth", "patches"))


def test_overview_loads_nothing_of_the_server() -> None:
    code = "import sys, llamamg.cli; llamamg.cli.main(['--help']); print({'starlette', 'llama_cpp', 'cffi'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip().endswith("set()")


def test_docs_are_fresh() -> None:
    assert docs.PATH.read_text(encoding="utf-8") == docs.text(), "run `python -m llamamg.options.docs`"


def test_json_schema_becomes_the_grammar(library: Library) -> None:
    config = Config(ModelConfig(Path("x.gguf")))
    schema = '{"type": "object", "properties": {"answer": {"type": "integer"}}, "required": ["answer"]}'
    grammar = command.with_grammar(config, schema).generation.sampling.grammar
    assert "root ::=" in grammar
    assert "answer" in grammar
    assert "root ::= object" in command.with_grammar(config, "{}").generation.sampling.grammar
    with pytest.raises(OptionError, match="cannot be turned into a grammar"):
        command.with_grammar(config, '{"$ref": "#/nowhere"}')
