"""What plugins may ask about the model and the native library. Importing this loads nothing native."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from llamamg.abi import QsaStats
    from llamamg.config import Config


def architecture(config: Config) -> str:
    """The model's architecture, from its file; empty without a model. Raises ModelFileError."""
    from llamamg.modelfile import open_model

    return open_model(config.model.path).architecture if config.model.path.is_file() else ""


def has_switch(name: str) -> bool:
    """Does the loaded library have this native switch? True while none is loaded: nothing speaks against it."""
    from llamamg import library

    loaded = library.current()
    return loaded is None or any(switch.name == name for switch in loaded.mg.switches())


def qsa_stats() -> QsaStats:
    """Counters of native QSA of the loaded library; zeros while none is loaded."""
    from llamamg import library
    from llamamg.abi import QsaStats

    loaded = library.current()
    return loaded.mg.qsa_stats() if loaded else QsaStats(0, 0, 0, 0)
