"""Models and the native library that tests of several parts share."""

from __future__ import annotations

import hashlib
import os
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from llamamg import library as native_library
from llamamg import paths, synth

STALE_AFTER_S = 24 * 3600


def pytest_configure(config: pytest.Config) -> None:
    """A job in the background has Ctrl-C ignored, and hands that down to every program a test starts."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def library() -> native_library.Library:
    """The native build under test; a process can hold one."""
    return native_library.load()


@pytest.fixture(scope="session")
def synth_cache() -> Path:
    """Folder of synthetic models, one per state of the code that writes them."""
    sources = sorted(Path(synth.__file__).parent.glob("*.py"))
    state = hashlib.sha256(b"".join(source.read_bytes() for source in sources)).hexdigest()[:16]
    root = paths.home() / "test-models"
    folder = root / state
    folder.mkdir(parents=True, exist_ok=True)
    os.utime(folder)
    for other in root.iterdir():
        if time.time() - other.stat().st_mtime > STALE_AFTER_S:
            shutil.rmtree(other, ignore_errors=True)
    return folder


@pytest.fixture(scope="session")
def synth_model(synth_cache: Path) -> Callable[..., Path]:
    """`synth_model(seed=2, weights="f32")`: a synthetic model with these `write_model` options, written once."""

    def model(**options: Any) -> Path:
        name = "-".join(f"{key}={options[key]}" for key in sorted(options)) or "micro"
        path = synth_cache / f"{name}.gguf"
        return path if path.is_file() else synth.write_model(path, **options)

    return model


@pytest.fixture(scope="session")
def micro_model(synth_model: Callable[..., Path]) -> Path:
    """Random `qwen4exp` model with sparse attention, ChatML template and the GPT-2 vocabulary; 34 MB."""
    return synth_model()


@pytest.fixture(scope="session")
def smol_model() -> Path:
    """The real demo model, downloaded on first use."""
    from llamamg import demo

    return demo.demo_model()
