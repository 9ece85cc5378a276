"""Run CMake and Ninja with a readable progress display, the whole output in a log file, and a useful end on failure."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

from llamamg import paths
from llamamg.native import toolchain
from llamamg.native.sdist import SetupError

N_TAIL = 30
REPORT_EVERY_S = 20.0
_STATUS = re.compile(r"^\[(\d+)/(\d+)\] (.*)$")


def environment() -> dict[str, str]:
    """Keep git from taking our repository for llama.cpp's, and let trees and clones share ccache objects."""
    common = os.path.commonpath([paths.home(), paths.native()])
    defaults = {"CCACHE_NOHASHDIR": "1", "CCACHE_BASEDIR": common} if common != "/" else {}
    ceiling = {"GIT_CEILING_DIRECTORIES": os.pathsep.join(str(paths.source(f).parent) for f in ("upstream", "patched"))}
    return {**defaults, **os.environ, **ceiling, "NINJA_STATUS": "[%f/%t] "}


def configure(build: Path, flags: list[str], *, verbose: bool = False) -> None:
    """Run CMake for native/CMakeLists.txt. Raises SetupError."""
    command = [toolchain.cmake(), "-G", "Ninja", "-S", str(paths.native()), "-B", str(build)]
    command += [f"-DCMAKE_MAKE_PROGRAM={toolchain.ninja()}", *flags]
    ccache = shutil.which("ccache")
    if ccache:
        command += [f"-DCMAKE_{language}_COMPILER_LAUNCHER={ccache}" for language in ("C", "CXX", "CUDA")]
    command += ["-DGGML_CCACHE=OFF"]
    print("configuring ...", flush=True)
    _run(command, build / "configure.log", verbose, "CMake could not configure the build")


def compile(build: Path, targets: list[str], n_jobs: int, *, label: str, verbose: bool = False) -> None:
    """Build targets. Raises SetupError; Ctrl-C stops the compilers, and the next call goes on from there."""
    command = [toolchain.ninja(), "-C", str(build), "-j", str(n_jobs), *targets]
    advice = "the compiler failed; if it was killed, memory ran out: try --jobs 1"
    _run(command, build / "build.log", verbose, advice, _Progress(label))


class _Progress:
    """One line that is rewritten on a terminal, a line now and then elsewhere."""

    def __init__(self, label: str) -> None:
        self.label = label
        self.tty = sys.stdout.isatty()
        self.start = time.monotonic()
        self.reported = 0.0

    def line(self, text: str) -> None:
        match = _STATUS.match(text)
        if not match:
            return
        done, total, step = int(match[1]), int(match[2]), match[3]
        elapsed = time.monotonic() - self.start
        report = f"building {self.label}: {100 * done // total:3d}%  {done}/{total}  {elapsed:4.0f} s"
        if self.tty:
            width = shutil.get_terminal_size().columns
            print("\r" + f"{report}  {step.rsplit('/', 1)[-1]}"[: width - 1].ljust(width - 1), end="", flush=True)
        elif elapsed - self.reported >= REPORT_EVERY_S or done == total:
            self.reported = elapsed
            print(report, flush=True)

    def end(self) -> None:
        if self.tty:
            print(flush=True)


def _run(command: list[str], log: Path, verbose: bool, advice: str, progress: _Progress | None = None) -> None:
    with log.open("w") as file:
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace", env=environment()
        )
        try:
            assert process.stdout is not None
            for line in process.stdout:
                file.write(line)
                if verbose:
                    print(line, end="", flush=True)
                elif progress:
                    progress.line(line)
            code = process.wait()
        except BaseException:
            process.terminate()
            process.wait()
            raise
        finally:
            if progress and not verbose:
                progress.end()
    if code != 0:
        tail = log.read_text().splitlines()[-N_TAIL:]
        print("\n".join(tail), file=sys.stderr)
        raise SetupError(f"{advice}. The last {len(tail)} lines are above, all of it is in {log}")
