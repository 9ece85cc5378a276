"""Benchmarks: `python -m benches.NAME`. Results go to benches/results/<machine>/<date>-<what>/, JSON first."""

import sys

from llamamg.start import end_quietly, restore

# That is argv[0] while Python looks for NAME: Ctrl-C during its imports ends it at once, until the bench handles it itself.
if sys.argv[:1] == ["-m"]:
    end_quietly()


def started() -> None:
    """NAME is imported and begins: Ctrl-C is an exception again, for whoever has something to put in order."""
    restore()
