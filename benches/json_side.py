"""The child's end of a bench's processes: one JSON object per line on stdout, errors too (json_child.py is the other end)."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from typing import Any

from . import started


def say(value: dict[str, Any]) -> None:
    """An answer."""
    print(json.dumps(value), flush=True)


def asked() -> Iterator[dict[str, Any]]:
    """What the parent asks, until it closes its end."""
    for line in sys.stdin:
        yield json.loads(line)


def serve(main: Callable[[dict[str, Any]], None]) -> None:
    """Run `main` on the order of the command line and exit: 0, 1 after an error, which the parent says, or 130."""
    started()
    try:
        main(json.loads(sys.argv[1]))
    except KeyboardInterrupt:
        sys.exit(130)
    except Exception as error:
        say({"error": str(error) or type(error).__name__})
        sys.exit(1)
    sys.exit(0)
