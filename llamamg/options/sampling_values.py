"""Readers of the sampling options whose values have a notation of their own."""

from __future__ import annotations

import json
import math
import re
from typing import Any

from llamamg.options.values import file_text

_LETTERS = {
    "d": "dry",
    "k": "top_k",
    "y": "typ_p",
    "p": "top_p",
    "s": "top_n_sigma",
    "m": "min_p",
    "t": "temperature",
    "x": "xtc",
    "e": "penalties",
    "a": "adaptive_p",
}
_TYPICAL = ("typ", "typical", "typical-p", "typical_p")
_SPOKEN = {"nucleus": "top_p", "temp": "temperature"} | dict.fromkeys(_TYPICAL, "typ_p")


def samplers(value: str) -> tuple[str, ...]:
    """Names in order, separated by semicolons; top-k and topk are top_k."""
    plain = {name.replace("_", ""): name for name in _LETTERS.values()}
    found = []
    for word in value.split(";"):
        word = word.strip().lower()
        if not word:
            continue
        name = _SPOKEN.get(word) or plain.get(word.replace("_", "").replace("-", ""))
        if name is None:
            raise ValueError(f"names the sampler {word!r}; known are {', '.join(_LETTERS.values())}")
        found.append(name)
    return tuple(found)


def sampler_letters(value: str) -> tuple[str, ...]:
    """One letter per sampler, e.g. edskypmxt."""
    unknown = [letter for letter in value if letter not in _LETTERS]
    if unknown:
        known = ", ".join(f"{letter}={name}" for letter, name in _LETTERS.items())
        raise ValueError(f"has the letter {unknown[0]!r}; known are {known}")
    return tuple(_LETTERS[letter] for letter in value)


def seed(value: str) -> int:
    """An unsigned 32-bit number; -1 asks for a new one per request."""
    try:
        parsed = int(value)
    except ValueError:
        raise ValueError("must be a whole number") from None
    if not -1 <= parsed <= 0xFFFFFFFF:
        raise ValueError("must be -1 (random) or a number from 0 to 4294967295")
    return parsed & 0xFFFFFFFF


def logit_bias(value: str) -> tuple[tuple[int, float], ...]:
    """TOKEN+BIAS or TOKEN-BIAS, e.g. 15043+1 or 2-inf."""
    match = re.fullmatch(r"\s*(\d+)\s*([+-])\s*(.+)", value)
    try:
        if match is None:
            raise ValueError
        bias = float(match.group(3))
        if math.isnan(bias):
            raise ValueError
    except ValueError:
        raise ValueError("must be TOKEN+BIAS or TOKEN-BIAS with a token id, such as 15043+1") from None
    return ((int(match.group(1)), -bias if match.group(2) == "-" else bias),)


def schema_text(value: str) -> str:
    """A JSON schema, checked to be JSON."""
    try:
        parsed: Any = json.loads(value)
    except ValueError as error:
        raise ValueError(f"must be a JSON schema ({error})") from None
    if not isinstance(parsed, (dict, bool)):
        raise ValueError('must be a JSON schema, such as \'{"type": "object"}\'')
    return value


def schema_file(value: str) -> str:
    """A file holding a JSON schema."""
    return schema_text(file_text(value))


def chat_switch(key: str) -> Any:
    """Read on/off/auto into a template variable; auto leaves it to the template."""
    from llamamg.options.values import tristate

    def read(value: str) -> dict[str, Any]:
        state = tristate(value)
        return {} if state == "auto" else {key: state == "on"}

    return read


def reasoning_effort(value: str) -> dict[str, Any]:
    """A level given to the template; default leaves it to the template."""
    return {} if value == "default" else {"reasoning_effort": value}
