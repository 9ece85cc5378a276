"""What is cached, as a tree of blocks of tokens: conversations that begin alike share their blocks.

A path from the root is a prefix. A full block is found by the hash of its tokens and compared token by token, both by a dict
of their bytes; a block that is shared in part gives the tokens up to the first difference. Nothing here takes longer because
more is kept: the engine's thread does it between two steps.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llamamg import N_ROWS
from llamamg_plugins.async_cache_blocks import Block, BlockPool
from llamamg_plugins.async_cache_node import Node, State, Tokens, key

BLOCK_BYTES = N_ROWS * np.dtype(np.int32).itemsize


class Tree:
    """All of it on the engine thread."""

    def __init__(self, pool: BlockPool, n_bytes_max: int) -> None:
        self.root = Node(None, 0, np.empty(0, np.int32), None)
        self.n_bytes_max = n_bytes_max
        self.n_state_bytes = 0
        self.n_evicted = 0  # blocks
        self._pool = pool
        self._order: OrderedDict[Node, None] = OrderedDict()  # in memory and not pinned, the one used last at the end
        self.pinned: dict[Node, None] = {}  # with each one all that it is built on
        self._held: dict[int, int] = {}  # states by the identity of their data: several nodes may share one

    # -- looking

    def find(self, tokens: Tokens) -> tuple[list[Node], int]:
        """The longest cached prefix: its blocks in order, and how many tokens it has (the last block may be used in part)."""
        path: list[Node] = []
        node = self.root
        tokens = np.ascontiguousarray(tokens, np.int32)
        data, at = tokens.tobytes(), 0  # once: hundreds of blocks are looked up between two steps of others
        while (child := node.full.get(data[at : at + BLOCK_BYTES])) is not None and child.is_somewhere:
            path.append(child)
            node, at = child, at + BLOCK_BYTES
        n = at // tokens.itemsize
        best, shared = node.nearest(tokens[n : n + N_ROWS])
        if best is not None:
            path.append(best)
            n += shared
        return path, n

    def best_state(self, path: list[Node], n: int) -> State | None:
        """The state nearest to, and not behind, the first `n` tokens of a path."""
        for node in reversed(path):
            fitting = [state for at, state in node.states.items() if at <= n]
            if fitting:
                return max(fitting, key=lambda state: state.n_tokens)
        return None

    def touch(self, path: list[Node]) -> None:
        """These were used just now; a parent goes after its children."""
        for node in reversed(path):
            if node in self._order:
                self._order.move_to_end(node)

    def pin(self, nodes: Iterable[Node]) -> None:
        """Keep the memory of these, which are a path from the root or lie behind one that is pinned."""
        for node in nodes:
            node.n_pins += 1
            self.pinned[node] = None
            self._order.pop(node, None)

    def unpin(self, path: list[Node]) -> None:
        """They were used until now."""
        for node in reversed(path):
            node.n_pins -= 1
            if not node.n_pins:
                del self.pinned[node]
                self._list(node)

    def _list(self, node: Node) -> None:
        if node.block is not None and not node.n_pins and node.parent is not None:
            self._order[node] = None

    def nodes(self) -> Iterator[Node]:
        """All blocks."""
        stack = [self.root]
        while stack:
            node = stack.pop()
            stack += node.children
            if node is not self.root:
                yield node

    # -- changing

    @property
    def n_bytes(self) -> int:
        """Memory in use."""
        return self._pool.n_used * self._pool.n_bytes + self.n_state_bytes

    def take_block(self) -> Block | None:
        """A block, for which the least recently used ones go if it must be; None when nothing may go."""
        return self._pool.take() if self.make_room(self._pool.n_bytes) else None

    def fresh_block(self) -> Block:
        """A block for what is read from disk, even if that is more than there should be: it goes first afterwards."""
        self.make_room(self._pool.n_bytes)
        return self._pool.take()

    def give_block(self, block: Block) -> None:
        """A block that came into no node."""
        self._pool.give(block)

    def make_room(self, n_bytes: int) -> bool:
        """Evict until `n_bytes` more fit; False when that cannot be."""
        spared = []
        while self.n_bytes + n_bytes > self.n_bytes_max and self._order:
            node = next(iter(self._order))
            if _may_go(node):
                self.evict(node)
            else:  # what is built on it is in use
                del self._order[node]
                spared.append(node)
        for node in reversed(spared):
            self._order[node] = None
            self._order.move_to_end(node, last=False)
        return self.n_bytes + n_bytes <= self.n_bytes_max

    def evict(self, node: Node) -> None:
        """Free its memory; what is on disk is still known."""
        self.n_evicted += 1
        if node.stored is None:
            self.remove(node)
            return
        self._free_block(node)
        for at, state in list(node.states.items()):
            if state.stored is None:
                del node.states[at]  # it is nowhere else
            self._free_data(state)

    def forget(self) -> None:
        """Remove all that nobody uses."""
        for node in sorted(self.nodes(), key=lambda node: -node.start):
            if node.is_leaf and node.n_pins == 0 and not node.is_growing:
                self.remove(node)

    def remove(self, node: Node) -> None:
        """Forget a leaf."""
        assert node.is_leaf
        assert node.parent is not None
        node.parent.remove(node)
        for state in node.states.values():
            self._free_data(state)
        node.states = {}
        self._free_block(node)
        node.parent = None

    def _free_block(self, node: Node) -> None:
        self._order.pop(node, None)
        if node.block is not None:
            self._pool.give(node.block)
            node.block = None

    def add(self, parent: Node, tokens: Tokens, block: Block | None, stored: Any = None) -> Node:
        """A new block behind `parent`."""
        node = Node(parent, parent.end, np.array(tokens, np.int32), block, stored=stored)
        twin = parent.full.get(key(node.tokens))
        if twin is None:
            parent.add(node)
            self._list(node)
            return node
        if twin.stored is None:  # saved twice at the same time, or in another file too
            twin.stored = stored
        if twin.block is None:
            twin.block = block
            self._list(twin)
        elif block is not None:
            self._pool.give(block)
        return twin

    def grow(self, node: Node, tokens: Tokens) -> None:
        """More rows of a block are filled: it has all of `tokens` now."""
        assert node.parent is not None
        assert len(tokens) >= len(node.tokens)
        node.parent.remove(node)
        node.tokens, node.stored = np.array(tokens, np.int32), None
        node.parent.add(node)

    def add_state(self, node: Node, state: State) -> None:
        """Keep a state, if there is room for it."""
        if state.n_tokens in node.states or (state.data is not None and not self.hold(state, state.data)):
            return
        node.states[state.n_tokens] = state

    def hold(self, state: State, data: NDArray[np.uint8]) -> bool:
        """The data of a state is in memory; False when there is no room for it."""
        if id(data) not in self._held:
            if not self.make_room(len(data)):
                return False
            self.n_state_bytes += len(data)
        self._held[id(data)] = self._held.get(id(data), 0) + 1
        state.data = data
        return True

    def _free_data(self, state: State) -> None:
        data, state.data = state.data, None
        state.kept = None
        if data is None:
            return
        self._held[id(data)] -= 1
        if self._held[id(data)] == 0:
            del self._held[id(data)]
            self.n_state_bytes -= len(data)


def _may_go(node: Node) -> bool:
    """Whether its block may be given up: nobody uses it, and nothing is built on it unless it is on disk too."""
    is_spare = node.is_leaf or node.stored is not None
    return node.block is not None and node.n_pins == 0 and not node.is_growing and is_spare
