"""Regular expressions as GBNF, for texts inside a JSON string. Python's own parser reads them."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterable
from typing import Any

from llamamg.json_schema.gbnf import choice, literal, repeated

_parser: Any = importlib.import_module("re._parser" if sys.version_info >= (3, 11) else "sre_parse")
_SETS = {
    "CATEGORY_DIGIT": [(0x30, 0x39)],
    "CATEGORY_WORD": [(0x30, 0x39), (0x41, 0x5A), (0x5F, 0x5F), (0x61, 0x7A)],
    "CATEGORY_SPACE": [(0x09, 0x0D), (0x20, 0x20)],
}
_LAST = 0x10FFFF
_ESCAPED = {'"': r"\"", "\\": r"\\", "\b": r"\b", "\f": r"\f", "\n": r"\n", "\r": r"\r", "\t": r"\t"}
Ranges = list[tuple[int, int]]


def pattern_to_gbnf(pattern: str) -> str:
    """What stands between the quotes. Without ^ or $ anything may come before or after. Raises ValueError."""
    try:
        parsed = _parser.parse(pattern)
    except Exception as error:  # re.error, OverflowError
        raise ValueError(f"the pattern {pattern!r} cannot be read: {error}") from None
    alternatives = [_side(list(items)) for items in _branches(list(parsed))]
    return choice(alternatives)


def _branches(items: list[Any]) -> list[list[Any]]:
    """Alternatives at the outermost level, where each has anchors of its own; the parser takes out what they begin with."""
    if items and str(items[-1][0]) == "BRANCH":
        return [[*items[:-1], *branch] for branch in items[-1][1][1]]
    return [items]


def _side(items: list[Any]) -> str:
    starts = bool(items) and _is_anchor(items[0], "BEGINNING")
    ends = bool(items) and _is_anchor(items[-1], "END")
    inner = _sequence(items[1 if starts else 0 : -1 if ends else None])
    return " ".join(part for part in ("" if starts else "char*", inner, "" if ends else "char*") if part) or '""'


def _is_anchor(item: Any, which: str) -> bool:
    return str(item[0]) == "AT" and which in str(item[1])


def _sequence(items: Iterable[Any]) -> str:
    return " ".join(_item(str(op), argument) for op, argument in items)


def _item(op: str, argument: Any) -> str:
    if op == "LITERAL":
        return _one(chr(argument))
    if op == "NOT_LITERAL":
        return _class(_inverted([(argument, argument)]))
    if op == "ANY":
        return _class(_inverted([(0x0A, 0x0A), (0x0D, 0x0D)]))
    if op == "IN":
        return _class(_ranges(argument))
    if op == "BRANCH":
        return choice([_sequence(branch) or '""' for branch in argument[1]])
    if op == "SUBPATTERN":
        return f"({_sequence(argument[-1]) or _EMPTY})"
    if op in ("MAX_REPEAT", "MIN_REPEAT"):
        n_min, n_max, body = argument
        unbounded = n_max is _parser.MAXREPEAT or n_max == _parser.MAXREPEAT
        return repeated(f"({_sequence(body) or _EMPTY})", n_min, None if unbounded else n_max)
    names = {"ASSERT": "lookahead or lookbehind", "ASSERT_NOT": "lookahead or lookbehind", "AT": "an anchor inside"}
    raise ValueError(f"its pattern uses {names.get(op, op.lower())}, which a grammar cannot express")


_EMPTY = '""'


def _one(char: str) -> str:
    return literal(_ESCAPED.get(char) or (char if char >= " " else f"\\u{ord(char):04X}"))


def _ranges(items: Iterable[Any]) -> Ranges:
    ranges: Ranges = []
    is_inverted = False
    for op, argument in items:
        name = str(op)
        if name == "NEGATE":
            is_inverted = True
        elif name == "LITERAL":
            ranges.append((argument, argument))
        elif name == "RANGE":
            ranges.append(argument)
        else:  # CATEGORY
            plain = str(argument).replace("NOT_", "")
            ranges += _SETS[plain] if plain == str(argument) else _inverted(_SETS[plain])
    return _inverted(ranges) if is_inverted else ranges


def _inverted(ranges: Ranges) -> Ranges:
    out, start = [], 0
    for first, last in sorted(ranges):
        if first > start:
            out.append((start, first - 1))
        start = max(start, last + 1)
    return [*out, (start, _LAST)] if start <= _LAST else out


def _class(ranges: Ranges) -> str:
    """One character of these; those that JSON escapes are alternatives of their own."""
    plain, escaped = [], []
    for first, last in ranges:
        escaped += [chr(c) for c in range(first, min(last, 0x5C) + 1) if c < 0x20 or chr(c) in _ESCAPED]
        for low, high in ((0x20, 0x21), (0x23, 0x5B), (0x5D, _LAST)):
            if max(first, low) <= min(last, high):
                plain.append((max(first, low), min(last, high)))
    parts = ["[" + "".join(_code(a) if a == b else f"{_code(a)}-{_code(b)}" for a, b in plain) + "]"] if plain else []
    parts += [_one(char) for char in dict.fromkeys(escaped)]
    if not parts:
        raise ValueError("its pattern has a class without any character")
    return choice(parts)


def _code(code: int) -> str:
    char = chr(code)
    return char if char.isascii() and char.isalnum() else f"\\U{code:08X}"
