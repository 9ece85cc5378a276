"""The disk tier without an engine: a tree and its folder, whose rows are tokens."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from llamamg import N_ROWS
from llamamg_plugins.async_cache_blocks import BlockPool
from llamamg_plugins.async_cache_disk import Disk
from llamamg_plugins.async_cache_node import Node, State, Tokens
from llamamg_plugins.async_cache_tree import Tree

PLANES = ((0, 4, 1),)  # a row is a token
N_BLOCK = 4 * N_ROWS


class Folder:
    """A tree and its folder, without an engine."""

    def __init__(self, folder: Path, *, n_bytes_max: int = 1 << 30) -> None:
        self.pool = BlockPool(N_BLOCK, 1 << 20)
        self.tree = Tree(self.pool, 1 << 20)
        self.disk = Disk(folder, n_bytes_max, self.tree, identity="i", planes=PLANES, model="m")
        self.disk.start()

    def node(self, parent: Node, tokens: Tokens) -> Node:
        """A saved block, whose rows are its tokens."""
        block = self.pool.take()
        block.view[: 4 * len(tokens)] = tokens.view(np.uint8)
        return self.tree.add(parent, tokens, block)

    def settle(self) -> None:
        """Until the folder is as it will be."""
        self.until(lambda: not self.disk.n_pending)

    def until(self, is_so: Callable[[], bool]) -> None:
        """Take note of what the disk's thread did until that is so."""
        end = time.monotonic() + 20
        while not is_so():
            self.disk.drain()
            assert time.monotonic() < end
            time.sleep(0.001)

    def rows(self, node: Node) -> list[int]:
        """The rows of a block as they are on disk."""
        data = np.empty(N_BLOCK, np.uint8)
        self.disk.load(node.stored, data)
        return data[: 4 * len(node.tokens)].view(np.int32).tolist()


def state(folder: Folder, node: Node, n: int) -> State:
    made = State(n, 0, n - 1, np.full(8, n % 251, np.uint8))
    folder.tree.add_state(node, made)
    return made


def chain(folder: Folder, n: int, seed: int = 7) -> list[Node]:
    """A conversation of `n` full blocks."""
    nodes: list[Node] = []
    for tokens in np.random.default_rng(seed).integers(0, 1000, (n, N_ROWS), np.int32):
        nodes.append(folder.node(nodes[-1] if nodes else folder.tree.root, tokens))
    return nodes
