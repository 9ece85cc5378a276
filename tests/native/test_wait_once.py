"""The switch wait-once: a device is waited for once before a split. Two made-up devices show what the host waits for."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from llamamg import paths
from llamamg.library import Library

N_STEPS = 40
Steps = tuple[list[str], list[str], int]  # a hash of each step's result, what the host did, inputs not waited for


@pytest.fixture(scope="module")
def run(library: Library, tmp_path_factory: pytest.TempPathFactory) -> Callable[[int, int], Steps]:
    """Steps of a graph over two devices that compute on threads of their own, by ggml's own scheduler."""
    if not library.patched:
        pytest.skip("the unpatched build has no switch")
    program = tmp_path_factory.mktemp("wait") / "program"
    ggml = paths.source("patched") / "ggml"
    compiler = os.environ.get("CXX", "c++").split()
    command = [
        *compiler,
        "-std=c++17",
        "-O1",
        "-pthread",
        Path(__file__).with_name("wait_once_program.cpp"),
        "-o",
        program,
    ]
    command += [f"-I{folder}" for folder in (ggml / "include", ggml / "src", paths.native() / "src")]
    command += [f"-L{library.dir}", f"-Wl,-rpath,{library.dir}", "-lggml", "-lggml-base"]
    subprocess.run(command, check=True)

    def steps(switch: int, seed: int) -> Steps:
        arguments = (library.dir / "libggml-cpu.so", str(switch), str(N_STEPS), str(seed))
        done = subprocess.run([program, *arguments], capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr[-2000:]
        *lines, end = done.stdout.splitlines()
        n_unwaited, n_stuck = map(int, end.split())
        assert n_stuck == 0, "the first device waited for the second one's graph in vain"
        hashes, acts = zip(*(line.split(" ", 1) for line in lines), strict=True)
        return list(hashes), list(acts), n_unwaited

    return steps


def test_upstream_waits_behind_the_copy_that_the_first_device_still_has_to_make(
    run: Callable[[int, int], Steps],
) -> None:
    _, acts, n_unwaited = run(0, 1)
    assert acts == ["wait queue wait copy wait wait copy submit"] * N_STEPS
    assert n_unwaited == 0


def test_the_second_device_gets_its_graph_while_the_first_one_computes(run: Callable[[int, int], Steps]) -> None:
    """The first device begins only then, so a host that waits for it would never get on."""
    _, acts, n_unwaited = run(1, 1)
    assert acts == ["wait queue copy copy submit"] * N_STEPS
    assert n_unwaited == 3 * N_STEPS  # the user's input, and twice for the one from the CPU


@pytest.mark.parametrize("seed", [2, 3])
def test_results_are_the_same(run: Callable[[int, int], Steps], seed: int) -> None:
    hashes, _, _ = run(0, seed)
    assert run(1, seed)[0] == hashes
    assert len(set(hashes)) > N_STEPS // 2  # they say something
