"""A model's answer, piece by piece -> its text and its tool calls. Only what may be the beginning of a tag is held back.

A `<tool_call>` that no call follows is text, and so is one inside a think block. A call that breaks before its name was
told is text too, and what follows its tag is read again. One that breaks later has been told already: `Broken` says so.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from llamamg.server.tool_body import SPACE, Arguments, Begin, Body, End, State, held, proper_prefixes
from llamamg.server.tool_format import CLOSE, FUNCTION, OPEN, THINK, THOUGHT, ToolCalls
from llamamg.server.tool_json import JsonBody
from llamamg.server.tool_tags import TaggedBody


@dataclass(slots=True, frozen=True)
class Text:
    """Content."""

    text: str


@dataclass(slots=True, frozen=True)
class Broken:
    """The call that began is none: `raw` is its whole text, `unsent` the end of that which no event has told."""

    raw: str
    unsent: str


Event = Text | Begin | Arguments | End | Broken
_BODIES: dict[str, type[Body]] = {"json": JsonBody, "tagged": TaggedBody}
_TAGS = {"json": (OPEN, THINK), "tagged": (OPEN, THINK, FUNCTION)}  # models forget to open calls in tags
_THOUGHT_PREFIXES = proper_prefixes(THOUGHT)


class ToolParser:
    """One answer. The events do not depend on how its text is cut into pieces, but for how texts and arguments are."""

    def __init__(self, tools: ToolCalls) -> None:
        self._tools = tools
        self._tags = re.compile("|".join(_TAGS[tools.syntax]))
        self._tag_prefixes = proper_prefixes(*_TAGS[tools.syntax])
        self._rest = ""  # not decided yet
        self._space = ""  # content if more of it follows, else nothing
        self._is_thinking = tools.in_thought
        self._has_text = False  # since the last call
        self._has_content = False
        self._body: Body | None = None
        self._opened_by = ""  # the tag before it
        self._after_call = False  # its end tag may follow, and space is not content
        self._n_calls = 0

    def feed(self, text: str) -> list[Event]:
        """Take the next piece."""
        out: list[Event] = []
        self._rest += text
        while self._rest and self._step(out):
            pass
        return out

    def finish(self) -> list[Event]:
        """The answer is over: what is held back is told as what it is now."""
        out: list[Event] = []
        if self._body is not None:
            self._break(self._body, out)
        if not (self._after_call and CLOSE.startswith(self._rest)):
            self._say(self._rest, out)
        self._rest = ""
        if self._space and (self._has_text or not self._n_calls):
            out.append(Text(self._space))
        return out

    def _step(self, out: list[Event]) -> bool:
        """Decide about the beginning of `_rest`; False: more text is needed."""
        if self._body is not None:
            return self._in_call(self._body, out)
        if self._after_call:
            self._rest = self._rest.lstrip(SPACE)
            if CLOSE.startswith(self._rest) and self._rest != CLOSE:
                return False
            self._after_call = False
            self._rest = self._rest.removeprefix(CLOSE)
            return True
        if self._is_thinking:
            end = self._rest.find(THOUGHT)
            if end < 0:
                return self._say_all_but(held(self._rest, *_THOUGHT_PREFIXES), out)
            self._is_thinking = False
            return self._say_first(end + len(THOUGHT), out)
        found = self._tags.search(self._rest)
        if not found:
            return self._say_all_but(held(self._rest, *self._tag_prefixes), out)
        self._say_first(found.start(), out)
        tag = found[0]
        # In the middle of a line they are spoken of.
        is_meant = tag == OPEN or not self._has_text or "\n" in self._space
        if tag == THINK:
            self._is_thinking = is_meant
        elif is_meant and (self._tools.parallel or not self._n_calls):
            self._opened_by = OPEN if tag == OPEN else ""
            self._rest = self._rest[len(self._opened_by) :]
            self._body = _BODIES[self._tools.syntax](self._tools)
            return True
        return self._say_first(len(tag), out)

    def _in_call(self, body: Body, out: list[Event]) -> bool:
        text, self._rest = self._rest, ""
        out += body.feed(text)
        if body.state is State.OPEN:
            return False
        if body.state is State.BROKEN:
            self._break(body, out)
        else:
            self._body, self._rest = None, body.rest
            if not self._has_content:
                self._space = ""
            self._n_calls += 1
            self._has_text, self._after_call = False, True
        return True

    def _break(self, body: Body, out: list[Event]) -> None:
        self._body = None
        if body.has_begun:
            out.append(Broken(self._space + self._opened_by + body.raw, body.unsent))
            self._space, self._rest = "", body.rest
            self._has_text = self._has_content = True
        else:
            self._rest = self._opened_by + body.raw + body.rest
            self._say_first(len(self._opened_by or FUNCTION), out)

    def _say_first(self, n: int, out: list[Event]) -> bool:
        text, self._rest = self._rest[:n], self._rest[n:]
        self._say(text, out)
        return True

    def _say_all_but(self, n: int, out: list[Event]) -> bool:
        self._say_first(len(self._rest) - n, out)
        return False

    def _say(self, text: str, out: list[Event]) -> None:
        """Content; space at its end waits for more of it, and space behind a call is dropped."""
        if not self._has_text and self._n_calls:
            text = text.lstrip(SPACE)
        solid = text.rstrip(SPACE)
        if solid:
            out.append(Text(self._space + solid))
            self._has_text = self._has_content = True
            self._space = text[len(solid) :]
        else:
            self._space += text


@dataclass(slots=True)
class ParsedCall:
    """A complete call; `arguments` is JSON."""

    name: str
    arguments: str


@dataclass(slots=True)
class ParsedAnswer:
    """A whole answer."""

    content: str = ""
    calls: list[ParsedCall] = field(default_factory=list)


def parse_answer(tools: ToolCalls, text: str) -> ParsedAnswer:
    """The content and the complete calls of an answer; what is no complete call is content as the model wrote it."""
    parser = ToolParser(tools)
    content: list[str] = []
    calls: list[ParsedCall] = []
    name, arguments = "", list[str]()
    for event in [*parser.feed(text), *parser.finish()]:
        if isinstance(event, Text):
            content.append(event.text)
        elif isinstance(event, Begin):
            name, arguments = event.name, []
        elif isinstance(event, Arguments):
            arguments.append(event.text)
        elif isinstance(event, Broken):
            content.append(event.raw)
        else:
            calls.append(ParsedCall(name, "".join(arguments)))
    return ParsedAnswer("".join(content), calls)
