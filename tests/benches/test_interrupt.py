"""A signal that Python itself would lose."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benches import interrupt
from benches.loads import LOADS, Sizes
from benches.session import Session
from llamamg.config import ModelConfig
from llamamg.model import load_model

from .fake_clock import World, engine_with

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="signals")


@pytest.fixture(autouse=True)
def _handlers() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    interrupt.install()
    yield
    interrupt.install()
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_signal_inside_a_callback_from_c_ends_the_next_block(number: int, monkeypatch: Any) -> None:
    monkeypatch.setattr(sys, "unraisablehook", lambda *_: None)
    world = World(0)
    session = Session(engine_with("same", world), LOADS["solo"], Sizes(depth=24), world.clock)
    callback = ctypes.CFUNCTYPE(None)(lambda: os.kill(os.getpid(), number))
    callback()  # the KeyboardInterrupt is dropped here
    with pytest.raises(KeyboardInterrupt):
        session.prepare()


def test_a_new_run_forgets_the_last_signal() -> None:
    with pytest.raises(KeyboardInterrupt):
        os.kill(os.getpid(), signal.SIGINT)
    interrupt.install()
    interrupt.check()


def test_a_held_signal_is_raised_at_the_end_and_in_callbacks() -> None:
    heard = []

    def callback() -> None:
        os.kill(os.getpid(), signal.SIGINT)
        heard.append("not raised there")
        interrupt.check()

    with pytest.raises(KeyboardInterrupt), interrupt.held():
        callback()
    assert heard
    interrupt.install()
    with pytest.raises(KeyboardInterrupt), interrupt.held():
        os.kill(os.getpid(), signal.SIGINT)


def test_loading_ends_with_what_its_progress_raised(micro_model: Path, library: Any) -> None:
    def progress(part: float) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        load_model(library, ModelConfig(micro_model), progress)
