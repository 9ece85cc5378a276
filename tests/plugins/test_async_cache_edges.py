"""async-cache where something came between: what must not be saved, not be built on and not be offered."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cache_server import Server, alone, talk

from llamamg import FinishReason, PluginError, Sequence, Transfer
from llamamg.plugins.testing import config as a_config
from llamamg.plugins.testing import unconfigured
from llamamg.request import Finished
from llamamg.statefile import FolderLock
from llamamg.testing import ask, fake_engine, run
from llamamg_plugins.async_cache import AsyncCache
from llamamg_plugins.async_cache_save import Save, _Part


def test_a_slot_that_is_not_what_its_tokens_say_is_not_saved(serve: Callable[..., Server]) -> None:
    server = serve(1)
    server.run(ask(talk(500, 1), n_predict=4))
    slot, n_saved = server.engine.slots[0], server.parts.saver.n_saved
    slot.tokens.extend(talk(100, 2))  # an error came between the tokens and their rows
    server.cache.save(slot)
    assert server.parts.saver.n_saved == n_saved == 1
    slot.tokens.keep(503)
    server.run(ask(talk(500, 3), n_predict=4))
    assert server.parts.saver.n_saved == 2


def test_a_shifted_sequence_is_not_saved(serve: Callable[..., Server]) -> None:
    """Its rows are turned, not computed: a prompt with the same tokens has others."""
    server = serve(1)
    server.run(ask(talk(500, 1), n_predict=4))
    slot = server.engine.slots[0]
    for truncated in (True, False):
        sequence = Sequence(ask(talk(500, 1)), slot, None, None)  # type: ignore[arg-type]
        sequence.truncated = truncated
        server.cache.forget()
        server.cache.slot_released(slot, sequence, FinishReason.LIMIT)
        server.settle()
        assert server.cache.n_bytes == (0 if truncated else 2 * 256 * 4)


def test_a_prompt_that_ends_where_a_state_was_kept(serve: Callable[..., Server]) -> None:
    """One token has to be computed, and a state cannot go back by one: the one before it is taken."""
    server = serve(1, hybrid=True)
    first = talk(700, 1)
    answer = server.run(ask(first, n_predict=5))[0]
    server.run(ask(talk(650, 2), n_predict=5))
    prompt = first + list(answer.encode())[:4]  # what the slot held: its state is kept behind all of that
    request = ask(prompt, n_predict=5)
    assert server.run(request) == [alone(prompt, 5, hybrid=True)]
    assert server.n_cached(request) == 696


def test_two_slots_that_go_on_from_the_same_block(serve: Callable[..., Server]) -> None:
    """Only one of them may write behind its last row."""
    server = serve(2)
    start = talk(300, 1)
    server.run(ask(start, n_predict=1))
    prompts = [start + talk(40, seed) for seed in (2, 3)]
    server.cells.slow = lambda: time.sleep(0.01)
    server.run(*(ask(prompt, n_predict=3) for prompt in prompts))
    server.run(*(ask(talk(400, seed), n_predict=3) for seed in (4, 5)))
    for prompt in prompts:
        request = ask(prompt + talk(5, 6), n_predict=5)
        assert server.run(request) == [alone(prompt + talk(5, 6), 5)]
        assert server.n_cached(request) >= 340


def test_nothing_is_built_on_a_block_that_was_cut(serve: Callable[..., Server]) -> None:
    """Two threads copy: the block behind may be through when the one before it is cut."""
    server = serve(1)
    saver, tree = server.parts.saver, server.parts.tree
    assert tree is not None
    tokens = np.array(talk(512, 1), np.int32)
    parts = [_Part(tokens[at : at + 256], 0, tree._pool.take(), n_done=n) for at, n in ((0, 100), (256, 256))]
    save = Save(Transfer(0, to_host=True), server.engine.slots[0], tokens, tree.root, parts=parts)
    saver._publish(save, 64)
    assert [(node.start, len(node.tokens)) for node in tree.nodes()] == [(0, 100)]
    saver._unpin(save)
    tree.give_block(parts[1].block)


def test_a_save_that_fails_is_counted_and_costs_nothing_else(serve: Callable[..., Server]) -> None:
    server = serve(1)

    def fail() -> None:
        raise OSError("the bus is on fire")

    server.cells.slow = fail
    server.run(ask(talk(600, 1), n_predict=2))
    server.cells.slow = lambda: None
    counters = {name: value for name, _, value, _ in server.cache.counters()}
    assert (counters["saves"], counters["saves_failed"], counters["bytes"]) == (1, 1, 0)
    request = ask(talk(600, 1) + talk(9, 2), n_predict=2)
    server.run(ask(talk(600, 3), n_predict=2))
    assert server.run(request) == [alone(talk(600, 1) + talk(9, 2), 2)]
    assert server.n_cached(request) == 0


ASKED = {
    "--cache-ram": {"ram": "100"},
    "--cache-ram and --cache-disk": {"ram": "100", "disk": "DISK"},
    "--cache-disk": {"disk": "DISK"},
}


@pytest.mark.parametrize("asked", ["", *ASKED])
@pytest.mark.parametrize("reason", ["nobody knows its layout", ""], ids=["no way", "an old build"])
def test_memory_that_cannot_be_copied(tmp_path: Path, asked: str, reason: str) -> None:
    """What is on by itself does without; what was asked for is an error that says what to leave out."""
    given = {name: value.replace("DISK", str(tmp_path)) for name, value in ASKED.get(asked, {}).items()}
    plugins = unconfigured(shipped=(AsyncCache,), options={"async-cache": given})
    config = replace(a_config(), plugins=plugins.config)
    plugins.configure(config)
    engine, _, events = fake_engine(plugins=plugins)
    engine.cells = replace_reason(engine.cells, reason)
    why = f"cannot be copied .{reason or 'this native build is too old, run `llamamg build`'}."
    if asked:
        with pytest.raises(PluginError, match=f"nothing can be kept as {asked} asks for: .* {why}; leave that out"):
            plugins.start(engine)
    else:
        plugins.start(engine)
        assert plugins.enabled() == []
        assert re.search(why, plugins.views()[0].reason or "")
        request = ask("hello", n_predict=2)
        engine.submit(request)
        run(engine)
        assert any(isinstance(event, Finished) for _, event in events)
    plugins.stop()
    FolderLock(tmp_path).release()  # nobody has it


def replace_reason(cells: Any, reason: str) -> Any:
    """These cells, as cells that cannot be copied for that reason; none when there is no way to ask."""
    if not reason:
        return None
    cells.reason = reason
    return cells
