"""How every bench ends: Ctrl-C, a kill and an expected failure each with one sentence, and nothing left running."""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

from llamamg.errors import LoadError
from llamamg.library import LibraryNotFound
from llamamg.plugins import PluginError

from . import started
from .client import ServerError
from .record import ResultsError, everything
from .sides import SideError

EXPECTED = (SideError, ServerError, ResultsError, LibraryNotFound, LoadError, PluginError, ConnectionError)


def run(main: Callable[[], int]) -> None:
    """Run a bench's `main` and exit with its status."""
    started()
    signal.signal(signal.SIGTERM, _interrupt)
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        print("interrupted; nothing was written", file=sys.stderr)
        sys.exit(130)
    except EXPECTED as problem:
        print(f"error: {problem}", file=sys.stderr)
        sys.exit(1)


def close(result: dict[str, Any], table: str, file: Path | None) -> int:
    """Say what came of a bench with a bar, and keep it in `file`; its exit status."""
    print(table)
    if file:
        file.write_text(json.dumps({**result, "record": everything()}, indent=1) + "\n")
    return 0 if result["passed"] else 1


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt
