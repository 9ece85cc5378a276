"""Which syntax a chat template writes tool calls in, and what of a request's tools is needed to read them."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal

Syntax = Literal["json", "tagged"]
ParameterKind = Literal["text", "json", "either"]

OPEN, CLOSE = "<tool_call>", "</tool_call>"
FUNCTION = "<function="
THINK, THOUGHT = "<think>", "</think>"
NAME, KEY, VALUE = "probe_name_7f3a", "probe_key_7f3a", "probe_value_7f3a"

_BLOCK = re.compile(rf"{OPEN}((?:(?!{OPEN}).)*?){CLOSE}", re.DOTALL)
_TAGGED = re.compile(
    rf"\s*<function={NAME}>\s*<parameter={KEY}>\s*{VALUE}\s*</parameter>\s*</function>\s*\Z",
)
_N_SCHEMAS_MAX = 1000  # looked at for a parameter's type


@dataclass(slots=True)
class ToolCalls:
    """How the calls of one answer are read: `functions` has each tool's parameters and what their values are."""

    syntax: Syntax
    functions: dict[str, dict[str, ParameterKind]]
    parallel: bool = True  # more than one call in an answer
    in_thought: bool = False  # the prompt ends inside a think block


def find_syntax(render: Callable[[list[dict[str, Any]], list[Any]], str]) -> Syntax | None:
    """The syntax in which `render(messages, tools)` shows a call that an assistant made; None: none that is known."""
    arguments = {KEY: VALUE}
    call = {"id": "call0", "type": "function", "function": {"name": NAME, "arguments": json.dumps(arguments)}}
    said: dict[str, Any] = {"role": "assistant", "content": "", "tool_calls": [call]}
    schema = {"type": "object", "properties": {KEY: {"type": "string"}}, "required": [KEY]}
    tool = {"type": "function", "function": {"name": NAME, "description": "", "parameters": schema}}
    try:
        text = render([{"role": "user", "content": "hi"}, said], [tool])
    except Exception:  # a template refuses what it does not support in its own ways
        return None
    for block in _BLOCK.findall(text):
        if _TAGGED.match(block):
            return "tagged"
        try:
            value = json.loads(block)
        except ValueError:
            continue
        if isinstance(value, dict) and value.get("name") == NAME and value.get("arguments") == arguments:
            return "json"
    return None


def functions_of(tools: Iterable[Any]) -> dict[str, dict[str, ParameterKind]]:
    """Names of the tools, and the kinds of their parameters."""
    out: dict[str, dict[str, ParameterKind]] = {}
    for tool in tools:
        name = tool["function"].get("name")
        if type(name) is str and name:
            document = tool["function"].get("parameters")
            properties = document.get("properties") if isinstance(document, dict) else None
            properties = properties if isinstance(properties, dict) else {}
            out[name] = {key: parameter_kind(schema, document) for key, schema in properties.items()}
    return out


def parameter_kind(schema: Any, document: Any) -> ParameterKind:
    """What stands between a parameter's tags: "text" where its schema allows a string, "json" where it allows none."""
    types: set[str] = set()  # "": any
    refs: set[str] = set()
    unseen = [(schema, False)]  # and whether it stands beside others that hold too: then it need not name a type
    n_seen = 0
    while unseen and "string" not in types:
        n_seen += 1
        if n_seen > _N_SCHEMAS_MAX:
            return "either"
        one, is_part = unseen.pop()
        one = one if isinstance(one, dict) else {}
        branch = next((key for key in ("anyOf", "oneOf", "allOf") if isinstance(one.get(key), list)), None)
        if named := _named_types(one):
            types.update(named)
        elif "$ref" in one:
            if (ref := str(one["$ref"])) not in refs:
                refs.add(ref)
                unseen.append((_target(ref, document), is_part))
        elif branch is not None:
            unseen += [(alternative, is_part or branch == "allOf") for alternative in one[branch]]
        elif not is_part:
            types.add("")
    if "string" in types:
        return "text"
    return "either" if "" in types or not types else "json"


def _named_types(schema: dict[str, Any]) -> list[str]:
    """Types that stand in a schema itself."""
    kind = schema.get("type")
    if isinstance(kind, str):
        return [kind]
    if isinstance(kind, list):
        return [one for one in kind if isinstance(one, str)]
    values = schema.get("enum")
    if not isinstance(values, list):
        values = [schema["const"]] if "const" in schema else []
    if values:
        return ["string" if isinstance(value, str) else "other" for value in values]
    return ["other"] if "properties" in schema or "items" in schema else []


def _target(ref: str, document: Any) -> Any:
    node = document
    for part in ref.split("/")[1:]:
        node = node.get(part.replace("~1", "/").replace("~0", "~")) if isinstance(node, dict) else None
    return node
