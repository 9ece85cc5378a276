"""The `llamamg` program: one subcommand per task, each in a module of its own that is imported only when it is used."""

from __future__ import annotations

import argparse
import difflib
import sys
from collections.abc import Sequence
from importlib import import_module

from llamamg.start import quiet_interrupt

# name -> (module with add_arguments(parser) and run(args) -> int, one line about it)
COMMANDS = {
    "plugins": ("llamamg.plugin_cli", "list plugins and their options"),
    "doctor": ("llamamg.doctor", "say which native build, switches and devices are found"),
    "build": ("llamamg.native.build", "build the native libraries"),
    "bench": ("llamamg.bench_cli", "measure what plugins gain, and check that answers stay the same"),
    "cache": ("llamamg.cache_cli", "list, delete and check saved sequences"),
    "synth": ("llamamg.synth", "write a model with random weights, for tests and benchmarks"),
    "patches": ("llamamg.native.patches", "apply, check, refresh or export the patch series"),
}
SERVE = ("serve", "serve a model over HTTP with llama-server's options")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one subcommand; returns the exit status: 0 done, 1 an error said in one sentence, 130 interrupted."""
    rest = list(sys.argv[1:] if arguments is None else arguments)
    try:
        return _dispatch(rest)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader of our output is gone, e.g. `| head`
        sys.stderr.close()
        return 1
    except Exception as error:
        if not for_the_user(error):
            raise
        print(f"llamamg: error: {error}", file=sys.stderr)
        return 1


def _dispatch(rest: list[str]) -> int:
    if not rest or rest[0] in ("-h", "--help", "help"):
        print(_overview(), end="")
        return 0 if rest else 1
    name = rest.pop(0)
    if name in ("--version", "version"):
        from llamamg import __version__

        print(f"llamamg {__version__}")
        return 0
    if name == SERVE[0]:
        with quiet_interrupt():
            from llamamg.options.command import run as serve

        return serve(rest)
    if name not in COMMANDS:
        near = difflib.get_close_matches(name, [SERVE[0], *COMMANDS], n=1)
        hint = f" did you mean {near[0]}?" if near else ""
        print(f"llamamg: error: there is no command {name!r};{hint} `llamamg --help` lists them", file=sys.stderr)
        return 1
    with quiet_interrupt():
        module = import_module(COMMANDS[name][0])
    parser = argparse.ArgumentParser(prog=f"llamamg {name}", description=module.__doc__)
    module.add_arguments(parser)
    return int(module.run(parser.parse_args(rest)) or 0)


def _overview() -> str:
    lines = ["Usage: llamamg COMMAND [OPTION…]", ""]
    lines += [
        f"  {name:<9} {summary}" for name, summary in (SERVE, *((name, entry[1]) for name, entry in COMMANDS.items()))
    ]
    return "\n".join([*lines, "", "`llamamg COMMAND --help` lists a command's options.", ""])


def for_the_user(error: Exception) -> bool:
    """Whether the text is a sentence for the user; everything else is a bug and keeps its traceback."""
    from llamamg.errors import LoadError
    from llamamg.library import LibraryNotFound
    from llamamg.modelfile import ModelFileError
    from llamamg.options.option import OptionError
    from llamamg.plugins import PluginError

    return isinstance(error, (LoadError, LibraryNotFound, ModelFileError, OptionError, PluginError))
