"""`llamamg serve`: read the options, check the model file, hand over to the server."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib import import_module

from llamamg import __version__
from llamamg.modelfile import open_model
from llamamg.options.declared import declared_options
from llamamg.options.describe import help_text
from llamamg.options.resolve import parse
from llamamg.options.table import Table
from llamamg.plugins import PluginSet, discover


def run(arguments: Sequence[str]) -> int:
    """Serve until stopped; the exit status. Raises the errors that `llamamg.cli` prints."""
    found = discover()
    table = Table(declared_options(found))
    parsed = parse(arguments, os.environ, table, found)
    if parsed.want == "help":
        print(help_text(table), end="")
        return 0
    if parsed.want == "version":
        print(f"llamamg {__version__}")
        return 0
    for note in parsed.notes:
        print(f"llamamg: note: {note}", file=sys.stderr)
    config = parsed.config
    assert config is not None
    open_model(config.model.path)  # a missing, foreign or truncated file is said now, not after the library is loaded
    plugins = PluginSet.discover(config.plugins)
    server = import_module("llamamg.server.run")
    status = server.serve(config, plugins)
    return int(status or 0)
