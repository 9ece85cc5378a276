"""From `llamamg serve`'s flags to an engine in this process."""

from __future__ import annotations

import contextlib
import gc
import hashlib
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from tqdm import tqdm

from llamamg.config import Config
from llamamg.engine import Engine
from llamamg.loading import load, spare_collector
from llamamg.modelfile import open_model
from llamamg.options.declared import declared_options
from llamamg.options.resolve import parse
from llamamg.options.table import Table
from llamamg.paths import home
from llamamg.plugins import PluginSet, Unavailable, discover
from llamamg.plugins.selection import select
from llamamg.server.run import SWITCH_INTERVAL_S

from . import interrupt
from .errors import BenchError

MODEL_FLAGS = ("-m", "--model")
MICRO_SEED = 1
MICRO_WEIGHTS = {"micro": "default", "micro-f32": "f32"}


def config_of(flags: Sequence[str]) -> Config:
    """The configuration that `llamamg serve` would have. Raises OptionError, ModelFileError or PluginError."""
    found = discover()
    parsed = parse(flags, os.environ, Table(declared_options(found)), found)
    if parsed.config is None:
        raise BenchError(f"--{parsed.want} belongs to `llamamg serve`: leave it out")
    for note in parsed.notes:
        print(f"llamamg: note: {note}", file=sys.stderr)
    select(parsed.config.plugins, found)
    open_model(parsed.config.model.path)
    return parsed.config


def with_plugin(config: Config, name: str, enabled: bool) -> Config:
    """The same start with one plugin named, or left out."""
    p = config.plugins
    enable, disable = ([other for other in names if other != name] for names in (p.enable, p.disable))
    if enabled:
        only = p.only or p.none  # `none` and one name is `only:` that name
        return replace(
            config, plugins=replace(p, enable=(*enable, name), disable=tuple(disable), only=only, none=False)
        )
    keeps = not p.only or bool(enable)
    return replace(
        config,
        plugins=replace(
            p, enable=tuple(enable), disable=(*disable, name), only=p.only and keeps, none=p.none or not keeps
        ),
    )


def take_models(flags: Sequence[str]) -> tuple[list[str], list[str]]:
    """Every model named by -m, and the flags without them."""
    models, rest, words = [], [], iter(flags)
    for word in words:
        if word in MODEL_FLAGS:
            value = next(words, None)
            if value is None:
                raise BenchError(f"{word} needs a model file")
            models.append(value)
        elif word.startswith("--model="):
            models.append(word.partition("=")[2])
        else:
            rest.append(word)
    if not models and os.environ.get("LLAMA_ARG_MODEL"):
        models.append(os.environ["LLAMA_ARG_MODEL"])
    return models, rest


def model_path(name: str) -> Path:
    """A model file; `demo` is the demo model, `micro` a small synthetic hybrid and `micro-f32` the same with weights that are
    not quantized, made on first use."""
    if name == "demo":
        from llamamg import demo

        return demo.demo_model()
    if name in MICRO_WEIGHTS:
        return _micro(name)
    return Path(name)


def _micro(name: str) -> Path:
    from llamamg import synth

    sources = sorted(Path(synth.__file__).parent.glob("*.py"))
    state = hashlib.sha256(b"".join(source.read_bytes() for source in sources)).hexdigest()[:8]  # of what writes it
    path = home() / "models" / f"{name}-{state}.gguf"
    if not path.is_file():
        path.parent.mkdir(parents=True, exist_ok=True)
        synth.write_model(path, preset="micro", seed=MICRO_SEED, weights=MICRO_WEIGHTS[name])
    return path


@contextlib.contextmanager
def opened(config: Config, plugins: PluginSet | None = None, handle: Any = None) -> Iterator[Engine]:
    """An engine that is stepped by its user: loaded, never started, freed at the end. `plugins` replaces the installed ones.

    `handle` is a model that is loaded already, and stays loaded.
    """
    # As in the server: threads that copy or compute do not wait for each other.
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    plugins = plugins or PluginSet.discover(config.plugins)
    title = f"loading {config.model.path.name}"
    with tqdm(total=100, desc=title, unit="%", leave=False, disable=None) as bar, interrupt.held():
        engine = load(config, plugins, progress=lambda part: _show(bar, part), handle=handle)
    spare_collector()  # as the server does
    try:
        yield engine
    finally:
        engine.deliver = lambda pairs: None  # what is cut off now is nobody's failure
        engine.plugins.stop()
        engine.stop()
        gc.unfreeze()


def _show(bar: Any, part: float) -> None:
    interrupt.check()
    bar.update(int(100 * part) - bar.n)


def unavailable(error: BaseException) -> str | None:
    """Why a plugin does not apply here, if that is what the error comes from."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, Unavailable):
            return str(cause)
        cause = cause.__cause__
    return None
