"""A stand-in server with the cache on: its cells hold the tokens themselves, so a wrong row is a wrong answer."""

from __future__ import annotations

import time

import numpy as np

from llamamg.engine import Engine
from llamamg.plugins.testing import on
from llamamg.request import Finished, Request, Started
from llamamg.sequence import Sequence
from llamamg.testing import FakeCells, FakeRunner, ask, fake_engine
from llamamg_plugins.async_cache import AsyncCache
from llamamg_plugins.async_cache_parts import Parts


def by_history(sequence: Sequence, so_far: list[int]) -> int:
    """A stand-in model whose next token depends on every token and its place."""
    return 32 + sum(i * token for i, token in enumerate(so_far, 1)) % 95


class Server:
    """A fake engine stepped by the test, with the cache on."""

    def __init__(
        self, n_slots: int = 1, *, hybrid: bool = False, n_groups: int = 1, n_prefill_slots: int = 0,
        beside: tuple[type[object], ...] = (), **options: str,
    ) -> None:  # fmt: skip
        self.plugins = on(AsyncCache, *beside, options={"async-cache": options})
        self.engine: Engine
        self.runner: FakeRunner
        self.engine, self.runner, self.events = fake_engine(
            n_slots,
            n_ctx_slot=4096,
            hybrid=hybrid,
            plugins=self.plugins,
            next_token=by_history,
            n_batch=512,
            n_groups=n_groups,
            n_prefill_slots=n_prefill_slots,
        )
        self.plugins.start(self.engine)

    @property
    def cache(self) -> AsyncCache:
        return self.plugins._members["async-cache"].instance  # type: ignore[no-any-return]

    @property
    def parts(self) -> Parts:
        assert self.cache._parts is not None
        return self.cache._parts

    @property
    def cells(self) -> FakeCells:
        assert isinstance(self.engine.cells, FakeCells)
        return self.engine.cells

    def settle(self) -> None:
        """Step until nothing is to do and nothing is being copied."""
        until = time.monotonic() + 20
        while True:
            worked = self.engine.step()
            copying = [slot for slot in self.engine.slots if slot.copying is not None and not slot.copying.is_over]
            if not worked and not copying and not self.engine.queue_len():
                self.parts.saver.drain()
                return
            assert time.monotonic() < until, "still busy"
            if not worked:
                time.sleep(0.001)

    def run(self, *requests: Request) -> list[str]:
        for request in requests:
            self.engine.submit(request)
        self.settle()
        return [self.text(request) for request in requests]

    def text(self, request: Request) -> str:
        return next(e.text for id_, e in self.events if id_ == request.id and isinstance(e, Finished))

    def n_cached(self, request: Request) -> int:
        return next(e.n_cached for id_, e in self.events if id_ == request.id and isinstance(e, Started))

    def stop(self) -> None:
        self.plugins.stop()
        tree = self.parts.tree
        assert all(node.n_pins == 0 and not node.is_growing for node in tree.nodes())
        in_tree = sum(node.block is not None for node in tree.nodes())
        assert tree._pool.n_used == in_tree, "blocks were lost"


def talk(n: int, seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(40, 120, n).tolist()


def alone(prompt: list[int], n_predict: int = 8, *, hybrid: bool = False) -> str:
    """The answer without a cache."""
    engine, _, events = fake_engine(1, n_ctx_slot=4096, hybrid=hybrid, next_token=by_history, n_batch=512)
    engine.submit(ask(prompt, n_predict=n_predict))
    while engine.step():
        pass
    return next(e.text for _, e in events if isinstance(e, Finished))
