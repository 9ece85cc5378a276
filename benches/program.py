"""Running one benchmark, from `llamamg bench NAME` and from `python -m benches.NAME` alike."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any

from . import interrupt


def run_module(module: Any, arguments: Sequence[str], prog: str) -> int:
    """Parse and run; the exit status: 0 done, 1 an error said in one sentence, 130 interrupted.

    A module with `SERVE_FLAGS = True` gets everything that is not its own option in `args.flags`.
    """
    takes_flags = getattr(module, "SERVE_FLAGS", False)
    parser = argparse.ArgumentParser(
        prog=prog,
        description=module.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        usage=f"{prog} [options] [flags of llamamg serve]" if takes_flags else None,
        allow_abbrev=False,
        add_help=not takes_flags,  # -h would swallow flags such as -hf
    )
    if takes_flags:
        parser.add_argument("--help", action="help", help="show this and leave")
    module.add_arguments(parser)
    if takes_flags:
        args, flags = parser.parse_known_args(["--help" if word == "-h" else word for word in arguments])
        args.flags = flags
    else:
        args = parser.parse_args(arguments)
    interrupt.install()
    try:
        return int(module.run(args) or 0)
    except KeyboardInterrupt:
        print("interrupted: nothing was kept", file=sys.stderr)
        return 130
    except Exception as error:
        if not for_the_user(error):
            raise
        print(f"{prog}: error: {error}", file=sys.stderr)
        return 1


def alone(module: Any) -> int:
    """`python -m benches.NAME`, with the options that NAME has under `llamamg bench`."""
    name = (module.__spec__.name if module.__spec__ else module.__name__).rpartition(".")[2]
    return run_module(module, sys.argv[1:], f"python -m benches.{name}")


def for_the_user(error: Exception) -> bool:
    """Whether the text is a sentence for the user; everything else is a bug and keeps its traceback."""
    from llamamg.cli import for_the_user as known

    from .errors import BenchError
    from .launch import EXPECTED

    return isinstance(error, (BenchError, *EXPECTED)) or known(error)
