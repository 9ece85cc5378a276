"""What a schema's grammar lets through, asked of llama.cpp's own grammar: token by token, and whether it may end there."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from llamamg.json_schema import SchemaError, schema_to_grammar
from llamamg.json_schema.gbnf import Rules

Allows = Callable[[Any, str], bool]
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}, "pet": {"type": "boolean"}},
    "required": ["age"],
}
TREE = {
    "$defs": {
        "Node": {
            "type": "object",
            "properties": {"v": {"type": "integer"}, "of": {"type": "array", "items": {"$ref": "#/$defs/Node"}}},
            "required": ["v", "of"],
            "additionalProperties": False,
        }
    },
    "$ref": "#/$defs/Node",
}
TERM = {  # as pydantic writes a union of models, wherever it is used
    "discriminator": {"mapping": {"add": "#/$defs/Add", "zero": "#/$defs/Zero"}, "propertyName": "kind"},
    "oneOf": [{"$ref": "#/$defs/Add"}, {"$ref": "#/$defs/Zero"}],
}
TERMS = {
    "$defs": {
        "Add": {
            "properties": {
                "kind": {"const": "add", "title": "Kind", "type": "string"},
                "of": {"items": TERM, "type": "array", "title": "Of"},
            },
            "required": ["kind", "of"],
            "title": "Add",
            "type": "object",
        },
        "Zero": {"properties": {"kind": {"const": "zero", "type": "string"}}, "required": ["kind"], "type": "object"},
    },
    **TERM,
}
CASES: list[tuple[str, Any, list[str], list[str]]] = [
    ("anything", {}, ["1", '"a"', "null", "[1, {}]", "-2.5e-3"], ["01", "nul", "{a:1}", "1.", "+1"]),
    ("object", {"type": "object"}, ["{}", '{"a": {"b":[]}}', '{\n  "a": 1,\n  "b": 2\n}'], ["[]", '{"a"}', '{"a":1,}']),
    ("no raw control in a text", {"type": "string"}, ['"a\\nb"', '"\\u00e9é"', '""'], ['"a\nb"', '"a\tb"', '"\\x"', '"']),
    ("type list", {"type": ["string", "null"], "maxLength": 2}, ['"ab"', "null"], ['"abc"', "1"]),
    ("const", {"const": {"a": [1, "é"]}}, ['{"a": [1, "é"]}'], ['{"a": [1]}']),
    ("enum", {"enum": ["r", 3, None, 'q"']}, ['"r"', "3", "null", '"q\\""'], ['"g"', "33"]),
    ("lengths", {"type": "string", "minLength": 2, "maxLength": 3}, ['"ab"', '"a\\"c"'], ['"a"', '"abcd"']),
    (
        "members",
        PERSON,
        ['{"name":"x","age":1,"pet":true}', '{"age": 1}', '{"age":1,"pet":false}', '{"name":"x", "age":2}'],
        ["{}", '{"name":"x"}', '{"pet":true,"age":1}', '{"age":1,"x":1}', '{"age":1,}', '{"age":"1"}'],
    ),
    (
        "optional members",
        {"properties": {"a": {"const": 1}, "b": {"const": 2}, "c": {"const": 3}}},
        ["{}", '{"a":1}', '{"b":2}', '{"c":3}', '{"a":1,"c":3}', '{"a":1,"b":2,"c":3}'],
        ['{"c":3,"a":1}', '{,"b":2}', '{"a":2}'],
    ),
    (
        "keys to be escaped",
        {"properties": {'a b"c': {"type": "boolean"}, "é": {}}, "required": ['a b"c', "é"]},
        ['{"a b\\"c":true,"é":0}'],
        ['{"é":0}'],
    ),
    ("required alone", {"required": ["x"]}, ['{"x":[1]}'], ["{}"]),
    ("a map", {"additionalProperties": {"type": "integer"}}, ["{}", '{"a":1,"b":2}'], ['{"a":"1"}', "{1:1}"]),
    (
        "a key that has a schema is no other key",
        {"properties": {"ab": {"type": "integer"}}, "additionalProperties": {"type": "string"}},
        ['{"ab":1,"a":"x"}', '{"abc":"x"}', '{"b":"x","":"y"}', '{"ab":1}'],
        ['{"ab":"x"}', '{"a":1}'],
    ),
    ("nothing more", {"type": "object", "additionalProperties": False}, ["{}", "{ }"], ['{"a":1}']),
    ("items", {"type": "array", "items": {"type": "boolean"}}, ["[]", "[true]", "[true, false]"], ["[1]", "[true,]"]),
    ("n items", {"items": {"const": 1}, "minItems": 2, "maxItems": 3}, ["[1,1]", "[1,1,1]"], ["[1]", "[1,1,1,1]", "[]"]),
    ("at most one", {"items": {"const": 1}, "maxItems": 1}, ["[]", "[1]"], ["[1,1]"]),
    ("a tuple", {"type": "array", "prefixItems": [{"const": 1}, {"type": "string"}]}, ['[1,"a"]'], ["[1]", '["a",1]']),
    ("integer", {"type": "integer"}, ["0", "-7", "120"], ["1.5", "007", "-"]),
    ("5 to 173", {"type": "integer", "minimum": 5, "maximum": 173}, ["5", "9", "10", "99", "173"], ["4", "174", "200", "05"]),
    ("-12 to 3", {"type": "integer", "minimum": -12, "maximum": 3}, ["-12", "-1", "0", "3"], ["-13", "4", "-0", "12"]),
    ("above 3", {"type": "integer", "exclusiveMinimum": 3}, ["4", "10", "31", "999"], ["3", "0", "-4"]),
    ("at most -5", {"type": "integer", "maximum": -5}, ["-5", "-10", "-49"], ["-4", "5", "0"]),
    ("draft 4", {"type": "integer", "minimum": 0, "exclusiveMinimum": True}, ["1", "20"], ["0", "-1"]),
    ("number from 0", {"type": "number", "minimum": 0}, ["0.5", "1e3"], ["-1"]),
    ("pattern", {"type": "string", "pattern": r"^[a-c]{2,3}-\d+(x|y)?$"}, ['"ab-1"', '"abc-12x"'], ['"a-1"', '"ab-"', '"ab-1z"']),
    ("pattern inside", {"pattern": "b.d"}, ['"abcde"', '"b\\"d"'], ['"bd"', '"b\nd"']),
    ("pattern alternatives", {"pattern": "^a$|^b+$"}, ['"a"', '"bb"'], ['"ab"']),
    ("pattern classes", {"pattern": r'^[^x"]\w\s[\\/]$'}, ['"ab \\\\"', '"\\\\_ /"'], ['"xb /"', '"\\"b /"']),
    ("date", {"type": "string", "format": "date"}, ['"2024-02-29"'], ['"2024-13-01"', '"24-1-1"']),
    ("date-time", {"format": "date-time"}, ['"2024-02-29T23:59:00Z"', '"2024-02-29T03:59:00.5+01:00"'], ['"2024-02-29"']),
    ("uuid", {"format": "uuid"}, ['"123e4567-e89b-12d3-a456-426614174000"'], ['"123e4567"']),
    ("email", {"type": "string", "format": "email"}, ['"a@b.c"'], ['"a\n"', "1"]),
    ("recursive", TREE, ['{"v":1,"of":[{"v":2,"of":[]}]}'], ['{"v":1,"of":[1]}', '{"v":1}']),
    (
        "a union told apart by a member, that leads back",
        TERMS,
        ['{"kind":"zero"}', '{"kind":"add","of":[{"kind":"zero"},{"kind":"add","of":[]}]}'],
        ['{"kind":"add"}', '{"kind":"zero","of":[]}', '{"kind":"one"}'],
    ),
    (
        "words that nobody knows beside a reference that leads back",
        {"$defs": {"N": {"properties": {"n": {"$ref": "#/$defs/N", "x-order": 1}}}}, "$ref": "#/$defs/N"},
        ["{}", '{"n":{"n":{}}}'],
        ['{"n":1}'],
    ),
    ("root again", {"anyOf": [{"const": 0}, {"items": {"$ref": "#"}, "minItems": 1}]}, ["0", "[0,[0]]"], ["[]", "1"]),
    ("nullable", {"title": "T", "anyOf": [{"$ref": "#/x"}, {"type": "null"}], "x": {"const": 1}}, ["1", "null"], ["2"]),
    (
        "beside a choice",
        {"properties": {"a": {}, "b": {}}, "oneOf": [{"required": ["a"]}, {"required": ["b"]}]},
        ['{"a":1}', '{"b":1}', '{"a":1,"b":2}'],
        ["{}"],
    ),
    (
        "all of them",
        {"allOf": [{"$ref": "#/$defs/A"}, {"properties": {"b": {"const": 2}}, "required": ["b"]}], "$defs": {"A": PERSON}},
        ['{"age":1,"b":2}', '{"name":"x","age":1,"b":2}'],
        ['{"age":1}', '{"b":2}'],
    ),
    ("long text", {"type": "string", "maxLength": 100_000}, ['"abc"'], ["1"]),
    ("words about a value", {"description": "d", "default": 1}, ["1", '"a"'], ["x"]),
]  # fmt: skip


@pytest.fixture(scope="module")
def allows(grammar_allows: Allows) -> Allows:
    """Whether a text may be a whole answer under a schema."""
    return lambda schema, text: grammar_allows(schema_to_grammar(schema), text)


@pytest.mark.parametrize(("schema", "good", "bad"), [case[1:] for case in CASES], ids=[case[0] for case in CASES])
def test_what_fits_is_allowed_and_nothing_else(allows: Allows, schema: Any, good: list[str], bad: list[str]) -> None:
    for text in good:
        json.loads(text)
        assert allows(schema, text), text
    for text in bad:
        assert not allows(schema, text), text


@pytest.mark.parametrize(("low", "high"), [(0, 0), (7, 13), (0, 250), (-120, -7), (-3, 104), (95, 1001)])
def test_every_integer_between_bounds(allows: Allows, low: int, high: int) -> None:
    schema = {"type": "integer", "minimum": low, "maximum": high}
    step = max(1, (high - low) // 40)
    for n in [*range(low, high + 1, step), high]:
        assert allows(schema, str(n)), n
    for n in (low - 1, high + 1, low - 10, high + 10, high * 10 + 5, -high - 5):
        assert allows(schema, str(n)) == (low <= n <= high), n


@pytest.mark.parametrize(
    ("schema", "part"),
    [
        (False, "nothing fits"),
        (5, "5 is not a schema"),
        ({"type": "decimal"}, "there is no type 'decimal'"),
        ({"$ref": "https://example.com/a.json"}, "not inside the schema"),
        ({"$ref": "#/$defs/nope"}, "leads nowhere"),
        ({"$ref": "#"}, "refers only to itself"),
        ({"enum": []}, "a choice between nothing"),
        ({"pattern": "(?=a)b"}, "lookahead"),
        ({"pattern": "("}, "cannot be read"),
        ({"type": "string", "minLength": "2"}, "minLength"),
        ({"type": "integer", "minimum": 4, "maximum": 3}, "no integer is from 4 to 3"),
        ({"properties": 5}, "properties must be an object"),
        ({"anyOf": 5}, "anyOf must be a list"),
        ({"items": {"required": 5}}, "required must be a list"),
        ({"required": [5]}, "required must name members"),
        ({"required": [[]]}, "required must name members"),
        ({"type": "integer", "minimum": "x"}, "minimum must be a number"),
        ({"type": "string", "minLength": 5, "maxLength": 3}, "minLength 5 is above maxLength 3"),
        ({"type": "array", "minItems": 2, "maxItems": 0}, "minItems 2 is above maxItems 0"),
    ],
)
def test_what_has_no_grammar_is_said(schema: Any, part: str) -> None:
    with pytest.raises(SchemaError, match=part):
        schema_to_grammar(schema)


def test_nested_without_end_is_an_error() -> None:
    schema: Any = {"type": "string"}
    for _ in range(5000):
        schema = {"type": "array", "items": schema}
    with pytest.raises(RecursionError):
        schema_to_grammar(schema)


def doubling(leaf: Any, link: Callable[[str], Any]) -> Any:
    """Sixteen definitions, each of which refers to the next one twice."""
    defs = {f"d{i}": link(f"#/$defs/d{i + 1}") for i in range(16)}
    return {"$defs": {**defs, "d16": leaf}, "$ref": "#/$defs/d0"}


@pytest.mark.parametrize(
    "schema",
    [
        doubling({}, lambda ref: {"minProperties": 0, "anyOf": [{"$ref": ref}, {"$ref": ref}]}),
        doubling({}, lambda ref: {"allOf": [{"$ref": ref}, {"$ref": ref}]}),
        doubling({}, lambda ref: {"properties": {key: {"$ref": ref, "type": "object"} for key in "ab"}}),
        {"$defs": {"long": {"const": "x" * 9000}}, "prefixItems": [{"$ref": "#/$defs/long", "type": "string"}] * 900},
        {"enum": list(range(30_000))},
        {"prefixItems": [{"type": "string", "maxLength": n} for n in range(1000, 2000)] * 2},
    ],
    ids=["choices", "all of", "beside", "constants", "enum", "lengths"],
)
def test_what_is_far_longer_written_out_is_an_error(schema: Any) -> None:
    with pytest.raises(SchemaError, match="more than 20000 parts"):
        schema_to_grammar(schema)


def test_many_optional_members_are_not_nested_as_deep(allows: Allows) -> None:
    schema = {"properties": {f"m{i}": {"const": i} for i in range(1000)}}
    depth = deepest = 0
    for char in schema_to_grammar(schema):
        depth += (char == "(") - (char == ")")
        deepest = max(deepest, depth)
    assert deepest < 200
    assert allows(schema, '{"m7":7,"m999":999}')
    assert not allows(schema, '{"m999":999,"m7":7}')


def test_long_keys_do_not_make_all_names_long() -> None:
    inner = {"properties": {f"m{i}": {"type": "integer"} for i in range(100)}}
    grammar = schema_to_grammar({"properties": {"k" * 10_000: inner}})
    assert len(grammar) < 100_000


def test_names_of_rules_are_taken_once() -> None:
    rules = Rules()
    names = [rules.reserve(hint) for hint in ("a", "a-2", "a", "a", "string", "string", "?")]
    assert names == ["a", "a-2", "a-3", "a-4", "string-2", "string-3", "rule"]
