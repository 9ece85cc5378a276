"""All options of `llamamg serve`, found by name and by environment variable."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator

from llamamg.options import context, foreign, generation, model, own, sampling, server, unsupported
from llamamg.options.option import Option, OptionError

CORE: tuple[Option, ...] = (
    *model.OPTIONS,
    *context.OPTIONS,
    *generation.OPTIONS,
    *sampling.OPTIONS,
    *server.OPTIONS,
    *own.OPTIONS,
)
REST: tuple[Option, ...] = (*foreign.OPTIONS, *unsupported.OPTIONS)


class Table:
    """The options of one start: llama-server's, ours, and those that installed plugins declare."""

    def __init__(self, declared: Iterable[Option] = ()) -> None:
        self.options: list[Option] = []
        self.by_name: dict[str, tuple[Option, bool]] = {}  # name -> (option, whether the name is a negative)
        self.by_env: dict[str, tuple[Option, bool]] = {}
        self.clashes: list[str] = []  # sentences about declared names that are taken
        for option in (*CORE, *declared, *REST):
            self._add(option)

    def _add(self, option: Option) -> None:
        names = [(name, False) for name in option.names] + [(name, True) for name in option.negatives]
        variables = [(name, negative) for name, negative in ((option.env, False), (option.negative_env, True)) if name]
        taken = [name for name, _ in names if name in self.by_name]
        if taken and option in REST:
            names = [pair for pair in names if pair[0] not in self.by_name]  # an installed plugin took it over
        elif taken:
            self.clashes.append(
                f"{taken[0]} is an option of the server already, a plugin cannot declare it: it is left out"
            )
            return
        variables = [pair for pair in variables if pair[0] not in self.by_env]
        if not names and not variables:
            return
        self.options.append(option)
        self.by_name.update((name, (option, negative)) for name, negative in names)
        self.by_env.update((name, (option, negative)) for name, negative in variables)

    def __iter__(self) -> Iterator[Option]:
        return iter(self.options)

    def find(self, name: str, source: str = "") -> tuple[Option, bool]:
        """The option of a name as typed (`--a_b` is `--a-b`). Raises OptionError that names the nearest one."""
        spelled = name.replace("_", "-") if name.startswith("--") else name
        if spelled in self.by_name:
            return self.by_name[spelled]
        near = difflib.get_close_matches(spelled, self.by_name, n=1, cutoff=0.6)
        hint = f"; did you mean {near[0]}?" if near else ""
        where = f"{source}: " if source else ""
        raise OptionError(
            f"{where}unknown option {name}{hint} `llamamg serve --help` lists all options.".replace("  ", " ")
        )
