"""Which syntax a template writes calls in is seen in what it renders; what parameters hold is in the tools' schemas."""

from __future__ import annotations

from typing import Any

import pytest
from tool_texts import FUNCTIONS_TEMPLATE, HERMES_TEMPLATE, TOOLS

from llamamg.server.chat_format import ChatFormat
from llamamg.server.tool_format import Syntax, functions_of, parameter_kind


@pytest.mark.usefixtures("library")
@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (HERMES_TEMPLATE, "json"),
        (HERMES_TEMPLATE.replace("\\n", " "), "json"),
        (HERMES_TEMPLATE.replace("\\n", ""), "json"),
        (FUNCTIONS_TEMPLATE, "tagged"),
        (FUNCTIONS_TEMPLATE.replace("\\n", ""), "tagged"),
        (HERMES_TEMPLATE.replace("tool_call>", "call>"), None),
        (FUNCTIONS_TEMPLATE.replace("<parameter=", "<arg="), None),
        ("{% for m in messages %}{{ m.content }}{% endfor %} write <tool_call>{}</tool_call>", None),
        ("{% for m in messages %}{{ raise_exception('no') if m.tool_calls }}{% endfor %}", None),
        (None, None),
    ],
)
def test_syntax_is_seen_in_what_is_rendered(template: str | None, expected: Syntax | None) -> None:
    assert ChatFormat(template, "", "").tool_syntax == expected


@pytest.mark.parametrize(
    ("schema", "kind"),
    [
        ({"type": "string"}, "text"),
        ({"type": ["null", "string"]}, "text"),
        ({"anyOf": [{"type": "integer"}, {"$ref": "#/$defs/word"}]}, "text"),
        ({"enum": ["a", "b"]}, "text"),
        ({"const": "a"}, "text"),
        ({"enum": {}, "const": "a"}, "text"),
        ({"type": [3, "string"], "enum": ["a"]}, "text"),
        ({"allOf": [{"description": "x"}, {"type": "string"}]}, "text"),
        ({"type": "integer"}, "json"),
        ({"type": ["integer", "null"]}, "json"),
        ({"enum": [1, None]}, "json"),
        ({"$ref": "#/$defs/list"}, "json"),
        ({"properties": {}}, "json"),
        ({}, "either"),
        (True, "either"),
        ({"anyOf": [{"type": "integer"}, {}]}, "either"),
        ({"$ref": "#/$defs/missing"}, "either"),
        ({"$ref": "#/$defs/loop"}, "either"),
        ({"anyOf": []}, "either"),
        ({"anyOf": [{"anyOf": [{}] * 30}] * 60}, "either"),
        ({"enum": True, "const": 3}, "json"),
        ({"enum": 3, "items": {}}, "json"),
        ({"type": {}, "enum": {}}, "either"),
    ],
)
def test_what_a_parameter_holds(schema: Any, kind: str) -> None:
    definitions = {"word": {"type": "string"}, "list": {"items": {}}, "loop": {"$ref": "#/$defs/loop"}}
    assert parameter_kind(schema, {"$defs": definitions}) == kind


def test_functions_are_the_tools_with_a_name() -> None:
    odd: list[Any] = [
        {"function": {}},
        {"function": {"name": 3}},
        {"function": {"name": "bare"}},
        {"function": {"name": "odd", "parameters": {"properties": [1]}}},
    ]
    found = functions_of([*TOOLS, *odd])
    assert list(found) == ["weather", "write", "bare", "odd"]
    assert found["write"] == {"path": "text", "text": "text", "mode": "json", "tags": "json", "any": "either"}
    assert found["bare"] == found["odd"] == {}
