"""Chat templates, llama_cpp's work; this module is the only one to know that.

llama_cpp loads libllama when it is imported, so it is imported on first use: `llamamg.library.load` chooses which one.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from llamamg.server.tool_format import Syntax, find_syntax

Message = dict[str, Any]
_PROBE = "<probe-7f3a>"  # a text no template has by itself


class ChatFormat:
    """One chat template, compiled. `render` is thread-safe."""

    def __init__(self, template: str | None, bos: str, eos: str) -> None:
        from llama_cpp import llama_chat_format

        self.source: str = template or llama_chat_format.CHATML_CHAT_TEMPLATE
        self._with_prompt = llama_chat_format.Jinja2ChatFormatter(self.source, eos, bos, add_generation_prompt=True)
        self._without_prompt = llama_chat_format.Jinja2ChatFormatter(self.source, eos, bos, add_generation_prompt=False)
        self.caps: dict[str, bool] = self._probe()
        self.tool_syntax: Syntax | None = find_syntax(lambda messages, tools: self.render(messages, tools, False))

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Any] | None = None,
        add_generation_prompt: bool = True,
        kwargs: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt's text. Raises what the template raises."""
        formatter = self._with_prompt if add_generation_prompt else self._without_prompt
        shaped = [self._shape(message) for message in messages]
        return str(formatter(messages=shaped, tools=list(tools) if tools else None, **(kwargs or {})).prompt)

    def _shape(self, message: Message) -> Message:
        """A message in the form this template can read."""
        shaped = dict(message)
        content = shaped.get("content")
        if isinstance(content, list) and not self.caps["supports_typed_content"]:
            shaped["content"] = "\n".join(part["text"] for part in content)
        elif content is None:
            shaped["content"] = ""
        if shaped.get("tool_calls") and self.caps["supports_object_arguments"]:
            shaped["tool_calls"] = [_with_object_arguments(call) for call in shaped["tool_calls"]]
        return shaped

    def _shows(self, messages: list[Message], wanted: str = _PROBE, **kwargs: Any) -> bool:
        try:
            return wanted in str(self._with_prompt(messages=messages, **kwargs).prompt)
        except Exception:  # a template refuses what it does not support in its own ways
            return False

    def _probe(self) -> dict[str, bool]:
        """What the template makes use of, found by rendering with a marked text and looking for it."""
        user = {"role": "user", "content": "hi"}

        def calling(arguments: Any, n_calls: int = 1) -> list[Message]:
            calls = [
                {"id": f"call{i}", "type": "function", "function": {"name": f"{_PROBE}{i}", "arguments": arguments}}
                for i in range(n_calls)
            ]
            return [user, {"role": "assistant", "content": "", "tool_calls": calls}]

        tool = {"type": "function", "function": {"name": _PROBE, "description": "", "parameters": {"type": "object"}}}
        typed = [{"role": "user", "content": [{"type": "text", "text": _PROBE}]}]
        thought = {"role": "assistant", "content": "a", "reasoning_content": _PROBE}
        calls_as_text = self._shows(calling("{}"))
        # A template that prints a list as Python or JSON would show the part's other fields too.
        return {
            "supports_object_arguments": self._shows(calling({_PROBE + "key": 1}), _PROBE + "key"),
            "supports_parallel_tool_calls": self._shows(calling({}, 2), _PROBE + "1"),
            "supports_preserve_reasoning": self._shows([user, thought, user]),
            "supports_reasoning_effort": self._shows([user], reasoning_effort=_PROBE),
            "supports_string_content": self._shows([{"role": "user", "content": _PROBE}]),
            "supports_system_role": self._shows([{"role": "system", "content": _PROBE}, user]),
            "supports_tool_calls": calls_as_text or self._shows(calling({})),
            "supports_tools": self._shows([user], tools=[tool]),
            "supports_typed_content": self._shows(typed) and not self._shows(typed, "type"),
        }


def _with_object_arguments(call: dict[str, Any]) -> dict[str, Any]:
    function = dict(call["function"])
    if isinstance(function.get("arguments"), str):
        try:
            function["arguments"] = json.loads(function["arguments"] or "{}")
        except ValueError as error:
            name = function.get("name")
            raise ValueError(f"the arguments of the call of {name!r} are not JSON, leave it out: {error}") from None
    return {**call, "function": function}
