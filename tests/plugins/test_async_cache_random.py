"""Servers one after the other on one folder, whatever happens to it: answers are those without a cache."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from cache_server import Server, alone, talk

from llamamg.testing import ask


def some_prompt(rng: random.Random, heads: list[list[int]]) -> list[int]:
    prompt = rng.choice(heads) + talk(rng.randrange(1, 900), rng.randrange(12))
    return prompt + talk(rng.randrange(1, 300), rng.randrange(5)) if rng.random() < 0.3 else prompt


def damage(rng: random.Random, folder: Path) -> None:
    """One bit of one file."""
    paths = sorted(folder.glob("*.llmg"))
    if paths:
        path = rng.choice(paths)
        data = bytearray(path.read_bytes())
        data[rng.randrange(len(data))] ^= 4
        path.write_bytes(data)


@pytest.mark.parametrize("seed", range(8))
def test_little_memory_a_small_folder_and_damage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    monkeypatch.setattr("llamamg_plugins.async_cache_parts.model_identity", lambda config: "a model")
    monkeypatch.setattr("llamamg_plugins.async_cache_handles.N_OPEN_MAX", 2)
    rng = random.Random(seed)
    hybrid = rng.random() < 0.5
    heads = [talk(rng.randrange(50, 700), 1000 + i) for i in range(3)]
    for _ in range(4):
        limit = rng.choice(["1.5e-5", "4e-5", "1"])
        server = Server(rng.choice([1, 2, 3]), hybrid=hybrid, disk=str(tmp_path), **{"disk-gb": limit})
        tree, disk = server.parts.tree, server.parts.disk
        assert disk is not None
        tree.n_bytes_max = 1024 * rng.choice([3, 8, 1000])
        for _ in range(rng.randrange(3, 9)):
            prompts = [some_prompt(rng, heads) for _ in range(rng.randrange(1, 4))]
            requests = [ask(prompt, n_predict=5) for prompt in prompts]
            assert server.run(*requests) == [alone(prompt, 5, hybrid=hybrid) for prompt in prompts]
            if rng.random() < 0.3:
                damage(rng, tmp_path)
        server.stop()
        assert disk._thread.join(10)
        in_memory = {node for node in tree.nodes() if node.block is not None}
        assert tree.n_bytes == len(in_memory) * tree._pool.n_bytes + tree.n_state_bytes
        assert (set(tree._order), tree.pinned) == (in_memory, {})
    server = Server(1, hybrid=hybrid, disk=str(tmp_path))
    again = ask(talk(600, 500), n_predict=5)
    for other in (500, 501):  # apart: who needs a slot at once may cut its copy
        server.run(ask(talk(600, other), n_predict=5))
    assert server.run(again) == [alone(talk(600, 500), 5, hybrid=hybrid)]
    assert server.n_cached(again) >= 590, "after all that it still keeps prompts"
    server.stop()
