"""The command line of `llamamg serve`: a declarative table of llama-server's options, and its reader."""

from llamamg.options.option import Option, OptionError

__all__ = ["Option", "OptionError"]
