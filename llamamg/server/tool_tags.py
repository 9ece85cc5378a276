"""A call in tags: `<function=NAME>`, in it `<parameter=KEY>` with a value, whose JSON is made while it is read."""

from __future__ import annotations

import re

from llamamg.server.tool_body import (
    SPACE,
    Arguments,
    Body,
    BodyEvent,
    End,
    State,
    dumped,
    held,
    loaded,
    proper_prefixes,
)
from llamamg.server.tool_format import FUNCTION, ParameterKind, ToolCalls

_PARAMETER, _END_FUNCTION = "<parameter=", "</function>"
_NAMED = re.compile(r"<(?:function|parameter)=([^>\n]+)>")
_N_NAME_MAX = 1000
_END_VALUE = re.compile(r"\n?</parameter>")
_VALUE_PREFIXES = proper_prefixes("\n</parameter>", "</parameter>")
_PYTHON = {"True": "true", "False": "false", "None": "null"}  # templates show such values as Python does


class TaggedBody(Body):
    """`<function=NAME>` and `<parameter=KEY>` blocks; texts are told as they come, other values when their end is there."""

    def __init__(self, tools: ToolCalls) -> None:
        super().__init__(tools)
        self._pending = ""
        self._kinds: dict[str, ParameterKind] = {}
        self._key: str | None = None  # of the value that is being read
        self._kind = ""
        self._value: list[str] = []
        self._at_start = False  # a newline behind the tag does not belong to the value
        self._n_members = 0

    def _read(self, text: str, out: list[BodyEvent]) -> None:
        self._pending += text
        while self._in_value(out) if self._key is not None else self._between(out):
            pass

    def _between(self, out: list[BodyEvent]) -> bool:
        """Read a tag outside of values; False: there is none yet, or it is over."""
        tag = self._pending = self._pending.lstrip(SPACE)
        wanted = (_PARAMETER, _END_FUNCTION) if self.has_begun else (FUNCTION,)
        if any(one.startswith(tag) for one in wanted):
            if tag != _END_FUNCTION:
                return False
        elif not tag.startswith(wanted):
            self._stop(State.BROKEN, tag)
            return False
        if tag.startswith(_END_FUNCTION):
            out += [Arguments("}"), End()]
            self._stop(State.DONE, tag[len(_END_FUNCTION) :])
            return False
        found = _NAMED.match(tag, 0, _N_NAME_MAX)
        if not found:
            if len(tag) >= _N_NAME_MAX or "\n" in tag or ">" in tag:
                self._stop(State.BROKEN, tag)
            return False
        self._pending = tag[found.end() :]
        if self.has_begun:
            self._open_value(found[1], out)
            return True
        if found[1] not in self.tools.functions:
            self._stop(State.BROKEN, tag)
            return False
        self._kinds = self.tools.functions[found[1]]
        self._begin(found[1], out)
        out.append(Arguments("{"))
        self._mark_sent()
        return True

    def _mark_sent(self) -> None:
        self._n_sent = self._n_fed - len(self._pending)

    def _member(self, key: str) -> str:
        self._n_members += 1
        return f"{',' if self._n_members > 1 else ''}{dumped(key)}:"

    def _open_value(self, key: str, out: list[BodyEvent]) -> None:
        self._key, self._kind, self._at_start = key, self._kinds.get(key, "either"), True
        if self._kind == "text":
            out.append(Arguments(self._member(key) + '"'))
            self._mark_sent()

    def _in_value(self, out: list[BodyEvent]) -> bool:
        """Read a value as far as it goes; True when its end was there."""
        if not self._pending:
            return False
        if self._at_start:
            self._at_start = False
            self._pending = self._pending.removeprefix("\n")
        found = _END_VALUE.search(self._pending)
        end = found.start() if found else len(self._pending) - held(self._pending, *_VALUE_PREFIXES)
        piece, self._pending = self._pending[:end], self._pending[found.end() if found else end :]
        if self._kind != "text":
            self._value.append(piece)
        elif piece:
            out.append(Arguments(dumped(piece)[1:-1]))
        if found and self._key is not None:
            out.append(Arguments('"' if self._kind == "text" else self._member(self._key) + self._collected()))
            self._key = None
        if found or self._kind == "text":
            self._mark_sent()
        return found is not None

    def _collected(self) -> str:
        """A value as JSON: as it stands if it is that, else as a string. JSON's null is told from no JSON by its text."""
        text = "".join(self._value)
        self._value = []
        bare = text.strip(SPACE)
        bare = _PYTHON.get(bare, bare) if self._kind == "json" else bare
        return bare if loaded(bare) is not None or bare == "null" else dumped(text)
