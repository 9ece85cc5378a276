"""Blocks of the tree and states that belong to them, and how children of a block are found by their tokens."""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llamamg import N_ROWS, KeptState
from llamamg_plugins.async_cache_blocks import Block

Tokens = NDArray[np.int32]


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
    children: list[Node] = field(default_factory=list)  # all of them, in the order of these bytes
    states: dict[int, State] = field(default_factory=dict)
    n_pins: int = 0  # transfers that read or write its block
    is_growing: bool = False  # rows behind its tokens are being written
    is_written: bool = False  # queued for disk: its memory must not change
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
        return not self.children

    def add(self, child: Node) -> None:
        """Take a child. A full one that is there already stays the one that is found by its bytes."""
        name = _key_of(child)
        insort(self.children, child, key=_key_of)
        if len(child.tokens) == N_ROWS:
            self.full.setdefault(name, child)

    def remove(self, child: Node) -> None:
        """Forget a child, by the tokens it was added with."""
        name = _key_of(child)
        at = bisect_left(self.children, name, key=_key_of)
        while self.children[at] is not child:  # another one has the same tokens
            at += 1
        del self.children[at]
        if self.full.get(name) is child:
            del self.full[name]

    def nearest(self, tokens: Tokens) -> tuple[Node | None, int]:
        """The child that begins like `tokens` for longest, and how long; children that are nowhere do not count.

        It is a neighbour of the place that these tokens would have in the order.
        """
        at = bisect_left(self.children, key(tokens), key=_key_of)
        best, shared = None, 0
        for side in (range(at - 1, -1, -1), range(at, len(self.children))):
            child = next((self.children[i] for i in side if self.children[i].is_somewhere), None)
            if child is not None and (same := common(child.tokens, tokens)) > shared:
                best, shared = child, same
        return best, shared


def key(tokens: Tokens) -> bytes:
    """What blocks are found by."""
    return np.ascontiguousarray(tokens, np.int32).tobytes()


def _key_of(node: Node) -> bytes:
    return node.tokens.tobytes()


def common(a: Tokens, b: Tokens) -> int:
    """How many leading tokens are the same."""
    n = min(len(a), len(b))
    if not n or a[0] != b[0]:
        return 0
    differs = a[:n] != b[:n]
    return int(differs.argmax()) if differs.any() else n
