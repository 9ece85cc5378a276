"""Where the program begins. Light itself, so that Ctrl-C finds it ready almost as soon as Python is."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


def end_quietly() -> bool:
    """From now on, until `restore`, Ctrl-C ends the process at once and in silence, exit status 130. False where that is not
    ours to say: on another thread than the main one, with signals ignored, as in the background, or somebody else's handler.
    """
    # Only the main thread may set handlers.
    is_ours = threading.current_thread() is threading.main_thread()
    if not is_ours or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        return False
    signal.signal(signal.SIGINT, _end)
    return True


def restore() -> None:
    """Ctrl-C raises KeyboardInterrupt again, if `end_quietly` changed that."""
    if signal.getsignal(signal.SIGINT) is _end and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, signal.default_int_handler)


@contextmanager
def quiet_interrupt() -> Iterator[None]:
    """`end_quietly` inside. For imports: nothing is to be put in order."""
    if not end_quietly():
        yield
        return
    try:
        yield
    finally:
        restore()


def _end(number: int, frame: FrameType | None) -> None:
    os._exit(128 + number)  # an exception would be a traceback, or lost where C calls Python


def main() -> int:
    """The `llamamg` program; its exit status."""
    with quiet_interrupt():
        from llamamg.cli import main as run
    return run()
