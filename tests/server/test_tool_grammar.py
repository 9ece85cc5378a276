"""`required`: what llama.cpp's own grammar lets through is a call that the parser reads, and nothing else is let through."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any

import pytest
from tool_texts import TOOLS, json_call, tagged_call

from llamamg.json_schema.convert import N_PARTS_MAX
from llamamg.server.errors import ApiError
from llamamg.server.tool_format import Syntax, ToolCalls, functions_of
from llamamg.server.tool_grammar import tool_grammar
from llamamg.server.tool_parser import parse_answer

Allows = Callable[[str, str], bool]
CALL = {"json": json_call, "tagged": tagged_call}
SYNTAXES: tuple[Syntax, ...] = ("json", "tagged")
NODE = {
    "type": "object",
    "properties": {"of": {"type": "array", "items": {"$ref": "#/$defs/node"}}},
    "required": ["of"],
}
MORE: list[dict[str, Any]] = [
    {"function": {"name": "bare"}},
    {"function": {"name": "none", "parameters": {"type": "object", "properties": {}, "additionalProperties": False}}},
    {
        "function": {
            "name": "tree",
            "parameters": {
                "$defs": {"node": NODE},
                "properties": {"root": {"$ref": "#/$defs/node"}},
                "required": ["root"],
            },
        }
    },
    {
        "function": {
            "name": "pick",
            "parameters": {
                "type": "object",
                "properties": {"unit": {"enum": ["C", "F"]}, "deep": {"type": "boolean"}},
                "required": ["unit", "why"],
            },
        }
    },
]


def calls_of(syntax: Syntax, **more: Any) -> ToolCalls:
    return ToolCalls(syntax, functions_of([*TOOLS, *MORE]), **more)


def grammar_of(syntax: Syntax, can_think: bool = False, **more: Any) -> str:
    return tool_grammar([*TOOLS, *MORE], calls_of(syntax, **more), can_think)


GOOD: list[tuple[str, dict[str, Any]]] = [
    ("weather", {"city": "Paris"}),
    ("weather", {"city": "a <b> </param\n\n</p> {\"'}", "days": -3}),
    ("weather", {"city": ""}),
    ("write", {}),
    ("write", {"path": "a", "text": "<tool_call>", "mode": 1, "tags": ["x", "y"], "any": {"a": [None]}}),
    ("write", {"tags": []}),
    ("none", {}),
    ("tree", {"root": {"of": [{"of": []}]}}),
    ("pick", {"unit": "F", "deep": True, "why": 1}),
    ("bare", {"whatever": "text"}),
]
BAD: list[tuple[str, dict[str, Any]]] = [
    ("nobody", {}),
    ("weather", {}),
    ("weather", {"city": "Paris", "days": "soon"}),
    ("weather", {"city": "Paris", "other": 1}),
    ("write", {"tags": [1]}),
    ("none", {"a": "b"}),
    ("tree", {"root": {}}),
    ("pick", {"unit": "K", "why": 1}),
    ("pick", {"unit": "C"}),
]


@pytest.mark.parametrize("syntax", SYNTAXES)
def test_calls_that_fit_are_let_through_and_read(grammar_allows: Allows, syntax: Syntax) -> None:
    grammar, calls = grammar_of(syntax), calls_of(syntax)
    for name, arguments in GOOD:
        text = CALL[syntax](name, arguments)
        assert grammar_allows(grammar, text), text
        answer = parse_answer(calls, text)
        assert answer.content == ""
        assert [(c.name, json.loads(c.arguments)) for c in answer.calls] == [(name, arguments)]
    for name, arguments in BAD:
        assert not grammar_allows(grammar, CALL[syntax](name, arguments)), (name, arguments)


@pytest.mark.parametrize("syntax", SYNTAXES)
def test_there_is_a_call_and_nothing_else(grammar_allows: Allows, syntax: Syntax) -> None:
    call = CALL[syntax]("weather", {"city": "Paris"})
    grammar, single = grammar_of(syntax), grammar_of(syntax, parallel=False)
    assert grammar_allows(grammar, f"{call}\n{call}\n{call}")
    assert grammar_allows(single, call)
    assert not grammar_allows(single, f"{call}\n{call}")
    for text in ("", "Hello", "Hello" + call, call + "Hello", call[:-1], f"<think>\n</think>\n{call}"):
        assert not grammar_allows(grammar, text), text


@pytest.mark.parametrize("syntax", SYNTAXES)
def test_a_thought_comes_first_where_there_may_be_one(grammar_allows: Allows, syntax: Syntax) -> None:
    call = CALL[syntax]("weather", {"city": "Paris"})
    thought = f"\nIf {call} < then </thin\n</think>"
    free, opened = grammar_of(syntax, True), grammar_of(syntax, in_thought=True)
    assert grammar_allows(free, call)
    assert grammar_allows(free, f"<think>{thought}\n\n{call}")
    assert grammar_allows(opened, f"{thought}\n\n{call}")
    assert grammar_allows(opened, f"</think>{call}")
    assert not grammar_allows(opened, call)
    assert not grammar_allows(free, f"<think>{thought}")
    assert not grammar_allows(free, f"<think>{thought}\n\n{call}\n<think></think>")


@pytest.mark.parametrize("syntax", SYNTAXES)
@pytest.mark.parametrize(
    ("parameters", "part"),
    [
        ({"type": "string"}, "must be one of type object"),
        ([1], "must be one of type object"),
        ({"properties": {"a": {"type": "colour"}}}, "there is no type 'colour'"),
        ({"properties": {"a": {"$ref": "#/missing"}}}, "leads nowhere"),
        ({"properties": {"a": 1}}, "not a schema"),
        ({"required": [1]}, "required must name"),
        ({"properties": {"a": {"enum": [1] * N_PARTS_MAX}}}, f"more than {N_PARTS_MAX} parts"),
    ],
)
def test_schema_without_a_grammar_is_an_error_that_names_the_tool(syntax: Syntax, parameters: Any, part: str) -> None:
    tools = [{"function": {"name": "odd", "parameters": parameters}}]
    with pytest.raises(ApiError, match=f"the parameters of 'odd' cannot be turned.*{part}") as caught:
        tool_grammar(tools, ToolCalls(syntax, functions_of(tools)), False)
    assert caught.value.code == 400


@pytest.mark.parametrize("syntax", SYNTAXES)
def test_all_tools_together_have_a_limit(syntax: Syntax) -> None:
    schema = {"properties": {"a": {"enum": list(range(N_PARTS_MAX // 20))}}}
    tools = [{"function": {"name": f"f{i}", "parameters": schema}} for i in range(12)]
    tool_grammar(tools[:2], ToolCalls(syntax, functions_of(tools)), False)
    with pytest.raises(ApiError, match=f"more than {N_PARTS_MAX} parts"):
        tool_grammar(tools, ToolCalls(syntax, functions_of(tools)), False)


@pytest.mark.parametrize("name", [None, "", 3, ["f"], {}])
def test_tool_without_a_name_cannot_be_required(name: Any) -> None:
    tools: list[Any] = [{"function": {"name": name}}]
    with pytest.raises(ApiError, match="needs a name"):
        tool_grammar(tools, ToolCalls("json", functions_of(tools)), False)


ODD = [
    None,
    True,
    False,
    0,
    1.5,
    "",
    "x",
    "object",
    [],
    ["a"],
    [[]],
    {},
    {"a": 1},
    {"type": []},
    {"$ref": 3},
    {"$ref": "#"},
]


@pytest.mark.parametrize("syntax", SYNTAXES)
@pytest.mark.parametrize("seed", range(200))
def test_any_schema_is_a_grammar_or_an_error_of_the_client(syntax: Syntax, seed: int) -> None:
    rng = random.Random(seed)
    keys = (
        "type",
        "properties",
        "required",
        "$ref",
        "anyOf",
        "allOf",
        "enum",
        "const",
        "items",
        "additionalProperties",
    )

    def schema(n_deep: int) -> Any:
        if n_deep > 2 or rng.random() < 0.3:
            return rng.choice(ODD)
        if rng.random() < 0.5:
            return {"type": "object", "properties": {f"p{i}": schema(n_deep + 1) for i in range(3)}}
        return {key: rng.choice([schema(n_deep + 1), [schema(n_deep + 1)]]) for key in rng.sample(keys, 2)}

    tools = [{"function": {"name": f"f{i}", "parameters": schema(0)}} for i in range(6)]
    refused: list[int] = []
    for tool in tools:
        try:
            assert "root ::=" in tool_grammar([tool], ToolCalls(syntax, functions_of(tools)), False)
        except ApiError as error:
            refused.append(error.code)
    assert set(refused) <= {400}
