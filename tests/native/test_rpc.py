"""Contexts on one stock rpc-server: none has another's graph computed, and sequences move between them there."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from llamamg.library import Library

PROGRAM = Path(__file__).parent / "rpc_contexts.py"


@pytest.fixture
def answer(library: Library, synth_model: Callable[..., Path], rpc_server: str) -> Callable[[str], Any]:
    def run(what: str) -> Any:
        command = [sys.executable, str(PROGRAM), str(synth_model()), rpc_server, what]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr[-2000:]
        return json.loads(done.stdout.splitlines()[-1])

    return run


def test_threads_decode_as_each_alone(library: Library, answer: Callable[[str], Any]) -> None:
    if not library.patched:
        pytest.skip("upstream computes another context's graph")
    assert answer("decode") == [0, 0, 0, 0]


def test_a_sequence_moves_on_the_server(answer: Callable[[str], Any]) -> None:
    assert answer("move") == {"move": True, "copy": True}
