"""async-cache where two saves, or a save and a write to disk, want the same block."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
from cache_server import Server, alone, talk

from llamamg import admission
from llamamg.testing import ask


def hold(server: Server, slot: Any, more: list[int], n_kept: int) -> None:
    """The slot as if it had gone on after `n_kept` tokens, rows included."""
    slot.tokens.keep(n_kept)
    slot.tokens.extend(more)
    held: Any = server.engine.kv
    held.held[slot.seq_id][:] = slot.tokens.view().tolist()


def test_two_saves_do_not_grow_the_same_block(serve: Callable[..., Server]) -> None:
    """The first one was only looked at when its time was over: the second one must not choose that block too."""
    server = serve(2)
    saver, begin = server.parts.saver, talk(300, 1)
    server.run(ask(begin, n_predict=4, id_slot=0))
    server.run(ask(begin, n_predict=4, id_slot=1))
    (leaf,) = [node for node in server.parts.tree.nodes() if node.is_leaf]
    for slot, seed in zip(server.engine.slots, (2, 3), strict=True):
        hold(server, slot, talk(20, seed), leaf.end)
    first, second = (saver.save(slot, slot.tokens.view().copy()) for slot in server.engine.slots)
    saver.prepare(within_s=0.0)
    saver.prepare(server.engine.slots[1])
    assert (first.grows, second.grows) == (leaf, None)
    saver.prepare()
    assert first.parts[0].block is leaf.block
    assert all(part.block is not leaf.block for part in second.parts)
    first.transfer.wait()
    second.transfer.wait()
    saver.drain()
    assert not leaf.is_growing


def test_a_save_that_never_made_a_copy_leaves_its_block_free(serve: Callable[..., Server]) -> None:
    server = serve(1)
    saver = server.parts.saver
    server.run(ask(talk(300, 1), n_predict=4))
    (leaf,) = [node for node in server.parts.tree.nodes() if node.is_leaf]
    slot = server.engine.slots[0]
    hold(server, slot, talk(20, 2), leaf.end)
    saver.save(slot, slot.tokens.view().copy())
    saver.prepare(within_s=0.0)
    assert leaf.is_growing
    saver.stop()
    assert not leaf.is_growing


def test_a_block_that_is_being_written_to_disk_is_left_as_it_is(serve: Callable[..., Server]) -> None:
    server = serve(1)
    begin = talk(300, 1)
    server.run(ask(begin, n_predict=4))
    (leaf,) = [node for node in server.parts.tree.nodes() if node.is_leaf]
    leaf.is_written = True
    again = server.engine.slots[0].tokens.view().tolist() + talk(30, 3)
    assert leaf.end < len(again)
    assert server.run(ask(again, n_predict=4)) == [alone(again, n_predict=4)]
    assert leaf.end < len(again) - 30 + 1, "what follows has a block of its own"


@pytest.mark.parametrize("are_positions", [True, False])
def test_who_takes_a_slot_that_is_saved_twice_cuts_both_copies(
    serve: Callable[..., Server], monkeypatch: pytest.MonkeyPatch, are_positions: bool
) -> None:
    """A follow-up ended while what its slot had held before was still being copied."""
    monkeypatch.setattr(admission, "COPY_S_MAX", 0.0)
    server, gate, copied = serve(1), threading.Event(), []

    def slow() -> None:
        copied.append(1)
        if len(copied) == 2:
            gate.wait(0.3)  # one chunk

    server.engine.kv.cells_are_positions = are_positions  # type: ignore[misc]
    server.cells.slow = slow
    first, other = talk(1500, 1), talk(1600, 2)
    server.engine.submit(ask(first, n_predict=2))
    while server.engine.step():
        pass
    slot = server.engine.slots[0]
    begun, said = slot.copying, slot.tokens.view().tolist()
    server.engine.submit(ask([*said, 60], n_predict=4))
    while server.engine.step():
        pass
    assert begun is not None
    assert not begun.is_over
    assert slot.copying is not begun
    request = ask(other, n_predict=4)
    server.engine.submit(request)
    while server.engine.step() or server.engine.queue_len():
        pass
    gate.set()
    begun.wait()
    server.settle()
    assert server.text(request) == alone(other, 4)
    for prompt in ([*first, 60, 61], [*said, 60, 61]):
        assert server.run(ask(prompt, n_predict=4)) == [alone(prompt, 4)]
