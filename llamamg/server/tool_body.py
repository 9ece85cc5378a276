"""What stands between `<tool_call>` and its end, read piece by piece: what the two syntaxes share."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

import orjson

from llamamg.server.tool_format import ToolCalls

SPACE = " \t\r\n"


@dataclass(slots=True, frozen=True)
class Begin:
    """A call begins."""

    name: str


@dataclass(slots=True, frozen=True)
class Arguments:
    """The next piece of its arguments' JSON."""

    text: str


@dataclass(slots=True, frozen=True)
class End:
    """The call is complete: its arguments are a JSON object."""


BodyEvent = Begin | Arguments | End


class State(Enum):
    """Of a body."""

    OPEN = auto()
    DONE = auto()
    BROKEN = auto()


def held(text: str, prefixes: frozenset[str], n_max: int) -> int:
    """How many characters at the end of `text` may be the beginning of a tag."""
    for n in range(min(len(text), n_max), 0, -1):
        if text[-n:] in prefixes:
            return n
    return 0


def proper_prefixes(*tags: str) -> tuple[frozenset[str], int]:
    """Every beginning of the tags that is not the whole one, and the longest one's length: what `held` takes."""
    found = frozenset(tag[:n] for tag in tags for n in range(1, len(tag)))
    return found, max(map(len, found))


def loaded(text: str) -> Any:
    """The value of a JSON text; None also where it is none."""
    try:
        return orjson.loads(text)
    except ValueError:  # of which the errors of a character that is half a pair and of too deep a nesting are kinds
        return None


def dumped(value: Any) -> str:
    """JSON without spaces."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


class Body(ABC):
    """One call. After `feed`, `state` says whether `rest` is what follows it (DONE) or where it stopped being one (BROKEN).

    Where it ends or breaks depends on the text alone, not on the pieces it comes in.
    """

    def __init__(self, tools: ToolCalls) -> None:
        self.tools = tools
        self.state = State.OPEN
        self.has_begun = False
        self.rest = ""
        self._parts: list[str] = []
        self._n_fed = 0
        self._n_sent = 0  # characters that are told: by the name, or as arguments

    def feed(self, text: str) -> list[BodyEvent]:
        """Take the next piece."""
        self._parts.append(text)
        self._n_fed += len(text)
        out: list[BodyEvent] = []
        self._read(text, out)
        return out

    @abstractmethod
    def _read(self, text: str, out: list[BodyEvent]) -> None: ...

    @property
    def raw(self) -> str:
        """The text of the call as the model wrote it, without `rest`."""
        return "".join(self._parts)[: self._n_fed - len(self.rest)]

    @property
    def unsent(self) -> str:
        """The end of `raw` that no event has told."""
        return self.raw[self._n_sent :]

    def _stop(self, state: State, rest: str) -> None:
        self.state, self.rest = state, rest

    def _begin(self, name: str, out: list[BodyEvent]) -> None:
        self.has_begun = True
        out.append(Begin(name))
