"""How every bench ends: Ctrl-C, a kill and an expected failure each with one sentence, and nothing left running."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable
from types import FrameType

from llamamg.errors import LoadError
from llamamg.library import LibraryNotFound
from llamamg.plugins import PluginError

from .client import ServerError
from .record import ResultsError
from .sides import SideError

EXPECTED = (SideError, ServerError, ResultsError, LibraryNotFound, LoadError, PluginError, ConnectionError)


def run(main: Callable[[], int]) -> None:
    """Run a bench's `main` and exit with its status."""
    signal.signal(signal.SIGTERM, _interrupt)
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        print("interrupted; nothing was written", file=sys.stderr)
        sys.exit(130)
    except EXPECTED as problem:
        print(f"error: {problem}", file=sys.stderr)
        sys.exit(1)


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt
