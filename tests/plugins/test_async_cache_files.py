"""Which file a block of the disk tier lies in, when several saves of one conversation meet in the folder."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from cache_folder import N_BLOCK, Folder, chain, state
from cache_server import talk

from llamamg import N_ROWS
from llamamg.statefile import StateFile

TALK = np.array(talk(N_ROWS + 100, 1), np.int32)


@pytest.mark.parametrize("at_once", [False, True], ids=["one after the other", "at once"])
def test_the_same_conversation_saved_from_two_slots(folder: Folder, tmp_path: Path, at_once: bool) -> None:
    """Their common blocks are one node, but each has an end of its own."""
    head = folder.node(folder.tree.root, TALK[:N_ROWS])
    ends = [folder.node(head, TALK[N_ROWS:]) for _ in range(2)]
    for end in ends:
        folder.disk.write([head, end])
        if not at_once:
            folder.settle()
    folder.settle()
    for node in (head, *ends):
        assert node.stored is not None
        assert node.stored.entry in folder.disk.entries
        assert folder.rows(node) == node.tokens.tolist()
    files = {entry.path for entry in folder.disk.entries}
    assert files == set((tmp_path / "disk").glob("*.llmg"))
    assert folder.disk.n_bytes == sum(path.stat().st_size for path in files)
    after = Folder(tmp_path / "disk")
    path, n = after.tree.find(TALK)
    assert n == len(TALK)
    assert [after.rows(node) for node in path] == [TALK[:N_ROWS].tolist(), TALK[N_ROWS:].tolist()]
    after.disk.stop()


def test_the_same_conversation_with_other_states(folder: Folder) -> None:
    """The same blocks with other states: each state stays where it was written."""
    head = folder.node(folder.tree.root, TALK[:N_ROWS])
    ends = [folder.node(head, TALK[N_ROWS:]) for _ in range(2)]

    states = [state(folder, ends[0], 300), state(folder, ends[0], 356), state(folder, ends[1], 356)]
    for end in ends:
        folder.disk.write([head, end])
    folder.settle()
    for each in states:
        assert each.stored is not None
        data = np.empty(8, np.uint8)
        folder.disk.load(each.stored, data)
        assert set(data.tolist()) == {each.n_tokens % 251}


def test_a_block_that_grew_while_it_was_written_is_not_on_disk(folder: Folder) -> None:
    end = folder.node(folder.tree.root, TALK[:100])
    folder.disk.write([end])
    folder.tree.grow(end, TALK[:200])
    folder.settle()
    assert end.stored is None, "its file has 100 rows of it"
    folder.disk.write([end])
    folder.settle()
    assert end.stored.entry.path.stat().st_size > 0
    with StateFile(end.stored.entry.path) as file:
        assert file.header.n_tokens == 200


def test_what_has_left_memory_is_not_written(folder: Folder, tmp_path: Path) -> None:
    first = folder.node(folder.tree.root, TALK[:N_ROWS])
    second = folder.node(first, TALK[N_ROWS:])
    assert second.block is not None
    folder.pool.give(second.block)
    second.block = None
    folder.disk.write([first, second])
    assert folder.disk.n_pending == 0
    assert list((tmp_path / "disk").glob("*.llmg")) == []


def test_a_state_that_was_only_in_a_file_goes_with_it(folder: Folder) -> None:
    """The block stays, in memory: a state that nobody has any more must not be offered."""
    node = folder.node(folder.tree.root, TALK[:200])
    here, gone = state(folder, node, 150), state(folder, node, 200)
    folder.disk.write([node])
    folder.settle()
    folder.tree._free_data(gone)
    assert folder.tree.best_state([node], 200) is gone
    folder.disk.forget(node.stored.entry)
    assert node.block is not None
    assert node.stored is None
    assert folder.tree.best_state([node], 200) is here


def test_a_file_that_is_being_read_stays_open(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("llamamg_plugins.async_cache_handles.N_OPEN_MAX", 2)
    nodes = [folder.node(folder.tree.root, np.array(talk(100, seed), np.int32)) for seed in range(5)]
    for node in nodes:
        folder.disk.write([node])
    folder.settle()
    entries = [node.stored.entry for node in nodes]
    with folder.disk._files.reading(entries[0], 0) as file:
        for node in nodes[1:]:
            assert folder.rows(node) == node.tokens.tolist()
        assert [entry in folder.disk._files for entry in entries] == [True, False, False, True, True]
        data = np.empty(N_BLOCK, np.uint8)
        file.read_block(0, data)


def test_a_long_conversation_in_a_full_folder(tmp_path: Path) -> None:
    """A quarter of a million tokens are a thousand blocks, one on the other."""
    folder = Folder(tmp_path / "disk", n_bytes_max=5 << 20)
    for seed in range(6):
        folder.disk.write(chain(folder, 1000, seed))
        folder.settle()
    assert folder.disk.n_evicted >= 2
    assert len(folder.disk.entries) >= 2
    assert folder.disk.n_bytes <= 5 << 20
    folder.disk.stop()


def test_a_conversation_of_many_turns_goes_at_once(folder: Folder, tmp_path: Path) -> None:
    nodes = chain(folder, 1000)
    for i in range(0, len(nodes), 2):
        folder.disk.write(nodes[: i + 2])
        folder.settle()
    assert len(folder.disk.entries) == 500
    for node in nodes:
        folder.tree._free_block(node)
    folder.disk.forget(nodes[0].stored.entry)
    assert (len(folder.disk.entries), folder.disk.n_bytes) == (0, 0)
    folder.settle()
    assert list(folder.tree.nodes()) == []
    assert list((tmp_path / "disk").glob("*.llmg")) == []


def test_a_file_that_is_read_stays_though_it_is_the_oldest(folder: Folder) -> None:
    """So does what it is built on."""
    first, other = chain(folder, 3, 1), chain(folder, 3, 2)
    for path in (first[:2], first, other):
        folder.disk.write(path)
        folder.settle()
    files = [nodes.stored.entry for nodes in (first[0], first[2], other[0])]
    folder.tree.pin(first)
    folder.disk._n_bytes_max = folder.disk.n_bytes - 1
    folder.disk._shrink()
    assert list(folder.disk.entries) == [files[1], files[0]]
    folder.disk._n_bytes_max = 0
    folder.disk._shrink()
    assert list(folder.disk.entries) == [files[1], files[0]]
    folder.tree.unpin(first)
    folder.disk._shrink()
    assert not folder.disk.entries


@pytest.mark.parametrize("read", [2, 3])
def test_a_damaged_file_goes_while_somebody_reads_what_is_built_on_it(folder: Folder, read: int) -> None:
    nodes = chain(folder, 4)
    tokens = np.concatenate([node.tokens for node in nodes])
    folder.disk.write(nodes[:2])
    folder.settle()
    folder.disk.write(nodes)
    folder.settle()
    for node in nodes:
        folder.tree._free_block(node)
    folder.tree.pin(nodes[: read + 1])
    folder.disk.forget(nodes[0].stored.entry)
    assert not folder.disk.entries
    assert folder.tree.find(tokens) == ([], 0), "nobody else is offered what is nowhere any more"
    assert nodes[read].parent is not None
    folder.tree.unpin(nodes[: read + 1])
    again = chain(folder, 4)
    path, n = folder.tree.find(tokens)
    assert n == len(tokens)
    assert path == again
    assert all(node.block is not None for node in path)


def test_a_state_in_another_file_outlives_this_one(folder: Folder) -> None:
    """Its block was written again after its first file went; the state is in the second one."""
    node = folder.node(folder.tree.root, TALK[:N_ROWS])
    folder.disk.write([node])
    folder.settle()
    kept, first = state(folder, node, 200), node.stored.entry
    node.stored, first.nodes = None, []
    folder.disk.write([node])
    folder.settle()
    second = node.stored.entry
    first.states.append((node, kept))
    folder.tree._free_data(kept)
    folder.disk.forget(first)
    assert folder.tree.best_state([node], 200) is kept
    folder.disk.forget(second)
    assert folder.tree.best_state([node], 200) is None
