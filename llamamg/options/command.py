"""`llamamg serve`: read the options, check the model file, hand over to the server."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from importlib import import_module

from llamamg import __version__
from llamamg.config import Config
from llamamg.json_schema import schema_to_grammar
from llamamg.modelfile import open_model
from llamamg.options.declared import declared_options
from llamamg.options.describe import help_text
from llamamg.options.option import OptionError
from llamamg.options.resolve import parse
from llamamg.options.table import Table
from llamamg.plugins import PluginSet, discover
from llamamg.plugins.selection import select
from llamamg.start import quiet_interrupt


def run(arguments: Sequence[str]) -> int:
    """Serve until stopped; the exit status. Raises the errors that `llamamg.cli` prints."""
    with quiet_interrupt():  # most of it imports
        prepared = _prepare(arguments)
        if prepared is None:
            return 0
        server = import_module("llamamg.server.run")
    return int(server.serve(*prepared) or 0)


def _prepare(arguments: Sequence[str]) -> tuple[Config, PluginSet] | None:
    """Options become a config and its plugins; None where help or the version was asked for, and printed."""
    found = discover()
    table = Table(declared_options(found))
    parsed = parse(arguments, os.environ, table, found)
    if parsed.want == "help":
        print(help_text(table), end="")
        return None
    if parsed.want == "version":
        print(f"llamamg {__version__}")
        return None
    for note in parsed.notes:
        print(f"llamamg: note: {note}", file=sys.stderr)
    config = parsed.config
    assert config is not None
    # Unknown, broken and conflicting plugins are said now, not after the library is loaded; so is a bad model file.
    select(config.plugins, found)
    open_model(config.model.path)
    if parsed.json_schema:
        config = with_grammar(config, parsed.json_schema)
    return config, PluginSet.discover(config.plugins)


def with_grammar(config: Config, schema: str) -> Config:
    """The config with a JSON schema as default grammar; {} is any object, as in a request. Raises OptionError."""
    try:
        parsed = json.loads(schema)
        grammar = schema_to_grammar({"type": "object"} if parsed == {} else parsed)
    except (ValueError, RecursionError) as error:  # not JSON, or no schema that has a grammar
        raise OptionError(f"--json-schema cannot be turned into a grammar: {error}.") from error
    sampling = replace(config.generation.sampling, grammar=grammar)
    return replace(config, generation=replace(config.generation, sampling=sampling))
