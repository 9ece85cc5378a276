"""Chat answers of requests that bring tools: what the model calls is told as `tool_calls`, as llama-server does.

A stream cannot take back the beginning of a call that then turns out broken: what was sent stays, the rest of its text is
content. The unstreamed answer has all of it as content.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import orjson

from llamamg.request import Delta, Finished
from llamamg.server.answer import Part, finish_reason, random_id
from llamamg.server.dialects import OpenAiChat, timings_member
from llamamg.server.tool_body import Arguments, Begin, End
from llamamg.server.tool_format import ToolCalls
from llamamg.server.tool_parser import Broken, Event, ToolParser, parse_answer


class Stream:
    """One streamed generation: pieces of text -> values of `delta`, as JSON."""

    def __init__(self, tools: ToolCalls) -> None:
        self.parser = ToolParser(tools)
        self.n_complete = 0
        self._index = -1  # of the call that was begun last
        self._name = ""  # until it is sent, with the first arguments

    def deltas(self, events: Iterable[Event]) -> list[bytes]:
        """What the events mean for the client; arguments that come at once are one delta."""
        out: list[bytes] = []
        arguments = ""
        for event in events:
            if isinstance(event, Arguments):
                arguments += event.text
                continue
            if arguments:
                out.append(self._call(arguments))
                arguments = ""
            if isinstance(event, Begin):
                self._index += 1
                self._name = event.name
            elif isinstance(event, End):
                self.n_complete += 1
            elif text := event.unsent if isinstance(event, Broken) else event.text:
                out.append(b'{"content":' + orjson.dumps(text) + b"}")
        if arguments:
            out.append(self._call(arguments))
        return out

    def _call(self, arguments: str) -> bytes:
        call: dict[str, Any] = {"index": self._index}
        if self._name:
            function = {"name": self._name, "arguments": arguments}
            call.update(id=random_id(), type="function", function=function)
            self._name = ""
        else:
            call["function"] = {"arguments": arguments}
        return orjson.dumps({"tool_calls": [call]})


class OpenAiToolChat(OpenAiChat):
    """/v1/chat/completions with tools whose calls are understood (`prepared.tools`)."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        assert self.prepared.tools is not None
        self._tools = self.prepared.tools
        self._streams: dict[int, Stream] = {}

    def _stream(self, part: Part) -> Stream:
        if part.index not in self._streams:
            self._streams[part.index] = Stream(self._tools)
        return self._streams[part.index]

    def delta(self, part: Part, event: Delta) -> bytes:
        """Chunks with the text and pieces of calls that are sure by now, the role before the first."""
        stream = self._stream(part)
        return self._chunks(part, stream.deltas(stream.parser.feed(event.text)), event)

    def _chunks(self, part: Part, deltas: list[bytes], event: Delta) -> bytes:
        """A chunk for each; probabilities and timings ride on the last one, which may have to be empty."""
        out = b""
        if not part.role_sent:
            part.role_sent = True
            out = self._role(part)
        extra = timings_member(event.timings)
        if not deltas and (event.probs or extra):
            deltas = [b"{}"]
        for i, delta in enumerate(deltas):
            is_last = i == len(deltas) - 1
            logprobs = b',"logprobs":' + self.logprobs(part, event) if is_last and event.probs else b""
            choice = b'{"finish_reason":null,"index":%d,"delta":%b%b}' % (part.index, delta, logprobs)
            out += self.event(choice, extra if is_last else b"")
        return out

    def tail(self, part: Part, event: Finished) -> bytes:
        """What no Delta has brought yet, and what was held back because a call might have followed."""
        stream = self._stream(part)
        deltas = stream.deltas([*stream.parser.feed(event.tail), *stream.parser.finish()])
        return self._chunks(part, deltas, Delta("", (), event.n_decoded)) if deltas else b""

    def reason(self, part: Part, event: Finished) -> str:
        """Why a streamed generation ended."""
        return _reason(event, self._stream(part).n_complete)

    def choice(self, part: Part, event: Finished, logprobs: Any) -> dict[str, Any]:
        """A choice of the unstreamed answer."""
        out = super().choice(part, event, logprobs)
        answer = parse_answer(self._tools, event.text)
        out["finish_reason"] = _reason(event, len(answer.calls))
        out["message"]["content"] = answer.content
        if answer.calls:
            out["message"]["tool_calls"] = [
                {"type": "function", "function": {"name": call.name, "arguments": call.arguments}, "id": random_id()}
                for call in answer.calls
            ]
        return out


def _reason(event: Finished, n_calls: int) -> str:
    """OpenAI's word for why a generation ended; only complete calls count."""
    reason = finish_reason(event)
    return "tool_calls" if reason == "stop" and n_calls else reason
