"""One side of a comparison in a process of its own; started by switching.Restarted. JSON lines on stdin and stdout."""

from __future__ import annotations

import json
import sys
from typing import Any

from . import started
from .flags import config_of, opened, unavailable, with_plugin
from .loads import LOADS, Sizes
from .session import Session


def main() -> int:
    """Serve stdin."""
    order = json.loads(sys.argv[1])
    try:
        config = with_plugin(config_of(order["flags"]), order["plugin"], order["on"])
        with opened(config) as engine:
            session = Session(engine, LOADS[order["load"]], Sizes(**order["sizes"]))
            _say({"ready": True})
            for line in sys.stdin:
                block = session.prepare() if line.strip() == "reference" else session.block()
                session.check(order["plugin"])
                _say(block.json())
    except Exception as error:  # the parent says it
        _say({"error": str(error) or type(error).__name__, "unavailable": unavailable(error)})
        return 1
    return 0


def _say(value: dict[str, Any]) -> None:
    print(json.dumps(value).replace("Infinity", "1e9"), flush=True)


if __name__ == "__main__":
    started()
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
