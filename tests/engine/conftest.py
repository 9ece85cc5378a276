"""Engines for the engine's tests: stand-in ones with plugins of the test's own, and real ones over small models."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from llamamg import library as native_library
from llamamg.config import Config, ContextConfig, GenerationConfig, ModelConfig, PluginsConfig
from llamamg.engine import Engine
from llamamg.loading import load
from llamamg.plugins import PluginSet
from llamamg.plugins.discovery import Found
from llamamg.request import Event, Failed, Finished, Request
from llamamg.testing import fake_engine


def plugin_set(*classes: type[Any], config: Config) -> tuple[PluginSet, Config]:
    """Plugins of a test, all enabled, as if their packages were installed."""
    found = {
        cls.declaration.name: Found(cls.declaration.name, False, "a test", cls, cls.declaration) for cls in classes
    }
    plugins = PluginSet(PluginsConfig(enable=tuple(found)), found)
    return plugins, plugins.configure(config, [])


@pytest.fixture
def with_plugins() -> Callable[..., Any]:
    """`with_plugins(Class, n_draft_max=3, **options of fake_engine)`: as fake_engine, with these plugins on."""

    def make(*classes: type[Any], n_slots: int = 2, n_draft_max: int = 0, **options: Any) -> Any:
        context = ContextConfig(n_parallel=n_slots, n_draft_max=n_draft_max)
        plugins, config = plugin_set(*classes, config=Config(ModelConfig(Path("fake.gguf")), context))
        return fake_engine(n_slots, plugins=plugins, config=config, **options)

    return make


@dataclass
class Live:
    """A running engine over a real model; `ask` waits for the last events of requests sent together."""

    engine: Engine
    events: list[tuple[int, Event]] = field(default_factory=list)
    _changed: threading.Condition = field(default_factory=threading.Condition)

    def __post_init__(self) -> None:
        self.engine.deliver = self._deliver

    def _deliver(self, pairs: list[tuple[int, Event]]) -> None:
        with self._changed:
            self.events += pairs
            self._changed.notify_all()

    def of(self, request: Request) -> list[Event]:
        """The events of one request so far."""
        return [event for id_, event in list(self.events) if id_ == request.id]

    def wait(self, condition: Callable[[], bool], timeout_s: float = 120.0) -> None:
        """Wait until `condition` holds; it is looked at whenever events arrive."""
        with self._changed:
            assert self._changed.wait_for(condition, timeout_s), "the engine did not get there in time"

    def last(self, request: Request) -> Finished | Failed:
        """The last event of a request, waited for."""
        self.wait(lambda: any(isinstance(event, Finished | Failed) for event in self.of(request)))
        return next(event for event in self.of(request) if isinstance(event, Finished | Failed))

    def ask(self, *requests: Request) -> list[Finished | Failed]:
        """Send all, wait for all."""
        for request in requests:
            self.engine.submit(request)
        return [self.last(request) for request in requests]

    def tokens(self, *requests: Request) -> list[list[int]]:
        """The generated tokens of requests sent together."""
        answers = self.ask(*requests)
        for answer in answers:
            assert isinstance(answer, Finished), answer
        return [list(answer.tokens) for answer in answers if isinstance(answer, Finished)]


@pytest.fixture
def live(library: native_library.Library) -> Iterator[Callable[..., Live]]:
    """`live(path, start=True, plugins=(), context_shift=False, **options of ContextConfig)`; stopped after the test."""
    running: list[Live] = []

    def make(
        path: Path,
        *,
        start: bool = True,
        plugins: tuple[type[Any], ...] = (),
        shift: bool = False,
        rpc: tuple[str, ...] = (),
        guard_replay: int = 0,
        **options: Any,
    ) -> Live:
        context = ContextConfig(**{"n_ctx": 1024, "n_parallel": 1, "n_threads": 1, "warmup": False} | options)
        wanted = PluginsConfig(guard_replay=guard_replay)
        config = Config(ModelConfig(path, rpc=rpc), context, GenerationConfig(context_shift=shift), plugins=wanted)
        found = {c.declaration.name: Found(c.declaration.name, False, "a test", c, c.declaration) for c in plugins}
        made = Live(load(config, PluginSet(PluginsConfig(none=not found, enable=tuple(found)), found)))
        running.append(made)
        if start:
            made.engine.start()
        return made

    yield make
    for made in running:
        made.engine.stop(0.0)
