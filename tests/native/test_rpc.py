"""Contexts on one stock rpc-server: none has another's graph computed, and sequences move between them there."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from llamamg.library import Library

PROGRAM = Path(__file__).parent / "rpc_contexts.py"


@pytest.fixture
def answer(library: Library, synth_model: Callable[..., Path]) -> Callable[[str, str], Any]:
    def run(what: str, servers: str) -> Any:
        command = [sys.executable, str(PROGRAM), str(synth_model()), servers, what]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr[-2000:]
        return json.loads(done.stdout.splitlines()[-1])

    return run


def test_threads_decode_as_each_alone(library: Library, answer: Callable[[str, str], Any], rpc_server: str) -> None:
    if not library.patched:
        pytest.skip("upstream computes another context's graph")
    assert answer("decode", rpc_server) == [0, 0, 0, 0]


def test_a_sequence_moves_on_the_server(answer: Callable[[str, str], Any], rpc_server: str) -> None:
    assert answer("move", rpc_server) == {"move": True, "copy": True}


def test_a_context_with_one_copy(library: Library, answer: Callable[[str, str], Any], rpc_servers: str) -> None:
    """The switch counts when a context is made, for that context."""
    if not library.patched:
        pytest.skip("the unpatched build has no switch")
    found = answer("copies", rpc_servers)
    assert found["same"]
    assert ["pipeline parallelism enabled" in log for log in found["logs"]] == [True, False, True]
    sizes = [
        [float(size) for size in re.findall(r"RPC\S* compute buffer size = +([0-9.]+) MiB", log)]
        for log in found["logs"]
    ]
    assert sizes[0] == sizes[2]
    assert len(sizes[0]) == 2
    assert all(one < four for one, four in zip(sizes[1], sizes[0], strict=True)), sizes
