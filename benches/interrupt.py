"""Ctrl-C that is not lost. Python drops an exception that a signal raises inside a callback from C, as in the middle of loading
a model; so the signal is remembered too, and the loops look."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from types import FrameType

_seen = False
_held = False


def install() -> None:
    """Handle Ctrl-C and a kill alike: both raise KeyboardInterrupt. Main thread only."""
    global _seen
    _seen = False
    for number in (signal.SIGINT, signal.SIGTERM):
        if signal.getsignal(number) is not signal.SIG_IGN:  # as of a job in the background
            signal.signal(number, _handle)


def check() -> None:
    """Raises KeyboardInterrupt when a signal came."""
    if _seen:
        raise KeyboardInterrupt


@contextlib.contextmanager
def held() -> Iterator[None]:
    """Inside, a signal is only remembered: for calls into C that call back. `check` in the callback, and at the end."""
    global _held
    _held = True
    try:
        yield
    finally:
        _held = False
    check()


def _handle(number: int, frame: FrameType | None) -> None:
    global _seen
    _seen = True
    if not _held:
        raise KeyboardInterrupt
