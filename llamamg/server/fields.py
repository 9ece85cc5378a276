"""Reading request fields: llama-server's names, aliases, limits and messages. `null` counts as absent everywhere.

Soft limits clamp, hard limits are an error. Numbers may be written as 3 or 3.0 where an integer is meant; a boolean is
no number (llama-server takes `true` for 1; we say what is wrong instead).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from llamamg.server.errors import ApiError, bad_field

INT_MAX = 2**31 - 1
JSON_TYPES = {bool: "boolean", int: "number", float: "number", str: "string", list: "array", dict: "object"}

Body = Mapping[str, Any]


def type_name(value: Any) -> str:
    """JSON's word for the type of a parsed value."""
    return JSON_TYPES.get(type(value), "null")


def find(body: Body, *names: str) -> tuple[str, Any] | None:
    """The first of `names` that has a value, with that value."""
    for name in names:
        value = body.get(name)
        if value is not None:
            return name, value
    return None


def expect(name: str, value: Any, wanted: type, word: str) -> Any:
    """`value`, or 400 if its type is another one."""
    if type(value) is not wanted:
        raise bad_field(name, f"type must be {word}, but is {type_name(value)}")
    return value


def boolean(body: Body, name: str, default: bool) -> bool:
    """A field that is true or false."""
    value = body.get(name)
    return default if value is None else bool(expect(name, value, bool, "boolean"))


def string(body: Body, name: str, default: str = "") -> str:
    """A text field."""
    value = body.get(name)
    return default if value is None else str(expect(name, value, str, "string"))


def mapping(body: Body, name: str) -> dict[str, Any]:
    """An object field; absent is {}."""
    value = body.get(name)
    return {} if value is None else dict(expect(name, value, dict, "object"))


def strings(body: Body, name: str) -> list[str]:
    """A list of texts; absent is []."""
    value = body.get(name)
    if value is None:
        return []
    for item in expect(name, value, list, "array"):
        if type(item) is not str:
            raise bad_field(name, f"every element must be a string, but one is {type_name(item)}")
    return list(value)


@dataclass(frozen=True, slots=True)
class Number:
    """A numeric field: its names in order of preference, its limits, and whether going beyond them is an error."""

    names: tuple[str, ...]
    low: float = -math.inf
    high: float = math.inf
    hard: bool = False
    whole: bool = True

    def read(self, body: Body, default: float) -> Any:
        """The value given, clamped or refused; `default` if there is none."""
        found = find(body, *self.names)
        if found is None:
            return default
        name, value = found
        if type(value) is not int and type(value) is not float:
            raise bad_field(name, f"type must be number, but is {type_name(value)}")
        if self.whole:
            value = int(value)
        if self.low <= value <= self.high:
            return value if self.whole else float(value)
        if self.hard:
            low, high = (int(self.low), int(self.high)) if self.whole else (self.low, self.high)
            raise bad_field(name, f"Value must be between {low} <= value <= {high}, but got {value}")
        clamped = min(max(value, self.low), self.high)
        return int(clamped) if self.whole else float(clamped)


def _soft(name: str, low: float = -math.inf, high: float = math.inf) -> Number:
    return Number((name,), low, high, whole=False)


def _hard(*names: str, low: int = 0, high: int = INT_MAX) -> Number:
    return Number(names, low, high, hard=True)


# Field of SamplingParams -> how a request spells it.
SAMPLING: dict[str, Number] = {
    "temperature": _soft("temperature", low=0.0),
    "dynatemp_range": _soft("dynatemp_range"),
    "dynatemp_exponent": _soft("dynatemp_exponent"),
    "top_k": Number(("top_k",), 0, INT_MAX),
    "top_p": _soft("top_p", 0.0, 1.0),
    "min_p": _soft("min_p", 0.0, 1.0),
    "top_n_sigma": _soft("top_n_sigma"),
    "xtc_probability": _soft("xtc_probability", 0.0, 1.0),
    "xtc_threshold": _soft("xtc_threshold", 0.0, 1.0),
    "typical_p": _soft("typical_p"),
    "repeat_last_n": _hard("repeat_last_n"),
    "repeat_penalty": _soft("repeat_penalty"),
    "presence_penalty": _soft("presence_penalty"),
    "frequency_penalty": _soft("frequency_penalty"),
    "dry_multiplier": _soft("dry_multiplier"),
    "dry_allowed_length": _hard("dry_allowed_length"),
    "dry_penalty_last_n": _hard("dry_penalty_last_n"),
    "mirostat": Number(("mirostat",), 0, 2),
    "mirostat_tau": _soft("mirostat_tau"),
    "mirostat_eta": _soft("mirostat_eta"),
    "adaptive_target": _soft("adaptive_target", high=1.0),
    "adaptive_decay": Number(("adaptive_decay",), 0.0, 0.99, hard=True, whole=False),
    "min_keep": _hard("min_keep"),
}

N_PREDICT = _hard("n_predict", "max_completion_tokens", "max_tokens", low=-1)
N_INDENT = _hard("n_indent")
N_KEEP = _hard("n_keep", low=-1)
N_DISCARD = _hard("n_discard")
T_MAX_PREDICT_MS = _hard("t_max_predict_ms", low=-1, high=2**63 - 1)
SSE_PING_INTERVAL = _hard("sse_ping_interval", low=-1)
SEED = Number(("seed",))
ID_SLOT = _hard("id_slot", low=-1)


def token_ids(name: str, values: Sequence[Any], n_vocab: int) -> None:
    """400 unless every element is a token of the vocabulary."""
    for value in values:
        if type(value) is not int:
            raise bad_field(name, f"a token must be an integer, but one is {type_name(value)}")
    if values and not 0 <= min(values) <= max(values) < n_vocab:
        wrong = next(v for v in values if not 0 <= v < n_vocab)
        raise bad_field(name, f"token {wrong} is outside of the vocabulary (0 to {n_vocab - 1})")


def refuse(body: Body, name: str, why: str) -> None:
    """501 if a field that we could only ignore asks for something."""
    if body.get(name):
        raise ApiError(501, f"Field '{name}': {why}")
