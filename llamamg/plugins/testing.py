"""Plugin sets made from classes, through the same discovery as installed packages; for tests of plugins, anybody's."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llamamg.config import Config, ContextConfig, ModelConfig, PluginsConfig
from llamamg.guard import Guard
from llamamg.hookspecs import hookimpl
from llamamg.plugins.declaration import plugin as declare
from llamamg.plugins.pluginset import PluginSet


@dataclass(frozen=True, slots=True)
class Dist:
    """The package an entry point comes from; "llamamg" makes its plugins shipped ones."""

    name: str


@dataclass(frozen=True, slots=True)
class Point:
    """An entry point that leads to a class, or raises when it is loaded."""

    name: str
    target: Any
    dist: Dist = Dist("somebody-elses")

    @property
    def value(self) -> str:
        """Where a real entry point would say its class is."""
        return f"module_of_{self.name}:Plugin"

    def load(self) -> Any:
        """The class."""
        if isinstance(self.target, BaseException):
            raise self.target
        return self.target


def config(n_parallel: int = 4, **context: Any) -> Config:
    """A configuration without a model behind it."""
    return Config(ModelConfig(Path("model.gguf")), ContextConfig(n_parallel=n_parallel, **context))


def declared(name: str, base: type[Any] = object, **declaration: Any) -> type[Any]:
    """A plugin class with the hooks of `base`."""
    words: dict[str, Any] = {"summary": "s", "helps": "h", "hurts": "u", "guard": Guard.exact(), **declaration}
    return declare(name=name, **words)(type(name.title().replace("-", ""), (base,), {}))


def plugin(name: str, hooks: Mapping[str, Callable[..., Any]] | None = None, **declaration: Any) -> type[Any]:
    """A plugin class whose hooks are the given functions (self first), by hook name."""
    marked = {hook: hookimpl(function) for hook, function in (hooks or {}).items()}
    return declared(name, type("Base", (), marked), **declaration)


def unconfigured(
    *classes: type[Any], shipped: tuple[type[Any], ...] = (), points: tuple[Point, ...] = (), **plugins: Any
) -> PluginSet:
    """A discovered set; `plugins` are fields of PluginsConfig."""
    found = [Point(cls.declaration.name, cls) for cls in classes]
    found += [Point(cls.declaration.name, cls, Dist("llamamg")) for cls in shipped]
    return PluginSet.discover(PluginsConfig(**plugins), [*found, *points])


def on(*classes: type[Any], **plugins: Any) -> PluginSet:
    """A configured set with all the given classes enabled by name."""
    made = unconfigured(*classes, enable=tuple(cls.declaration.name for cls in classes), **plugins)
    made.configure(config())
    return made
