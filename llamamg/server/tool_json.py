"""A call in JSON: `{"name": …, "arguments": {…}}`."""

from __future__ import annotations

import re
from typing import Any

from llamamg.server.tool_body import SPACE, Arguments, Body, BodyEvent, End, State, dumped, loaded
from llamamg.server.tool_format import ToolCalls

_HEADER = re.compile(
    r'[ \t\r\n]*\{[ \t\r\n]*"name"[ \t\r\n]*:[ \t\r\n]*("(?:[^"\\\x00-\x1f]|\\.)*")[ \t\r\n]*,'
    r'[ \t\r\n]*"arguments"[ \t\r\n]*:[ \t\r\n]*(?=\{)'
)
_EXTRA = {"id", "type"}  # members that say nothing more; others would be lost, so with them it is no call
_N_HEADER_MAX = 1000
_N_UNNAMED_MAX = 8192  # it is read again when it turns out to be no call
_PLAIN = re.compile(r'[^"\\\x00-\x1f]*')  # in a string
_BETWEEN = re.compile(r"[ \t\r\n:,0-9+\-.eEtrufalsn]*")  # strings and brackets


class Scanner:
    """Follows strings and brackets; whether all of it is JSON is seen when it is whole."""

    def __init__(self, depth: int) -> None:
        self.depth = depth
        self._in_string = self._escaped = False

    def scan(self, text: str, begin: int, until_depth: int) -> tuple[int, State]:
        """Up to where: the end of `text` (OPEN), behind the bracket that closes to that depth (DONE), or what cannot be JSON."""
        i = begin
        while i < len(text):
            if self._escaped:
                self._escaped = False
                i += 1
                continue
            run = (_PLAIN if self._in_string else _BETWEEN).match(text, i)
            i = run.end() if run else i
            if i == len(text):
                break
            char = text[i]
            if char == '"':
                self._in_string = not self._in_string
            elif self._in_string:
                if char != "\\":
                    return i, State.BROKEN
                self._escaped = True
            elif char in "{[":
                self.depth += 1
            elif char in "}]":
                self.depth -= 1
                if self.depth <= until_depth:
                    return i + 1, State.DONE
            else:
                return i, State.BROKEN
            i += 1
        return i, State.OPEN


class JsonBody(Body):
    """`{"name": …, "arguments": {…}}`: arguments are told as they come when the name stands before them, else at the end."""

    def __init__(self, tools: ToolCalls) -> None:
        super().__init__(tools)
        self._head: str | None = ""  # what came so far, as long as the header may still follow
        self._scanner = Scanner(0)
        self._in_arguments = False

    def _read(self, text: str, out: list[BodyEvent]) -> None:
        begin = 0
        if self._head is not None:
            head = self._head + text
            start = head.lstrip(SPACE)
            if start and start[0] != "{":
                self._stop(State.BROKEN, text)
                return
            self._head = head if len(head) < _N_HEADER_MAX else None
            if not start:
                return
            found = _HEADER.match(head, 0, _N_HEADER_MAX)
            if found:
                name = loaded(found[1])
                if name not in self.tools.functions:
                    self._stop(State.BROKEN, text)
                    return
                self._head, self._in_arguments, self._scanner = None, True, Scanner(1)
                self._n_sent = found.end()
                self._begin(name, out)
                text, begin = head, found.end()
        self._scan(text, begin, out)

    def _scan(self, text: str, begin: int, out: list[BodyEvent]) -> None:
        if self._in_arguments:
            end, state = self._scanner.scan(text, begin, 1)
            if end > begin:
                out.append(Arguments(text[begin:end]))
                self._n_sent += end - begin
            begin, self._in_arguments = end, state is State.OPEN
            if state is State.BROKEN:
                self._stop(state, text[end:])
            if state is not State.DONE:
                return
        end, state = self._scanner.scan(text, begin, 0)
        if state is not State.OPEN:
            self._stop(state, text[end:])
        n_read = self._n_fed - len(self.rest)
        is_too_long = not self.has_begun and n_read > _N_UNNAMED_MAX
        if is_too_long or (state is State.DONE and not self._close(out)):
            self.state = State.BROKEN

    def _close(self, out: list[BodyEvent]) -> bool:
        """The object is whole: tell what is not told yet, if it is a call."""
        call = loaded(self.raw)
        if not isinstance(call, dict):
            return False
        if self.has_begun:
            call = loaded("{" + self.unsent.lstrip(SPACE).removeprefix(","))
            if not isinstance(call, dict) or not call.keys() <= _EXTRA:
                return False
        elif not self._tell_whole(call, out):
            return False
        out.append(End())
        return True

    def _tell_whole(self, call: dict[str, Any], out: list[BodyEvent]) -> bool:
        name, arguments = call.get("name"), call.get("arguments", {})
        if isinstance(arguments, str):
            arguments = loaded(arguments)
        is_known = isinstance(name, str) and name in self.tools.functions
        if not is_known or not isinstance(arguments, dict) or not call.keys() <= _EXTRA | {"name", "arguments"}:
            return False
        self._begin(str(name), out)
        out.append(Arguments(dumped(arguments)))
        return True
