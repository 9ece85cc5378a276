"""The fields of a chat body that are about tools: checked, and turned into how the answer's calls are read."""

from __future__ import annotations

from typing import Any

from llamamg.server.chat_format import ChatFormat
from llamamg.server.errors import bad_field, bad_request, not_supported
from llamamg.server.fields import Body, boolean, expect, strings
from llamamg.server.tool_format import CLOSE, OPEN, THINK, THOUGHT, ToolCalls, functions_of
from llamamg.server.tool_grammar import tool_grammar

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
    if tools and choice != "none" and body.get("grammar") is not None:
        raise bad_request("Cannot use custom grammar constraints with tools.")
    return [] if choice == "none" else list(tools)


def tool_calls(
    body: Body, tools: list[Any], chat: ChatFormat, fields: dict[str, Any], rendered: str, prefill: str
) -> ToolCalls | None:
    """How calls are read in what follows the rendered text and the answer's beginning; None if they are not.

    `fields` are the completion's, and get what calls need: tags that are shown, a grammar. Raises ApiError.
    """
    parallel = boolean(body, "parallel_tool_calls", True)
    if not tools:
        return None
    is_required = body.get("tool_choice") == "required"
    if fields.get("json_schema") is not None:
        if is_required:
            raise bad_request('Cannot use both tool_choice "required" and a JSON schema for the answer')
        return None  # the answer is JSON that follows the schema, as in llama-server
    if chat.tool_syntax is None:
        if is_required:
            raise not_supported(
                'tool_choice "required" is not supported with this chat template: its tool calls are not understood; '
                'use "auto" or "none", or start the server with --chat-template-file and a template that writes calls '
                "as JSON in <tool_call> tags"
            )
        return None
    calls = ToolCalls(chat.tool_syntax, functions_of(tools), parallel, _ends_in_thought(rendered, prefill))
    fields["preserved_tokens"] = [*strings(body, "preserved_tokens"), *_TAGS]
    if is_required:
        can_think = THINK in chat.source and not prefill and not rendered.rstrip().endswith(THOUGHT)
        fields["grammar"] = tool_grammar(tools, calls, can_think)
    return calls


def _ends_in_thought(rendered: str, prefill: str) -> bool:
    """Whether a prompt of a rendered text and the beginning of an answer ends inside a think block."""
    if THINK in prefill or THOUGHT in prefill:
        return prefill.rfind(THINK) > prefill.rfind(THOUGHT)
    return rendered.rstrip().endswith(THINK)
