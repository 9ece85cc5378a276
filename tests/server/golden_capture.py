"""Captured answers of a real llama-server, and what it means that ours have the same form."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent / "golden"


@dataclass
class Capture:
    """One captured answer."""

    status: int
    headers: dict[str, str]
    text: str

    @property
    def content_type(self) -> str:
        return self.headers["Content-Type"]

    def json(self) -> Any:
        return json.loads(self.text)

    def events(self) -> list[Any]:
        lines = [line.removeprefix("data: ") for line in self.text.splitlines() if line.startswith("data: ")]
        return [line if line == "[DONE]" else json.loads(line) for line in lines]


def capture(name: str) -> Capture:
    """Read golden/NAME.txt: status line, headers as JSON, body."""
    head, _, rest = (FOLDER / f"{name}.txt").read_text().partition("\n")
    headers, end = json.JSONDecoder().raw_decode(rest)
    return Capture(int(head.split()[1]), headers, rest[end:].strip("\n"))


def form(value: Any, path: str = "") -> dict[str, str]:
    """Every path in a JSON value with the type found there; elements of a list share one path."""
    out = {path or ".": type(value).__name__}
    if isinstance(value, dict):
        for name, inner in value.items():
            out |= form(inner, f"{path}.{name}")
    elif isinstance(value, list):
        for inner in value:
            out |= form(inner, f"{path}[]")
    return out
