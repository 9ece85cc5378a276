"""An OpenAI chat body -> the prompt's text and the fields of a plain completion, with llama-server's rules."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from llamamg.server.chat_format import ChatFormat, Message
from llamamg.server.errors import ApiError, bad_field, bad_request, not_supported
from llamamg.server.fields import Body, boolean, mapping, string, strings
from llamamg.server.tool_choice import read_tools, tool_calls
from llamamg.server.tool_format import ToolCalls

TYPED_MEDIA = {"image_url": "image", "input_audio": "audio", "input_video": "video", "video_url": "video"}


@dataclass(slots=True)
class ChatPrompt:
    """The text to continue, and the fields that go with it."""

    text: str
    fields: dict[str, Any]
    last_user: int  # where the text of the last user message begins in it; -1: unknown
    tools: ToolCalls | None  # how calls in the answer are read; None: they are not


def chat_prompt(
    body: Body, chat: ChatFormat, defaults: Mapping[str, Any], prefill_assistant: bool = True
) -> ChatPrompt:
    """Check a chat body and render it; `defaults` are the command line's template arguments. Raises ApiError."""
    messages = _messages(body)
    tools = read_tools(body)
    fields = _completion_fields(body)
    add_prompt = boolean(body, "add_generation_prompt", True)
    continued = _continued(body)
    if not continued and prefill_assistant and messages[-1]["role"] == "assistant":
        if len(messages) >= 2 and messages[-2]["role"] == "assistant":
            raise bad_request("Cannot have 2 or more assistant messages at the end of the list.")
        continued, add_prompt = True, False
    if continued and add_prompt:
        raise bad_request("Cannot set both add_generation_prompt and continue_final_message to true.")
    prefill = ""
    if continued and messages[-1]["role"] == "assistant":
        if messages[-1].get("tool_calls"):
            raise bad_request("Cannot continue an assistant message that contains tool calls.")
        prefill = _text(messages.pop())
        if not messages:
            raise bad_request("'messages' must hold more than the assistant message to continue.")
    kwargs = _template_arguments(body, defaults)
    text = _render(chat, messages, tools, add_prompt or continued, kwargs)
    last_user = _last_user(chat, messages, tools, kwargs, text)
    calls = tool_calls(body, tools, chat, fields, text, prefill)
    return ChatPrompt(text + prefill, fields, last_user, calls)


def _messages(body: Body) -> list[Message]:
    messages = body.get("messages")
    if messages is None:
        raise bad_request("'messages' is required")
    if type(messages) is not list:
        raise bad_request("Expected 'messages' to be an array")
    if not messages:
        raise bad_request("'messages' must not be empty")
    for message in messages:
        if type(message) is not dict:
            raise bad_request("Every element of 'messages' must be an object")
        role = message.get("role")
        if type(role) is not str or not role:
            raise bad_request("Every message must have a 'role' that is a string")
        if role != "assistant" and "content" not in message:
            raise bad_request("All non-assistant messages must contain 'content'")
        if "content" not in message and not message.get("tool_calls"):
            raise bad_request("Assistant message must contain either 'content' or 'tool_calls'!")
        _check_content(message.get("content"))
        _check_calls(message.get("tool_calls"))
    return list(messages)


def _check_content(content: Any) -> None:
    if content is None or type(content) is str:
        return
    if type(content) is not list:
        raise bad_request("Expected 'content' to be a string or an array")
    for part in content:
        kind = part.get("type") if type(part) is dict else None
        if kind in TYPED_MEDIA:
            hint = "hint: if this is unexpected, you may need to provide the mmproj"
            raise ApiError(500, f"{TYPED_MEDIA[kind]} input is not supported - {hint}")
        if kind != "text":
            raise bad_request("unsupported content[].type")
        if type(part.get("text")) is not str:
            raise bad_request("A content part of type 'text' must have a 'text' that is a string")


def _check_calls(calls: Any) -> None:
    if calls is None:
        return
    if type(calls) is not list or not all(type(c) is dict and type(c.get("function")) is dict for c in calls):
        raise bad_request("Expected 'tool_calls' to be an array of objects with a 'function'")


def _text(message: Message) -> str:
    content = message.get("content") or ""
    return content if isinstance(content, str) else "\n".join(part["text"] for part in content)


def _continued(body: Body) -> bool:
    value = body.get("continue_final_message")
    if value is None or type(value) is bool:
        return bool(value)
    if value == "content":
        return True
    raise bad_field("continue_final_message", 'must be a boolean or "content"')


def _completion_fields(body: Body) -> dict[str, Any]:
    """The body as a completion's: stop as a list, the schema at one place, logprobs as n_probs."""
    fields = {name: value for name, value in body.items() if name not in ("messages", "tools")}
    stop = body.get("stop")
    fields["stop"] = [stop] if type(stop) is str else strings(body, "stop")
    if boolean(body, "logprobs", False):
        fields["n_probs"] = body.get("top_logprobs") if body.get("top_logprobs") is not None else 20
    elif body.get("top_logprobs") is not None:
        raise bad_request("top_logprobs requires logprobs to be set to true")
    fields.pop("logprobs", None)
    schema = _response_schema(body)
    if schema is not None:
        fields["json_schema"] = schema
    kind = string(body, "reasoning_format", "auto")
    if kind not in ("auto", "none"):
        raise not_supported(f'reasoning_format "{kind}" is not supported: thoughts stay in the content, as with "none"')
    return fields


def _response_schema(body: Body) -> Any:
    response_format = mapping(body, "response_format")
    kind = string(response_format, "type")
    if kind == "json_object":
        if "schema" not in response_format and body.get("json_schema"):
            return body["json_schema"]
        return mapping(response_format, "schema")
    if kind == "json_schema":
        return mapping(mapping(response_format, "json_schema"), "schema")
    if kind not in ("", "text"):
        raise bad_request(
            f'response_format type must be one of "text", "json_object" or "json_schema", but got: {kind}'
        )
    return body.get("json_schema")


def _template_arguments(body: Body, defaults: Mapping[str, Any]) -> dict[str, Any]:
    kwargs = {"enable_thinking": True, **defaults, **mapping(body, "chat_template_kwargs")}
    if type(kwargs["enable_thinking"]) is not bool:
        raise bad_request('invalid type for "enable_thinking" (expected boolean)')
    effort = string(body, "reasoning_effort")
    if effort == "none":
        kwargs["enable_thinking"] = False
        kwargs.pop("reasoning_effort", None)
    elif effort:
        kwargs["reasoning_effort"] = effort
    for name in ("messages", "tools", "functions", "function_call", "tool_choice", "add_generation_prompt"):
        if name in kwargs:
            raise bad_field("chat_template_kwargs", f"'{name}' has a place of its own in the request")
    return kwargs


def _render(chat: ChatFormat, messages: list[Message], tools: list[Any], add: bool, kwargs: Mapping[str, Any]) -> str:
    try:
        return chat.render(messages, tools, add, kwargs)
    except Exception as error:  # templates raise what they like for what they do not like
        raise bad_request(f"The chat template cannot render these messages: {error}") from None


def _last_user(
    chat: ChatFormat, messages: list[Message], tools: list[Any], kwargs: Mapping[str, Any], text: str
) -> int:
    """Where the last user message begins: what comes before it, rendered alone, must be a prefix of the whole."""
    index = next((i for i in reversed(range(len(messages))) if messages[i]["role"] == "user"), 0)
    if index == 0:
        return -1
    try:
        before = chat.render(messages[:index], tools, False, kwargs)
    except Exception:  # a template may refuse the shorter list; the position is only a help
        return -1
    return len(before) if before and text.startswith(before) else -1
