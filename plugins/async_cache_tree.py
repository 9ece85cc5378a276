"""What is cached, as a tree of blocks of tokens: conversations that begin alike share their blocks.

A path from the root is a prefix. A full block is found by the hash of its tokens and compared token by token, both by a dict
of their bytes; a block that is shared in part gives the tokens up to the first difference.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llamamg import N_ROWS, KeptState
from llamamg_plugins.async_cache_blocks import Block, BlockPool

Tokens = NDArray[np.int32]
BLOCK_BYTES = N_ROWS * np.dtype(np.int32).itemsize


@dataclass(slots=True, eq=False)
class State:
    """What does not grow with the tokens, as it was after `n_tokens`; a snapshot is shared with the slot that made it.

    `kept` may have it on its devices.
    """

    n_tokens: int
    pos_min: int
    pos_max: int
    data: NDArray[np.uint8] | None
    stored: Any = None  # where it lies on disk
    kept: KeptState | None = None

    @property
    def is_on_device(self) -> bool:
        """Whether it can be put into a sequence without a copy from main memory."""
        return self.kept is not None and self.kept.device is not None


@dataclass(slots=True, eq=False)
class Node:
    """`tokens` from position `start` on, their rows in `block`, or only on disk while that is None."""

    parent: Node | None
    start: int
    tokens: Tokens
    block: Block | None
    full: dict[bytes, Node] = field(default_factory=dict)  # children by the bytes of their N_ROWS tokens
    partial: list[Node] = field(default_factory=list)  # shorter children
    states: dict[int, State] = field(default_factory=dict)
    t_used: int = 0
    n_pins: int = 0  # transfers that read or write its block
    is_growing: bool = False  # rows behind its tokens are being written
    is_written: bool = False  # to disk, right now: its memory must not change
    stored: Any = None  # where its rows lie on disk

    @property
    def end(self) -> int:
        """The position behind its last token."""
        return self.start + len(self.tokens)

    @property
    def is_somewhere(self) -> bool:
        """Whether its rows are in memory or on disk; its file may have gone while somebody read what is built on it."""
        return self.block is not None or self.stored is not None

    @property
    def is_leaf(self) -> bool:
        """Whether nothing is built on it."""
        return not self.full and not self.partial


class Tree:
    """All of it on the engine thread."""

    def __init__(self, pool: BlockPool, n_bytes_max: int) -> None:
        self.root = Node(None, 0, np.empty(0, np.int32), None)
        self.n_bytes_max = n_bytes_max
        self.n_state_bytes = 0
        self.n_evicted = 0  # blocks
        self._pool, self._clock = pool, 0
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
        rest = tokens[n : n + N_ROWS]
        best, shared = None, 0
        for child in (*node.full.values(), *node.partial):
            same = common(child.tokens, rest)
            if same > shared and child.is_somewhere:
                best, shared = child, same
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
        """These were used just now; a parent never looks older than its children."""
        self._clock += 1
        for node in path:
            node.t_used = self._clock

    def nodes(self) -> Iterator[Node]:
        """All blocks."""
        stack = [self.root]
        while stack:
            node = stack.pop()
            stack += [*node.full.values(), *node.partial]
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
        if self.n_bytes + n_bytes <= self.n_bytes_max:
            return True
        heap = [(node.t_used, -node.start, id(node), node) for node in self.nodes() if _may_go(node)]
        heapq.heapify(heap)
        while self.n_bytes + n_bytes > self.n_bytes_max and heap:
            node = heapq.heappop(heap)[3]
            parent = node.parent
            self.evict(node)
            if parent is not None and parent is not self.root and parent.stored is None and _may_go(parent):
                heapq.heappush(heap, (parent.t_used, -parent.start, id(parent), parent))
        return self.n_bytes + n_bytes <= self.n_bytes_max

    def evict(self, node: Node) -> None:
        """Free its memory; what is on disk is still known."""
        self.n_evicted += 1
        if node.stored is None:
            self.remove(node)
            return
        self._free_block(node)
        for state in node.states.values():
            if state.stored is not None:
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
        if node.parent.full.get(key(node.tokens)) is node:
            del node.parent.full[key(node.tokens)]
        else:
            node.parent.partial.remove(node)
        for at in list(node.states):
            self._drop_state(node, at)
        self._free_block(node)
        node.parent = None

    def _free_block(self, node: Node) -> None:
        if node.block is not None:
            self._pool.give(node.block)
            node.block = None

    def add(self, parent: Node, tokens: Tokens, block: Block | None, stored: Any = None) -> Node:
        """A new block behind `parent`."""
        node = Node(parent, parent.end, np.array(tokens, np.int32), block, stored=stored, t_used=self._clock)
        if len(tokens) == N_ROWS:
            twin = parent.full.get(key(node.tokens))
            if twin is not None:  # saved twice at the same time, or in another file too
                if twin.stored is None:
                    twin.stored = stored
                if twin.block is None:
                    twin.block = block
                elif block is not None:
                    self._pool.give(block)
                return twin
            parent.full[key(node.tokens)] = node
        else:
            parent.partial.append(node)
        return node

    def grow(self, node: Node, tokens: Tokens) -> None:
        """More rows of a block are filled: it has all of `tokens` now."""
        assert node.parent is not None
        assert len(tokens) >= len(node.tokens)
        node.tokens, node.stored = np.array(tokens, np.int32), None
        if len(tokens) == N_ROWS and key(node.tokens) not in node.parent.full:
            node.parent.partial.remove(node)
            node.parent.full[key(node.tokens)] = node

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

    def _drop_state(self, node: Node, at: int) -> None:
        self._free_data(node.states.pop(at))

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


def key(tokens: Tokens) -> bytes:
    """What full blocks are found by."""
    return np.ascontiguousarray(tokens, np.int32).tobytes()


def common(a: Tokens, b: Tokens) -> int:
    """How many leading tokens are the same."""
    n = min(len(a), len(b))
    if not n or a[0] != b[0]:
        return 0
    differs = a[:n] != b[:n]
    return int(differs.argmax()) if differs.any() else n
