"""`tool_choice: "required"`: a grammar that lets through nothing but calls of the tools, and a thought before them.

Arguments follow the tools' JSON schemas. In tags the parameters come in the schema's order; a text may be any text that its
end tag does not stand in.
"""

from __future__ import annotations

from typing import Any

from llamamg.json_schema import SchemaError, schema_expression
from llamamg.json_schema.gbnf import Rules, choice, literal
from llamamg.server.errors import ApiError, bad_field
from llamamg.server.tool_body import dumped
from llamamg.server.tool_format import CLOSE, OPEN, THINK, THOUGHT, ToolCalls, parameter_kind

ANY_OBJECT = {"type": "object"}
_SAYS_WHAT_IT_IS = {"type", "$ref", "anyOf", "oneOf", "allOf", "enum", "const"}
_END_VALUE = "</parameter>"
_OPEN, _CLOSE = literal(f"{OPEN}\n"), literal(f"\n{CLOSE}")
_LINE_END_VALUE = literal(f"\n{_END_VALUE}\n")


def tool_grammar(tools: list[Any], calls: ToolCalls, can_think: bool) -> str:
    """GBNF of one call or, where `calls.parallel`, several. Raises ApiError."""
    builder = _Builder()
    root = builder.rules.reserve("root")
    functions: list[str] = []
    for tool in tools:
        function = tool["function"]
        name = function.get("name")
        if type(name) is not str or name not in calls.functions:
            raise bad_field("tools", 'every function needs a name when tool_choice is "required"')
        try:
            build = builder.json_call if calls.syntax == "json" else builder.tagged_call
            functions.append(builder.rules.add(f"call-{name}", build(name, _object_schema(function.get("parameters")))))
        except RecursionError:
            raise _no_grammar(name, "they are nested too deeply") from None
        except SchemaError as error:
            raise _no_grammar(name, str(error)) from None
    call = builder.rules.add("call", f"{_OPEN} {choice(functions)} {_CLOSE}")
    more = f' ("\\n" {call})*' if calls.parallel else ""
    builder.rules.set(root, builder.thought(calls.in_thought, can_think) + call + more)
    return builder.rules.text()


def _no_grammar(name: str, why: str) -> ApiError:
    return bad_field("tools", f"the parameters of '{name}' cannot be turned into a grammar: {why}")


def _object_schema(schema: Any) -> dict[str, Any]:
    """The parameters' schema; what names no type is an object's."""
    if schema is None or schema is True:
        return ANY_OBJECT
    if type(schema) is not dict or schema.get("type", "object") != "object":
        raise SchemaError("arguments are an object, so the schema must be one of type object")
    return schema if schema.keys() & _SAYS_WHAT_IT_IS else {**ANY_OBJECT, **schema}


class _Builder:
    def __init__(self) -> None:
        self.rules = Rules()
        self._until: dict[str, str] = {}

    def thought(self, is_open: bool, can_think: bool) -> str:
        """What comes before the first call."""
        if not is_open and not can_think:
            return ""
        rest = f'{self.until(THOUGHT)} {literal(THOUGHT)} ("\\n" "\\n"?)? '
        return rest if is_open else f"({literal(THINK)} {rest.rstrip()})? "

    def json_call(self, name: str, schema: dict[str, Any]) -> str:
        """`{"name": …, "arguments": …}`"""
        arguments = schema_expression(schema, schema, self.rules, f"arguments-{name}")
        begin = '{"name": ' + dumped(name) + ', "arguments": '
        return f'{literal(begin)} {arguments} "}}"'

    def tagged_call(self, name: str, schema: dict[str, Any]) -> str:
        """`<function=…>` with its parameters."""
        properties = schema.get("properties")
        properties = dict(properties) if isinstance(properties, dict) else {}
        required = schema.get("required")
        required = required if isinstance(required, list) else []
        for key in required:
            if type(key) is not str:
                raise SchemaError(f"required must name parameters, but is {required!r}")
            properties.setdefault(key, True)
        parts = [literal(f"<function={name}>\n")]
        for key, value in properties.items():
            if value is not False:
                item = self._parameter(name, key, value, schema)
                parts.append(item if key in required else f"{item}?")
        if not properties and schema.get("additionalProperties") is not False:
            parts.append(f'("<parameter=" [^>\\n]+ ">\\n" {self._text()})*')
        return " ".join([*parts, literal("</function>")])

    def _parameter(self, function: str, key: str, schema: Any, document: Any) -> str:
        begin, name = literal(f"<parameter={key}>\n"), f"{function}-{key}"
        if parameter_kind(schema, document) == "text":
            values = schema.get("enum", [schema["const"]] if "const" in schema else None)
            body = self._text() if type(values) is not list or not values else self._one_of(values)
        else:
            body = f"{schema_expression(schema, document, self.rules, name)} {_LINE_END_VALUE}"
        return self.rules.add(name, f"{begin} {body}")

    def _one_of(self, values: list[Any]) -> str:
        texts = [literal(value if isinstance(value, str) else dumped(value)) for value in values]
        return f"{choice(texts)} {_LINE_END_VALUE}"

    def _text(self) -> str:
        return f"{self.until(_END_VALUE)} {_LINE_END_VALUE}"

    def until(self, tag: str) -> str:
        """Any text in which `tag` does not stand. The tag's first character stands nowhere else in it."""
        if tag not in self._until:
            names = [self.rules.reserve("until") for _ in tag]
            self._until[tag] = names[0]
            first = literal(tag[0])
            for n, char in enumerate(tag):
                # n characters of the tag were just read
                ways = ['""', f"[^{tag[0] if n == 0 else tag[0] + char}] {names[0]}", f"{first} {names[1]}"]
                if 0 < n < len(tag) - 1:
                    ways.append(f"{literal(char)} {names[n + 1]}")
                self.rules.set(names[n], " | ".join(ways))
        return self._until[tag]
