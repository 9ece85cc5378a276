"""Tokens beside their probabilities: their bytes are exact, their text is as much of them as is UTF-8."""

from __future__ import annotations

import json

import pytest

from llamamg.server.answer import TokenTexts


class Pieces:
    """A vocabulary of one token."""

    def __init__(self, data: bytes) -> None:
        self.data = data

    def piece(self, token: int, special: bool = True) -> bytes:
        return self.data


@pytest.mark.parametrize(
    ("data", "text"),
    [(b" a", " a"), ("é".encode(), "é"), (b"\xf0", ""), (b"a\xe2\x82", "a"), (b"\x98\x80", "\ufffd\ufffd"), (b"\xffz", "\ufffdz")],
)  # fmt: skip
def test_text_of_a_token_that_is_part_of_a_character(data: bytes, text: str) -> None:
    found = json.loads(b"{" + TokenTexts(Pieces(data)).json(0) + b"}")  # type: ignore[arg-type]
    assert found == {"id": 0, "token": text, "bytes": list(data)}
