"""Readers of option values: text in, value out, or ValueError with the end of a sentence ("must be …")."""

from __future__ import annotations

import csv
import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

TRUTHY = ("on", "enabled", "true", "1")
FALSY = ("off", "disabled", "false", "0")
CACHE_TYPES = ("f32", "f16", "bf16", "q8_0", "q4_0", "q4_1", "iq4_nl", "q5_0", "q5_1")


def integer(
    minimum: int | None = None, maximum: int | None = None, *, also: tuple[int, ...] = ()
) -> Callable[[str], int]:
    """Whole numbers in a closed range, or one of `also`."""

    def read(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            raise ValueError("must be a whole number") from None
        if value in also:
            return value
        extra = f", or {' or '.join(str(x) for x in also)}" if also else ""
        if minimum is not None and value < minimum:
            raise ValueError(f"must be at least {minimum}{extra}")
        if maximum is not None and value > maximum:
            raise ValueError(f"must be at most {maximum}{extra}")
        return value

    return read


def number(
    minimum: float | None = None, maximum: float | None = None, *, above: float | None = None
) -> Callable[[str], float]:
    """Finite numbers in a closed range, or strictly greater than `above`."""

    def read(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            raise ValueError("must be a number") from None
        if not math.isfinite(value):
            raise ValueError("must be a finite number")
        if minimum is not None and value < minimum:
            raise ValueError(f"must be at least {minimum:g}")
        if above is not None and value <= above:
            raise ValueError(f"must be greater than {above:g}")
        if maximum is not None and value > maximum:
            raise ValueError(f"must be at most {maximum:g}")
        return value

    return read


def choice(*allowed: str) -> Callable[[str], str]:
    """One of a few words."""

    def read(text: str) -> str:
        if text not in allowed:
            raise ValueError(f"must be one of {', '.join(allowed)}")
        return text

    return read


def text(value: str) -> str:
    """Any text."""
    return value


def boolean(value: str) -> bool:
    """llama-server's words for yes and no."""
    if value.lower() in TRUTHY:
        return True
    if value.lower() in FALSY:
        return False
    raise ValueError("must be on or off (also enabled/disabled, true/false, 1/0)")


def tristate(value: str) -> str:
    """on, off or auto, with the same words for yes and no as everywhere; also -1 for auto, as llama-server reads it."""
    if value.lower() in ("auto", "-1"):
        return "auto"
    try:
        return "on" if boolean(value) else "off"
    except ValueError:
        raise ValueError("must be on, off or auto") from None


def words(value: str) -> tuple[str, ...]:
    """A comma-separated list; quotes protect commas; empty items are dropped."""
    return tuple(item.strip() for item in next(csv.reader([value], skipinitialspace=True), []) if item.strip())


def some_words(value: str) -> tuple[str, ...]:
    """A comma-separated list with at least one item."""
    items = words(value)
    if not items:
        raise ValueError("must name at least one item")
    return items


def gpu_layers(value: str) -> int | str:
    """A number of layers, "auto" or "all"; negative numbers mean what they mean to llama-server."""
    if value in ("auto", "all"):
        return value
    try:
        n_layers = int(value)
    except ValueError:
        raise ValueError("must be a number of layers, auto or all") from None
    if n_layers < -2:
        raise ValueError("must be a number of layers, auto or all")
    return {-1: "auto", -2: "all"}.get(n_layers, n_layers)


def proportions(value: str) -> tuple[float, ...]:
    """Parts per device, separated by commas or slashes, e.g. 0.85,1,1."""
    try:
        parts = tuple(float(part) for part in re.split(r"[,/]+", value))
    except ValueError:
        raise ValueError("must be numbers separated by commas, such as 3,1") from None
    if not all(math.isfinite(part) and part >= 0 for part in parts) or sum(parts) <= 0:
        raise ValueError("must be numbers that are not negative, with at least one above zero")
    return parts


def proportions_or_auto(value: str) -> tuple[float, ...] | str:
    """The same, or "auto"."""
    if value == "auto":
        return value
    try:
        return proportions(value)
    except ValueError as error:
        raise ValueError(f"{error}, or auto") from None


def devices(value: str) -> tuple[str, ...]:
    """Device names; "none" keeps everything on the CPU."""
    return () if value == "none" else some_words(value)


def tensor_overrides(value: str) -> tuple[tuple[str, str], ...]:
    """PATTERN=BUFFER pairs separated by commas; each pattern must be a regular expression."""
    pairs = []
    for item in value.split(","):
        pattern, equals, buffer = item.partition("=")
        if not equals or not pattern or not buffer:
            raise ValueError(f"must be PATTERN=BUFFER, such as 'ffn_.*_exps=CPU', but {item!r} is not")
        if not re.fullmatch(r"[A-Za-z][\w.:\[\]-]*", buffer):
            raise ValueError(
                f"names the buffer type {buffer!r}, which no device can have: use one such as CPU or CUDA0"
            )
        try:
            re.compile(pattern)
        except re.error as error:
            raise ValueError(f"has a pattern that is no regular expression: {pattern!r} ({error})") from None
        pairs.append((pattern, buffer))
    return tuple(pairs)


def key_overrides(value: str) -> tuple[tuple[str, str, str], ...]:
    """KEY=TYPE:VALUE items separated by commas."""
    found = []
    for item in some_words(value):
        match = re.fullmatch(r"([^=]{1,127})=(int|float|bool|str):(.*)", item)
        if not match:
            raise ValueError(f"must be KEY=TYPE:VALUE with TYPE int, float, bool or str, but {item!r} is not")
        key, kind, content = match.groups()
        try:
            if kind in ("int", "float"):
                {"int": int, "float": float}[kind](content)
        except ValueError:
            raise ValueError(f"gives {content!r} for {key}, which is not of type {kind}") from None
        if kind == "bool" and content not in ("true", "false"):
            raise ValueError(f"gives {content!r} for {key}; a bool is true or false")
        if kind == "str" and len(content.encode()) > 127:
            raise ValueError(f"gives a text for {key} that is longer than 127 bytes")
        found.append((key, kind, content))
    return tuple(found)


def existing_file(value: str) -> Path:
    """A file that can be read."""
    path = Path(value).expanduser()
    if not path.is_file():
        raise ValueError(f"must be a file, but there is none at {value!r}")
    return path


def directory(value: str) -> Path:
    """A folder that exists. An empty text is none, not the folder the program was started in."""
    path = Path(value).expanduser()
    if not value or not path.is_dir():
        raise ValueError(f"must be a folder that exists; create {value!r} first or name another")
    return path


def file_text(value: str) -> str:
    """The content of a text file."""
    try:
        return existing_file(value).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"names a file that cannot be read as UTF-8 text: {error}") from None


def key_file(value: str) -> tuple[str, ...]:
    """API keys, one a line; lines starting with # are comments."""
    keys = tuple(line.strip() for line in file_text(value).splitlines() if line.strip() and not line.startswith("#"))
    if not keys:
        raise ValueError(f"names {value!r}, which holds no key: the server would be open to everybody")
    return keys


def json_object(value: str) -> dict[str, Any]:
    """A JSON object."""
    try:
        parsed = json.loads(value)
    except ValueError as error:
        raise ValueError(f"must be a JSON object, such as '{{\"key\": 1}}' ({error})") from None
    if not isinstance(parsed, dict):
        raise ValueError("must be a JSON object, such as '{\"key\": 1}'")
    return parsed


def unescape(value: str) -> str:
    """Turn backslash escapes into the characters they stand for, as llama.cpp does on its command line."""
    simple = {"n": "\n", "r": "\r", "t": "\t", "'": "'", '"': '"', "\\": "\\"}

    def one(match: re.Match[str]) -> str:
        found = match.group(1)
        return chr(int(found[1:], 16)) if found[0] == "x" else simple[found]

    return re.sub(r"\\(x[0-9A-Fa-f]{2}|[nrt'\"\\])", one, value)
