"""With all plugins off the text is that of the unpatched library: same batches, replayed there, same logits to the bit."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llamamg import paths
from llamamg.replay import Recording, record
from llamamg.request import Request, SamplingParams
from llamamg.testing import ask

PROMPTS = (
    "The capital of France is",
    "Once upon a time",
    "def fibonacci(n):",
    "The quick brown fox",
    "Water boils at",
    "List three colours:",
    "1, 2, 3, 4,",
    "Dear Sir or Madam,",
    "The largest planet is",
    "In the year 1969",
    "To make bread you need",
    "She opened the door and",
    "import numpy as np\n",
    "Roses are red,",
    "The opposite of hot is",
    "<|im_start|>user\nHello!<|im_end|>\n<|im_start|>assistant\n",
    "Die Hauptstadt von Deutschland ist",
    "A long time ago, in a country far away, there lived a king who had three daughters. The youngest",
    "Q: What is 2 + 2?\nA:",
    "The meaning of life is",
)


@pytest.fixture
def unpatched() -> Path:
    """The unpatched build, of which the replay needs the libraries and our C ABI."""
    folder = paths.build("upstream") / "bin"
    if not (folder / "libllamamg.so").is_file():
        pytest.skip("the unpatched build is missing: run `llamamg build --upstream`")
    return folder


def replayed(recording: Recording, build: Path, tmp_path: Path) -> dict[str, Any]:
    file = tmp_path / "recording.jsonl"
    recording.write(file)
    environment = {
        key: value for key, value in os.environ.items() if key not in ("LLAMAMG_BUILD", "LLAMA_CPP_LIB_PATH")
    }
    command = [sys.executable, "-m", "llamamg.replay", str(file), "--build", str(build)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=200)
    assert done.returncode in (0, 1), done.stderr
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def best_tokens(recording: Recording) -> dict[int, list[int]]:
    """For each sequence id the best tokens in order."""
    found: dict[int, list[int]] = {}
    for call in recording.calls:
        if call[0] == "decode":
            with_logits = [row for row in call[1] for _ in range(row[2])]
            for row, (token, _) in zip(with_logits, call[2], strict=True):
                found.setdefault(row[0], []).append(token)
    return found


@pytest.mark.parametrize("n_slots", [1, 4])
def test_twenty_prompts(
    live: Callable[..., Any], smol_model: Path, unpatched: Path, tmp_path: Path, n_slots: int
) -> None:
    smol = live(smol_model, start=False, n_ctx=256 * n_slots, n_parallel=n_slots)
    assert smol.engine.plugins.enabled() == []
    recording = record(smol.engine)
    smol.engine.start()
    vocab = smol.engine.vocab
    requests = [
        Request(vocab.tokenize(prompt, True, True), SamplingParams(temperature=0.0), n_predict=12, return_tokens=True)
        for prompt in PROMPTS
    ]
    answers = smol.tokens(*requests)
    assert sum(map(len, answers)) == sum(map(len, best_tokens(recording).values()))
    slots = [smol.last(request).id_slot for request in requests]
    for slot in range(n_slots):
        mine = [token for answer, at in zip(answers, slots, strict=True) if at == slot for token in answer]
        assert best_tokens(recording)[slot] == mine  # slots never move without plugins, so slot and sequence are one
    result = replayed(recording, unpatched, tmp_path)
    assert result["patched"] is False
    assert result["outputs"] == sum(map(len, answers))
    assert result["same_bits"] == result["outputs"]
    assert result["differences"] == []


def test_a_hybrid_with_checkpoints_and_reuse(
    live: Callable[..., Any], micro_model: Path, unpatched: Path, tmp_path: Path
) -> None:
    micro = live(micro_model, start=False, n_ctx=4096, n_parallel=4, kv_unified=False, n_batch=256, n_ubatch=64)
    recording = record(micro.engine)
    micro.engine.start()
    tokens = np.random.default_rng(1).integers(10, 400, 800)
    for cut in (300, 300, 340, 250):
        micro.ask(*[ask([*tokens[:cut].tolist(), i], temperature=0.0, n_predict=10) for i in range(4)])
    assert {call[0] for call in recording.calls} >= {"decode", "save", "restore", "remove"}
    result = replayed(recording, unpatched, tmp_path)
    assert (result["patched"], result["differences"]) == (False, [])
    assert result["same_bits"] == result["outputs"] == 160


def test_the_replay_notices_another_token(live: Callable[..., Any], micro_model: Path, tmp_path: Path) -> None:
    micro = live(micro_model, start=False, n_ctx=512, n_parallel=1)
    recording = record(micro.engine)
    micro.engine.start()
    micro.ask(ask([5, 6, 7, 8], temperature=0.0, n_predict=4))
    recording.calls[-1][1][0][3][0] += 1  # another token goes in with the last decode
    recording.calls[1][2][0][0] += 1  # and another one came out of the first
    result = replayed(recording, paths.build("patched") / "bin", tmp_path)
    assert result["outputs"] == 4
    assert result["same_bits"] == 3
    assert result["differences"][0]["decode"] == 0
    assert result["differences"][0]["margin"] > 0
