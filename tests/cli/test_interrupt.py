"""Ctrl-C while the program starts: it ends at once, says nothing, exit status 130."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from llamamg.start import quiet_interrupt

# Sends the process what Ctrl-C sends, at the moment when Python is about to import the module named.
PRESS = """
import os, signal, sys

class Press:
    def find_spec(self, name, path=None, target=None):
        if name == {module!r}:
            os.kill(os.getpid(), {number})

sys.meta_path.insert(0, Press())
sys.argv = ["llamamg", *{arguments!r}]
"""
INSTALLED = "from llamamg.start import main; sys.exit(main())"  # what pip writes
MODULE = "import runpy; runpy.run_module('llamamg', run_name='__main__', alter_sys=True)"


def press(module: str, program: str, *arguments: str, background: bool = False) -> subprocess.CompletedProcess[str]:
    """Run `program`, with a Ctrl-C as `module` is imported."""
    code = PRESS.format(module=module, number=int(signal.SIGINT), arguments=arguments) + program
    ignored = (lambda: signal.signal(signal.SIGINT, signal.SIG_IGN)) if background else None
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False, preexec_fn=ignored
    )


@pytest.mark.parametrize("program", [INSTALLED, MODULE], ids=["llamamg", "python -m llamamg"])
@pytest.mark.parametrize(
    "module",
    ["llamamg.cli", "argparse", "llamamg.options.command", "llamamg.api", "numpy", "llamamg_plugins.qsa"],
)
def test_nothing_is_said(module: str, program: str) -> None:
    done = press(module, program, "serve", "-m", "none.gguf")
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


def test_imports_of_the_server(micro_model: Path) -> None:
    done = press("uvicorn", INSTALLED, "serve", "-m", str(micro_model))
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


def test_other_commands() -> None:
    done = press("llamamg.plugin_cli", INSTALLED, "plugins")
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


def test_a_job_in_the_background_goes_on() -> None:
    done = press("llamamg.cli", INSTALLED, "--version", background=True)
    assert done.returncode == 0
    assert done.stdout.startswith("llamamg ")


def test_the_handler_is_put_back() -> None:
    def fails() -> None:
        with quiet_interrupt():
            assert signal.getsignal(signal.SIGINT) is not signal.default_int_handler
            raise KeyError

    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyError):
            fails()
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_handler_of_somebody_else_stays() -> None:
    def theirs(*_: object) -> None: ...

    before = signal.signal(signal.SIGINT, theirs)
    try:
        with quiet_interrupt():
            assert signal.getsignal(signal.SIGINT) is theirs
    finally:
        signal.signal(signal.SIGINT, before)
