"""Ctrl-C while the program starts: it ends at once, says nothing, exit status 130."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

import benches
from llamamg.start import quiet_interrupt, restore

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


BENCHES = Path(benches.__file__).parent
PROGRAMS = sorted(path.stem for path in BENCHES.glob("*.py") if "__main__" in path.read_text(encoding="utf-8"))
LAUNCHED = ("alone(", "launch.run(main)", "serve(main)", "started()")


@pytest.mark.parametrize("module", ["llamamg_first", "argparse", "numpy", "tqdm"])
@pytest.mark.parametrize("name", ["overhead", "gate", "handover"])
def test_imports_of_a_bench(name: str, module: str) -> None:
    """As Python runs `-m`: while it looks for the module, argv[0] is that."""
    wanted = {"llamamg_first": f"benches.{name}"}.get(module, module)
    program = f"import runpy; sys.argv[0] = '-m'; runpy._run_module_as_main('benches.{name}')"
    done = press(wanted, program, "--help")
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


@pytest.mark.parametrize("name", PROGRAMS)
def test_each_bench_handles_it_itself_once_it_begins(name: str) -> None:
    main = (BENCHES / f"{name}.py").read_text(encoding="utf-8").rpartition('if __name__ == "__main__":')[2]
    assert any(word in main for word in LAUNCHED), "while it runs Ctrl-C would end it with nothing put in order"


def test_a_bench_that_begins_has_its_exception_back() -> None:
    code = (
        "import sys; sys.argv = ['-m']; import benches, os, signal; benches.started()\n"
        "try: os.kill(os.getpid(), signal.SIGINT)\nexcept KeyboardInterrupt: sys.exit(7)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 7


def test_a_program_that_only_imports_benches_keeps_its_handler() -> None:
    code = "import benches, signal, sys; sys.exit(signal.getsignal(signal.SIGINT) is not signal.default_int_handler)"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0


def test_another_thread_than_the_main_one_leaves_signals_alone() -> None:
    errors: list[BaseException] = []

    def inside() -> None:
        try:
            with quiet_interrupt():
                restore()
        except ValueError as error:
            errors.append(error)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        thread = threading.Thread(target=inside)
        thread.start()
        thread.join()
        assert not errors
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)


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
