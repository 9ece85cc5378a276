"""Every command that README and docs/ print can be given as it stands: the program is there, and has these options."""

from __future__ import annotations

import contextlib
import io
import re
import runpy
import sys
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

from llamamg import cli

ROOT = Path(__file__).resolve().parents[2]
PAGES = ["README.md", *(str(page.relative_to(ROOT)) for page in sorted((ROOT / "docs").rglob("*.md")))]
FLAG = re.compile(r"(?<![\w-])--?[a-zA-Z][\w-]*")
COMMAND = re.compile(
    r"(?:[A-Z_]+=\S+ )*(?:\.venv/bin/)?(?:(?P<program>llamamg)|python3? -m (?P<module>[\w.]+))(?P<rest>( .*)?)$"
)
STANDS_FOR_ONE = {"NAME", "COMMAND", "benches.NAME"}
OF_A_PACKAGE_IN_THE_TEXT = {"--itl-target-target-ms"}  # docs/write-a-plugin.md writes it


class Command(NamedTuple):
    """A program, and the options it is given."""

    program: tuple[str, ...]
    flags: frozenset[str]


def commands(text: str) -> dict[Command, str]:
    """What a page prints, in lines of code and between backticks."""
    text = re.sub(r"\\\n\s*", " ", text)
    lines = [line for block in re.findall(r"```\w*\n(.*?)```", text, re.S) for line in block.splitlines()]
    found: dict[Command, str] = {}
    for line in [*re.findall(r"`([^`\n]+)`", text), *lines]:
        match = COMMAND.match(re.split(r" #|   ", line)[0].strip())
        if match is None:
            continue
        words = match["rest"].split()
        program = (match["module"],) if match["module"] else tuple(words[: 1 + (words[:1] == ["bench"])])
        if program and not STANDS_FOR_ONE & set(program) and program[0][0].isalpha():
            found[Command(program, frozenset(FLAG.findall(match["rest"])))] = line
    return found


@cache
def options(program: tuple[str, ...]) -> frozenset[str]:
    """What the program's help names. Fails where there is no such program."""
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said), pytest.MonkeyPatch.context() as patch:
        try:
            if "." in program[0]:
                patch.setattr(sys, "argv", [program[0], "--help"])
                patch.delitem(sys.modules, program[0], raising=False)  # runpy warns of what was imported before
                runpy.run_module(program[0], run_name="__main__", alter_sys=True)
                status: object = 0
            else:
                status = cli.main([*program, "--help"])
        except SystemExit as end:
            status = end.code
    assert not status, f"{' '.join(program)} --help ended with {status}: {said.getvalue()[-300:]}"
    return frozenset(FLAG.findall(said.getvalue()))


@pytest.mark.parametrize("page", PAGES)
def test_commands_have_their_options(page: str) -> None:
    for command, line in commands((ROOT / page).read_text(encoding="utf-8")).items():
        known = options(command.program) | OF_A_PACKAGE_IN_THE_TEXT
        if command.program[0] == "bench" or command.program[0].startswith("benches.") or " -- " in line:
            known |= options(("serve",))  # what is not its own goes to the server
        missing = command.flags - known
        assert not missing, f"{page}: {line}"


def test_commands_are_found() -> None:
    text = (
        "`llamamg bench ab --plugin x` and `llamamg` and `llamamg bench NAME`\n```sh\nA=1 llamamg serve -m x  # -no\n"
    )
    text += "python -m benches.grid \\\n  --slots 1\n```\n"
    assert set(commands(text)) == {
        Command(("bench", "ab"), frozenset({"--plugin"})),
        Command(("serve",), frozenset({"-m"})),
        Command(("benches.grid",), frozenset({"--slots"})),
    }
    assert sum(len(commands((ROOT / page).read_text(encoding="utf-8"))) for page in PAGES) > 60


def test_a_command_that_is_not_there_is_noticed() -> None:
    with pytest.raises(AssertionError, match="there is no benchmark"):
        options(("bench", "nothing"))
    assert "--side" in options(("bench", "grid"))
