"""Where the program begins. Light itself, so that Ctrl-C finds it ready almost as soon as Python is."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def quiet_interrupt() -> Iterator[None]:
    """Inside, Ctrl-C ends the process at once and in silence, exit status 130. For imports: nothing is to be put in order."""
    before = signal.getsignal(signal.SIGINT)
    if before is not signal.default_int_handler:  # ignored, as in the background, or somebody else's
        yield
        return
    # An exception would be a traceback, or lost where C calls Python.
    signal.signal(signal.SIGINT, lambda number, frame: os._exit(128 + number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def main() -> int:
    """The `llamamg` program; its exit status."""
    with quiet_interrupt():
        from llamamg.cli import main as run
    return run()
