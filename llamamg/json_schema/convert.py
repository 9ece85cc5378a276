"""A JSON schema -> the text of a GBNF grammar.

Kept: types, const, enum, properties in their order, required, additionalProperties, items, prefixItems, lengths, numbers of
items, patterns, bounds of integers, the usual formats, $ref inside the document, anyOf, oneOf, allOf. What a grammar cannot
say (not, uniqueItems, multipleOf, bounds of fractions, …) is left to the model.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from typing import Any
from urllib.parse import unquote

from llamamg.json_schema.gbnf import N_REPEAT_MAX, Rules, choice, literal, repeated
from llamamg.json_schema.integers import between
from llamamg.json_schema.patterns import pattern_to_gbnf

Schema = dict[str, Any]
_TYPE_BY_KEY = {
    "object": ("properties", "required", "additionalProperties", "patternProperties", "minProperties", "maxProperties"),
    "array": ("items", "prefixItems", "minItems", "maxItems", "contains", "uniqueItems"),
    "string": ("pattern", "minLength", "maxLength", "format"),
    "number": ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
}
# All else (title, default, discriminator, …) says nothing about the values.
_KEYS = {"$ref", "allOf", "anyOf", "const", "enum", "oneOf", "type"}.union(*_TYPE_BY_KEY.values())
_KINDS: dict[str, tuple[tuple[type, ...], str]] = {
    **dict.fromkeys(("properties",), ((dict,), "an object")),
    **dict.fromkeys(("allOf", "anyOf", "enum", "oneOf", "prefixItems", "required"), ((list,), "a list")),
    **dict.fromkeys(("format", "pattern"), ((str,), "a text")),
    **dict.fromkeys(("minimum", "maximum"), ((int, float), "a number")),
    **dict.fromkeys(("exclusiveMinimum", "exclusiveMaximum"), ((int, float, bool), "a number")),
}
_FORMATS = ("date", "time", "date-time", "uuid")
N_PARTS_MAX = 20_000  # each as often as it is written out: a few lines can ask for 2^n
_N_NAME_MAX = 64
_LONG = 2000  # letters; llama.cpp's parser goes one call deeper with each bracket in a bracket


class SchemaError(ValueError):
    """Why a schema has no grammar, as a sentence's second half."""


def schema_to_grammar(schema: Any) -> str:
    """GBNF of `schema`. Raises SchemaError, and RecursionError if it is nested too deeply."""
    rules = Rules()
    root = rules.reserve("root")
    rules.set(root, schema_expression(schema, schema, rules, root))
    return rules.text()


def schema_expression(schema: Any, document: Any, rules: Rules, name: str) -> str:
    """What `schema` allows, as one item of a grammar of `rules`; references lead into `document`. Raises like the above."""
    try:
        return _Converter(document, rules).expression(schema, name)
    except SchemaError:
        raise
    except (TypeError, AttributeError, ValueError, OverflowError) as error:  # a pattern's, or a value deep inside
        raise SchemaError(str(error)) from None


class _Converter:
    def __init__(self, document: Any, rules: Rules) -> None:
        self.rules = rules
        self._document = document
        self._by_ref: dict[str, str] = {}

    def _take(self, n: int = 1) -> None:
        self.rules.n_parts += n
        if self.rules.n_parts > N_PARTS_MAX:
            raise SchemaError(f"written out it has more than {N_PARTS_MAX} parts: leave some of them out")

    def expression(self, schema: Any, name: str) -> str:
        """What `schema` allows, as one item."""
        self._take()
        name = name[:_N_NAME_MAX]
        if schema is True or schema == {}:
            return "value"
        if type(schema) is not dict:
            raise SchemaError("nothing fits the schema false" if schema is False else f"{schema!r} is not a schema")
        schema = {key: value for key, value in schema.items() if key in _KEYS}
        _check(schema)
        if schema.keys() == {"$ref"}:
            return self._reference(schema["$ref"])
        if "$ref" in schema:
            return self.expression(self._plain(schema), name)
        if "allOf" in schema:
            return self.expression(self._all_of(schema), name)
        for key in ("anyOf", "oneOf"):
            if key in schema:
                rest = {k: v for k, v in schema.items() if k != key}
                return self._one_of([self._with(rest, one) for one in schema[key]], name)
        if "const" in schema:
            return self._constant(schema["const"])
        if "enum" in schema:
            return self._choice([self._constant(value) for value in schema["enum"]], name)
        kind = schema.get("type")
        if isinstance(kind, list):
            return self._one_of(({**schema, "type": one} for one in kind), name)
        return self._of_type(kind if kind is not None else _implied_type(schema), schema, name)

    def _of_type(self, kind: str | None, schema: Schema, name: str) -> str:
        if kind is None:
            return "value"
        if kind == "object":
            return self._object(schema, name)
        if kind == "array":
            return self._array(schema, name)
        if kind == "string":
            return self._string(schema, name)
        if kind == "integer":
            return self._integer(schema, name)
        if kind == "number":
            low: Any = schema.get("minimum", schema.get("exclusiveMinimum"))
            return "positive" if type(low) in (int, float) and low >= 0 else "number"
        if kind in ("boolean", "null"):
            return kind
        raise SchemaError(f"there is no type {kind!r}")

    def _constant(self, value: Any) -> str:
        text = literal(json.dumps(value, ensure_ascii=False))
        self._take(2 + len(text) // 256)
        return text

    def _choice(self, alternatives: list[str], name: str) -> str:
        unique = list(dict.fromkeys(alternatives))
        if not unique:
            raise SchemaError("a choice between nothing cannot be met")
        return unique[0] if len(unique) == 1 else self.rules.add(name, " | ".join(unique))

    def _one_of(self, schemas: Iterable[Any], name: str) -> str:
        return self._choice([self.expression(s, f"{name}-{i}") for i, s in enumerate(schemas) if s is not False], name)

    def _reference(self, ref: Any) -> str:
        if ref not in self._by_ref:
            target = self._target(ref)
            rule = self._by_ref[ref] = self.rules.reserve("ref-" + ref.rsplit("/", 1)[-1][:_N_NAME_MAX])
            body = self.expression(target, rule)
            if body == rule:
                raise SchemaError(f"{ref} refers only to itself")
            self.rules.set(rule, body)
        return self._by_ref[ref]

    def _target(self, ref: Any) -> Any:
        if type(ref) is not str or (ref != "#" and not ref.startswith("#/")):
            raise SchemaError(f"$ref {ref!r} is not inside the schema; only references like #/$defs/NAME are followed")
        node = self._document
        for part in ref.split("/")[1:]:
            part = unquote(part).replace("~1", "/").replace("~0", "~")
            if isinstance(node, list) and part.isdigit() and int(part) < len(node):
                node = node[int(part)]
            elif isinstance(node, dict) and part in node:
                node = node[part]
            else:
                raise SchemaError(f"$ref {ref!r} leads nowhere: there is no {part!r}")
        return node

    def _plain(self, schema: Any) -> Any:
        """`schema` with its reference replaced by what it refers to, for merging."""
        seen = set()
        while isinstance(schema, dict) and "$ref" in schema:
            if schema["$ref"] in seen:
                raise SchemaError(f"{schema['$ref']} refers only to itself")
            seen.add(schema["$ref"])
            self._take()
            rest = {k: v for k, v in schema.items() if k != "$ref"}
            schema = _merged(self._target(schema["$ref"]), rest)
        return schema

    def _with(self, rest: Schema, alternative: Any) -> Any:
        """An alternative and what stands beside the choice; a reference stays one where it can: it may lead back here."""
        if rest.keys() <= {"type"} and isinstance(alternative, dict) and "$ref" in alternative:
            return alternative
        return _merged(rest, self._plain(alternative)) if rest else alternative

    def _all_of(self, schema: Schema) -> Any:
        whole: Any = {k: v for k, v in schema.items() if k != "allOf"}
        parts = schema["allOf"]
        if not whole and len(parts) == 1:
            return parts[0]
        for part in parts:
            self._take()
            part = self._plain(part)
            whole = _merged(whole, self._all_of(part) if isinstance(part, dict) and "allOf" in part else part)
        return whole

    def _object(self, schema: Schema, name: str) -> str:
        properties = dict(schema.get("properties") or {})
        names = schema.get("required") or []
        if not all(type(key) is str for key in names):
            raise SchemaError(f"required must name members, but is {names!r}")
        required = dict.fromkeys(names)
        for key in required:
            properties.setdefault(key, True)
        more = schema.get("additionalProperties")
        if not properties and (more is None or more is True or more == {}):
            return "object"
        pairs = [
            (f'{self._constant(key)} ":" space {self.expression(value, f"{name}-{key}")}', key in required)
            for key, value in properties.items()
            if value is not False
        ]
        extra = ""
        if more is not None and more is not False:
            extra = f'{self._other_key(list(properties), name)} ":" space {self.expression(more, f"{name}-additional")}'
        body = self._members([(self.rules.add(f"{name}-kv", kv), needed) for kv, needed in pairs], extra, name)
        return self.rules.add(name, f'"{{" space {body}space "}}"')

    def _members(self, pairs: list[tuple[str, bool]], extra: str, name: str) -> str:
        """Members in their order, optional ones or not; from the last to the first."""
        later = f'("," space {extra})* ' if extra else ""  # what may follow when there was a member before
        first = f'({extra} ("," space {extra})*)? ' if extra else ""  # and when there was none
        for member, needed in reversed(pairs):
            rest = f"{self.rules.add(f'{name}-rest', later)} " if later.strip() else ""
            begun = f"{member} {rest}"
            if not needed and len(first) > _LONG:
                first = self.rules.add(f"{name}-first", first)
            first = begun if needed else f"({begun}| {first or _NOTHING})"
            first, later = first.rstrip() + " ", f'"," space {begun}' if needed else f'("," space {member})? {rest}'
        return first

    def _other_key(self, names: list[str], name: str) -> str:
        """A key that is none of `names`: such a member would have to follow a schema of its own."""
        if not names:
            return "string"
        return self.rules.add(f"{name}-key", f'"\\"" {self._unlike(names)} "\\""')

    def _unlike(self, names: list[str]) -> str:
        """Any text but these; letter by letter."""
        heads = sorted({n[0] for n in names if n})
        parts = [
            f"{literal(h)} {self._unlike([n[1:] for n in names if n[:1] == h])}"
            for h in heads
            if h.isprintable() and h not in '"\\'
        ]
        known = "".join(h if h.isascii() and h.isalnum() else f"\\U{ord(h):08X}" for h in heads)
        parts.append(f'[^"\\\\\\x00-\\x1F\\x7F{known}] char*')
        if "" not in names:
            parts.append(_NOTHING)
        return choice(parts)

    def _array(self, schema: Schema, name: str) -> str:
        items, prefix = schema.get("items", True), schema.get("prefixItems")
        if isinstance(items, list):
            items, prefix = True, items
        n_min, n_max = self._counts(schema, "Items")
        if prefix:
            inner = ' "," space '.join(self.expression(one, f"{name}-{i}") for i, one in enumerate(prefix))
            return self.rules.add(name, f'"[" space {inner} space "]"')
        if n_max == 0 or items is False:
            return self.rules.add(name, '"[" space "]"')
        item = self.expression(items, f"{name}-item")
        if item == "value" and not n_min and n_max is None:
            return "array"
        more = repeated(f'("," space {item})', max(n_min or 0, 1) - 1, None if n_max is None else n_max - 1)
        some = f"{item} {'' if n_max == 1 else more + ' '}space"
        return self.rules.add(name, f'"[" space {some if n_min else f"({some})?"} "]"')

    def _string(self, schema: Schema, name: str) -> str:
        if "pattern" in schema:
            pattern = pattern_to_gbnf(schema["pattern"])
            self._take(len(pattern) // 8)
            return self.rules.add(name, f'"\\"" {pattern} "\\""')
        if schema.get("format") in _FORMATS:
            return self.rules.add(name, f'"\\"" {schema["format"]} "\\""')
        n_min, n_max = self._counts(schema, "Length")
        if not n_min and n_max is None:
            return "string"
        return self.rules.add(name, f'"\\"" {repeated("char", n_min or 0, n_max)} "\\""')

    def _counts(self, schema: Schema, of: str) -> tuple[int | None, int | None]:
        n_min, n_max = _count(schema, "min" + of, 0), _count(schema, "max" + of, None)
        if n_min is not None and n_max is not None and n_min > n_max:
            raise SchemaError(f"min{of} {n_min} is above max{of} {n_max}")
        self._take(min(n_max or n_min or 0, N_REPEAT_MAX) // 100)  # a rule for each, small ones
        return n_min, n_max

    def _integer(self, schema: Schema, name: str) -> str:
        low, high = _bound(schema, "inimum", math.ceil, 1), _bound(schema, "aximum", math.floor, -1)
        if low is None and high is None:
            return "integer"
        if low is not None and high is not None and low > high:
            raise SchemaError(f"no integer is from {low} to {high}")
        return self.rules.add(name, between(low, high))


_NOTHING = '""'


def _check(schema: Schema) -> None:
    for key, value in schema.items():
        kinds, what = _KINDS.get(key, ((type(value),), ""))
        if type(value) not in kinds:
            raise SchemaError(f"{key} must be {what}, but is {value!r}")


def _implied_type(schema: Schema) -> str | None:
    return next((kind for kind, keys in _TYPE_BY_KEY.items() if any(key in schema for key in keys)), None)


def _count(schema: Schema, key: str, default: int | None) -> int | None:
    value = schema.get(key, default)
    if value is not None and (type(value) not in (int, float) or value < 0):
        raise SchemaError(f"{key} must be a number from 0, but is {value!r}")
    return None if value is None else int(value)


def _bound(schema: Schema, ending: str, inwards: Any, step: int) -> int | None:
    """The tighter of an inclusive and an exclusive bound; draft 4's exclusive is a boolean beside the inclusive one."""
    plain, exclusive = schema.get("m" + ending), schema.get("exclusiveM" + ending)
    bounds = [] if plain is None else [inwards(plain) + (step if exclusive is True and inwards(plain) == plain else 0)]
    if exclusive is not None and type(exclusive) is not bool:
        bounds.append(inwards(exclusive) + (step if inwards(exclusive) == exclusive else 0))
    if not bounds:
        return None
    return int(max(bounds) if step > 0 else min(bounds))


def _merged(one: Any, other: Any) -> Any:
    """Both at once, as far as that can be said: members and required ones together, else the second's word."""
    if one is True or one == {}:
        return other
    if other is True or other == {}:
        return one
    if not isinstance(one, dict) or not isinstance(other, dict):
        return False
    both = {**one, **other}
    if "properties" in one and "properties" in other:
        both["properties"] = {**one["properties"], **other["properties"]}
    if "required" in one and "required" in other:
        both["required"] = list(dict.fromkeys([*one["required"], *other["required"]]))
    return both
