"""The rules of one grammar, and how texts and repetitions are written in GBNF."""

from __future__ import annotations

import re

N_REPEAT_MAX = 2000  # llama.cpp's parser refuses longer ones

# Controls, the quote and the backslash can only stand in a JSON string escaped.
CHAR = r'[^"\\\x00-\x1F\x7F] | "\\" (["\\/bfnrt] | "u" [0-9a-fA-F]{4})'
SHARED = {
    "space": r'(" " | "\n" [ \t]{0,20})?',
    "char": CHAR,
    "string": r'"\"" char* "\""',
    "integer": '"-"? ("0" | [1-9] [0-9]{0,15})',
    "number": '"-"? positive',
    "positive": '("0" | [1-9] [0-9]{0,15}) ("." [0-9]{1,16})? ([eE] [-+]? [0-9]{1,3})?',
    "boolean": '"true" | "false"',
    "null": '"null"',
    "value": "object | array | string | number | boolean | null",
    "object": '"{" space (string ":" space value ("," space string ":" space value)* space)? "}"',
    "array": '"[" space (value ("," space value)* space)? "]"',
    "date": '[0-9]{4} "-" ("0" [1-9] | "1" [0-2]) "-" ("0" [1-9] | [12] [0-9] | "3" [01])',
    "time": 'hour ":" [0-5] [0-9] ":" [0-5] [0-9] ("." [0-9]{1,9})? ("Z" | [-+] hour ":" [0-5] [0-9])',
    "hour": '[01] [0-9] | "2" [0-3]',
    "date-time": 'date "T" time',
    "uuid": '[0-9a-fA-F]{8} ("-" [0-9a-fA-F]{4}){3} "-" [0-9a-fA-F]{12}',
}
_ESCAPES = {'"': r"\"", "\\": r"\\", "\n": r"\n", "\r": r"\r", "\t": r"\t"}


class Rules:
    """Named rules; `root` is where a grammar begins. The shared ones are added when something names them."""

    def __init__(self) -> None:
        self.n_parts = 0  # of schemas that were written out in them
        self._rules: dict[str, str] = {}
        self._n_like: dict[str, int] = {}  # by what names begin with: how many were looked at

    def reserve(self, hint: str) -> str:
        """A new name like `hint`, for a rule that may refer to itself."""
        base = re.sub(r"[^a-zA-Z0-9]+", "-", hint).strip("-") or "rule"
        n = self._n_like.get(base, 0) + 1
        while (name := base if n == 1 else f"{base}-{n}") in self._rules or name in SHARED:
            n += 1
        self._n_like[base] = n
        self._rules[name] = ""
        return name

    def set(self, name: str, body: str) -> str:
        self._rules[name] = body
        return name

    def add(self, hint: str, body: str) -> str:
        """The name of a new rule."""
        return self.set(self.reserve(hint), body)

    def text(self) -> str:
        """The grammar, with every shared rule that is needed."""
        rules = dict(self._rules)
        unseen = list(rules.values())
        while unseen:
            outside = re.sub(r'"(?:\\.|[^"\\])*"|\[(?:\\.|[^\]\\])*\]', " ", unseen.pop())
            for name in re.findall(r"[a-zA-Z][a-zA-Z0-9-]*", outside):
                if name in SHARED and name not in rules:
                    rules[name] = SHARED[name]
                    unseen.append(SHARED[name])
        return "\n".join(f"{name} ::= {body}" for name, body in rules.items())


def literal(text: str) -> str:
    """`text` as it is."""
    return '"' + "".join(_ESCAPES.get(c) or (c if c >= " " else f"\\x{ord(c):02X}") for c in text) + '"'


def repeated(item: str, n_min: int, n_max: int | None) -> str:
    """`item` that often. Above N_REPEAT_MAX a bound is not kept."""
    n_min = min(n_min, N_REPEAT_MAX)
    if n_max is not None and n_max > N_REPEAT_MAX:
        n_max = None
    if n_max == 0:
        return '""'
    plain = {(0, None): "*", (1, None): "+", (0, 1): "?", (1, 1): ""}.get((n_min, n_max))
    if plain is not None:
        return item + plain
    return item + (f"{{{n_min}}}" if n_min == n_max else f"{{{n_min},{'' if n_max is None else n_max}}}")


def choice(alternatives: list[str]) -> str:
    """One of them, as one item."""
    return alternatives[0] if len(alternatives) == 1 else "(" + " | ".join(alternatives) + ")"
