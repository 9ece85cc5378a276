"""A stand-in model that notices a wrong cache, and a plugin that guesses what it says, for tests at random."""

from __future__ import annotations

from typing import Any

from llamamg import hookimpl
from llamamg.guard import Guard
from llamamg.plugins import plugin
from llamamg.testing import EOS

DECLARE: dict[str, Any] = {"summary": "", "helps": "", "hurts": "", "guard": Guard.same_tokens()}
N_CTX_SLOT = 128


def model(sequence: Any, so_far: list[int]) -> int:
    """Its next token depends on every token before it: a wrong cache shows in the text."""
    mixed = 7
    for token in so_far:
        mixed = (mixed * 31 + token) % 10007
    return EOS if mixed % 40 == 0 else 32 + mixed % 95


@plugin(name="drafter", **DECLARE)
class Drafter:
    """Guesses right about half of the time."""

    @hookimpl
    def draft(self, sequence: Any, limit: int) -> list[int]:
        so_far = [*sequence.slot.tokens.view().tolist(), sequence.last_token]
        tokens = []
        for i in range(limit):
            tokens.append(model(sequence, so_far) if len(so_far) % 3 or i == 0 else 50)
            so_far.append(tokens[-1])
        return tokens
