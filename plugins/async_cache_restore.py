"""Restoring: what of what is kept a prompt can go on from, and what came of that."""

from __future__ import annotations

import logging
from typing import Any

from numpy.typing import NDArray

from llamamg import Cells, Copier, Workers
from llamamg_plugins.async_cache_disk import Disk
from llamamg_plugins.async_cache_folder import BadFile
from llamamg_plugins.async_cache_hit import Hit
from llamamg_plugins.async_cache_kept import KeptStates
from llamamg_plugins.async_cache_node import Tokens
from llamamg_plugins.async_cache_tree import Tree

log = logging.getLogger(__name__)
N_MIN = 16  # tokens; less is computed sooner than looked for


class Restorer:
    """All of it on the engine thread, but for `_load`."""

    def __init__(
        self, engine: Any, cells: Cells, tree: Tree, copier: Copier, workers: Workers, kept: KeptStates,
        disk: Disk | None,
    ) -> None:  # fmt: skip
        self._engine, self._kv = engine, engine.kv
        self._cells, self._tree, self._copier, self._workers = cells, tree, copier, workers
        self._kept, self._disk = kept, disk
        self.under_way: list[Hit] = []
        self.n_hits = self.n_misses = 0
        self.n_failed = 0  # hits that came to nothing
        self.n_tokens = 0  # restored

    def find(self, prompt: Tokens) -> Hit | None:
        """The longest prefix that can be continued."""
        needs_state = self._kv.needs_checkpoints
        # A state cannot go back by the one token that must be computed.
        path, n = self._tree.find(prompt[: len(prompt) - needs_state])
        state = None
        if needs_state:
            state = self._tree.best_state(path, n)
            n = state.n_tokens if state is not None else 0
        if n < N_MIN:
            self.n_misses += 1
            return None
        path = [node for node in path if node.start < n]
        return Hit(
            path, prompt[:n], state, self._tree, self._cells, self._kv, self._copier, self._workers, self._kept,
            self._load, self._ended, is_alone=lambda: self._engine.stats.n_requests_processing == 0,
            under_way=self.under_way,
        )  # fmt: skip

    def has(self, tokens: Tokens) -> bool:
        """Whether all of this is there, so that a prompt that goes on with it could do so from its end."""
        path, n = self._tree.find(tokens)
        if n < len(tokens):
            return False
        state = self._tree.best_state(path, n) if self._kv.needs_checkpoints else None
        return state is not None and state.n_tokens == n if self._kv.needs_checkpoints else True

    def go_on_beside(self, within_s: float) -> None:
        """Make more copies for each hit, where there is time."""
        for hit in self.under_way:
            hit.go_on_beside(within_s)

    def _load(self, stored: Any, memory: NDArray[Any]) -> None:
        assert self._disk is not None
        if stored is None:
            raise RuntimeError("its file went meanwhile")
        self._disk.load(stored, memory)

    def _ended(self, hit: Hit) -> None:
        if hit.n_tokens:
            self.n_hits += 1
            self.n_tokens += hit.n_tokens - hit.n_kept
            if self._disk is not None:
                self._disk.touch(hit.path)
            return
        self.n_failed += hit.failed is not None
        if hit.failed is not None:
            log.warning("stored state could not be restored, the prompt is computed: %s", hit.failed)
        if isinstance(hit.failed, BadFile) and self._disk is not None:
            self._disk.failed(hit.failed)
