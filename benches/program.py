"""Run one bench by itself: `python -m benches.NAME` with the options it has under `llamamg bench NAME`."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from llamamg.cli import for_the_user

from .errors import BenchError


def alone(module: Any) -> int:
    """Parse the command line for `module` (`add_arguments`, `run`) and run it; the exit status."""
    name = module.__spec__.name if module.__spec__ else module.__name__
    parser = argparse.ArgumentParser(prog=f"python -m {name}", description=module.__doc__)
    module.add_arguments(parser)
    try:
        return int(module.run(parser.parse_args()) or 0)
    except KeyboardInterrupt:
        print("interrupted; nothing was written", file=sys.stderr)
        return 130
    except Exception as error:
        if not isinstance(error, BenchError) and not for_the_user(error):
            raise
        print(f"error: {error}", file=sys.stderr)
        return 1
