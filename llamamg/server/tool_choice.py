"""The fields of a chat body that are about tools: checked, and turned into how the answer's calls are read."""

from __future__ import annotations

from typing import Any

from llamamg.server.chat_format import ChatFormat
from llamamg.server.errors import bad_field, bad_request, not_supported
from llamamg.server.fields import Body, boolean, expect, strings
from llamamg.server.tool_format import CLOSE, OPEN, THINK, THOUGHT, ToolCalls, functions_of

# Some vocabularies have them as special tokens, whose text is not shown.
_TAGS = (OPEN, CLOSE, THINK, THOUGHT)


def read_tools(body: Body) -> list[Any]:
    """The tools the template is given. Raises ApiError."""
    tools: list[Any] = [] if body.get("tools") is None else expect("tools", body["tools"], list, "array")
    for tool in tools:
        if type(tool) is not dict or type(tool.get("function")) is not dict:
            raise bad_field("tools", "every element must be an object with a 'function'")
    choice = body.get("tool_choice")
    if choice is not None and type(choice) not in (str, dict):
        raise bad_field("tool_choice", 'must be "auto", "none" or "required"')
    if type(choice) is str and choice not in ("auto", "none", "required"):
        raise bad_field("tool_choice", f'must be "auto", "none" or "required", but is "{choice}"')
    if tools and choice == "required":
        raise not_supported(
            'tool_choice "required" needs tool-call parsing, which is not supported; use "auto" or "none"'
        )
    if tools and choice != "none" and body.get("grammar") is not None:
        raise bad_request("Cannot use custom grammar constraints with tools.")
    return [] if choice == "none" else list(tools)


def tool_calls(
    body: Body, tools: list[Any], chat: ChatFormat, fields: dict[str, Any], in_thought: bool
) -> ToolCalls | None:
    """How calls are read; None if they are not. `fields` are the completion's, and get what calls need. Raises ApiError."""
    parallel = boolean(body, "parallel_tool_calls", True)
    if not tools or chat.tool_syntax is None or fields.get("json_schema") is not None:
        return None  # with a schema the answer is JSON that follows it, as in llama-server
    fields["preserved_tokens"] = [*strings(body, "preserved_tokens"), *_TAGS]
    return ToolCalls(chat.tool_syntax, functions_of(tools), parallel, in_thought)


def ends_in_thought(rendered: str, prefill: str) -> bool:
    """Whether a prompt of a rendered text and the beginning of an answer ends inside a think block."""
    if THINK in prefill or THOUGHT in prefill:
        return prefill.rfind(THINK) > prefill.rfind(THOUGHT)
    return rendered.rstrip().endswith(THINK)
