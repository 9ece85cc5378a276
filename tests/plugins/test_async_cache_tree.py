"""The tree of kept blocks: what goes first, what is found, and that neither takes longer because more is kept."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from llamamg import N_ROWS
from llamamg_plugins import async_cache_node, async_cache_tree
from llamamg_plugins.async_cache_blocks import BlockPool
from llamamg_plugins.async_cache_node import Node, State, Tokens, common
from llamamg_plugins.async_cache_tree import Tree

N_BYTES = 8


def make(n_blocks_max: int) -> Tree:
    return Tree(BlockPool(N_BYTES, 1 << 20), n_blocks_max * N_BYTES)


def grow(tree: Tree, n: int, seed: int, parent: Node | None = None) -> list[Node]:
    """`n` full blocks, one on the other."""
    path: list[Node] = []
    for tokens in np.random.default_rng(seed).integers(0, 1000, (n, N_ROWS), np.int32):
        path.append(tree.add(path[-1] if path else parent or tree.root, tokens, tree.take_block()))
    tree.touch(path)
    return path


def in_memory(path: list[Node]) -> int:
    return sum(node.block is not None for node in path)


def test_what_was_used_last_stays_and_ends_go_before_beginnings() -> None:
    tree = make(12)
    a, b, c = (grow(tree, 4, seed) for seed in (1, 2, 3))
    tree.touch(a)
    assert tree.make_room(3 * N_BYTES)
    assert [in_memory(path) for path in (a, b, c)] == [4, 1, 4]
    assert b[0].block is not None
    assert tree.make_room(3 * N_BYTES)
    tree.n_bytes_max -= 3 * N_BYTES
    assert tree.make_room(3 * N_BYTES)
    assert [in_memory(path) for path in (a, b, c)] == [4, 0, 2]
    assert tree.n_evicted == 6


def test_a_beginning_that_others_share_goes_last() -> None:
    tree = make(6)
    shared = grow(tree, 2, 1)
    first, second = (grow(tree, 2, seed, shared[-1]) for seed in (2, 3))
    tree.touch(shared + second)
    tree.make_room(4 * N_BYTES)
    assert [in_memory(path) for path in (shared, first, second)] == [2, 0, 0]


def test_what_is_pinned_stays_and_is_the_newest_afterwards() -> None:
    tree = make(6)
    a, b = grow(tree, 3, 1), grow(tree, 3, 2)
    tree.pin(a)
    tree.pin(a[:1])
    assert not tree.make_room(6 * N_BYTES)
    assert [in_memory(path) for path in (a, b)] == [3, 0]
    tree.unpin(a)
    assert not tree.make_room(6 * N_BYTES)
    assert in_memory(a) == 1
    tree.unpin(a[:1])
    assert not tree.pinned
    assert tree.make_room(6 * N_BYTES)


def test_what_is_built_on_goes_though_the_file_of_what_follows_is_in_use() -> None:
    """A block that is on disk too may go before those behind it, and one that is not has to wait for them."""
    tree = make(2)
    first, second = grow(tree, 2, 1)
    tree.pin([second])
    assert not tree.make_room(N_BYTES)
    assert first.block is not None
    first.stored = "somewhere"
    assert tree.make_room(N_BYTES)
    assert (first.block, second.block is None) == (None, False)
    assert tree.find(np.concatenate([first.tokens, second.tokens]))[1] == 2 * N_ROWS


def test_a_state_that_is_only_in_memory_goes_with_its_block() -> None:
    """The block is on disk; the state came after it was written, and has nowhere to be read from."""
    tree = make(10)
    (node,) = grow(tree, 1, 1)
    node.stored = "somewhere"
    on_disk, apart = (State(n, 0, n, np.zeros(20, np.uint8)) for n in (100, 200))
    on_disk.stored = "somewhere"
    tree.add_state(node, on_disk)
    tree.add_state(node, apart)
    assert tree.n_bytes == N_BYTES + 40
    tree.n_bytes_max = 0
    assert tree.make_room(0)
    assert tree.n_bytes == 0
    assert node.states == {100: on_disk}


@pytest.mark.parametrize("seed", range(20))
def test_the_longest_common_beginning_is_found(seed: int) -> None:
    """As if all children were compared."""
    tree, rng = make(1000), np.random.default_rng(seed)

    def tokens(n: int) -> Tokens:
        return rng.integers(0, 2, n, np.int32) * np.int32(1000) if n < 20 else np.repeat(tokens(10), N_ROWS // 10 + 1)

    def some() -> Tokens:
        return tokens(int(rng.integers(1, 9))) if rng.random() < 0.5 else tokens(20)[:N_ROWS]

    for _ in range(60):
        tree.add(tree.root, some(), tree.take_block())
    for node in rng.permutation(np.array([*tree.nodes()], object))[:30].tolist():
        if rng.random() < 0.5:
            tree.remove(node)
        else:
            node.block = None  # nowhere, as when its file went while it was read
    for _ in range(50):
        wanted = some()
        best = max((common(node.tokens, wanted) for node in tree.nodes() if node.is_somewhere), default=0)
        path, n = tree.find(wanted)
        assert n == best
        assert all(node.is_somewhere for node in path)


def test_a_block_that_grows_is_found_by_what_it_has_now() -> None:
    tree = make(10)
    a, b = np.arange(N_ROWS, dtype=np.int32), np.arange(N_ROWS, dtype=np.int32)
    first, second = tree.add(tree.root, a[:10], tree.take_block()), tree.add(tree.root, b[:10], tree.take_block())
    tree.grow(first, a[:100])
    assert tree.find(a) == ([first], 100)
    tree.grow(second, b)
    assert tree.find(a) == ([second], N_ROWS)
    tree.grow(first, a)  # the same tokens, in a block of its own
    assert tree.find(a) == ([second], N_ROWS)
    tree.remove(second)
    assert tree.find(a) == ([first], N_ROWS)
    tree.remove(first)
    assert tree.root.is_leaf


def test_one_block_of_many_costs_a_look_at_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine's thread does this between two steps: it must not look at all there is."""
    tree, n_looked = make(4000), 0
    for seed in range(1000):
        grow(tree, 4, seed)

    def counted(function: Any) -> Any:
        def count(*arguments: Any) -> Any:
            nonlocal n_looked
            n_looked += 1
            return function(*arguments)

        return count

    monkeypatch.setattr(async_cache_tree, "_may_go", counted(async_cache_tree._may_go))
    monkeypatch.setattr(async_cache_node, "common", counted(common))
    assert tree.make_room(3 * N_BYTES)
    assert n_looked == 3
    tree.find(np.random.default_rng(5).integers(0, 1000, 10, np.int32))
    assert n_looked <= 5
