"""Prompts of a known length that no two sessions and no two runs share: token ids, or words where a server wants text."""

from __future__ import annotations

from typing import Any

import numpy as np

from .loads import WORDS
from .sides import Server, SideError

FIRST_ID = 256  # many vocabularies begin with bytes and end with control tokens or padding
LAST_PART = 0.9


def n_vocab(server: Server) -> int:
    """Size of the vocabulary as /v1/models has it. Raises SideError."""
    meta = model_facts(server)
    if not isinstance(meta.get("n_vocab"), int):
        raise SideError(
            f"{server.name} does not say how large its vocabulary is: `llamamg bench grid --words` measures it"
        )
    return int(meta["n_vocab"])


def model_facts(server: Server) -> dict[str, Any]:
    """What tells one model from another: the fields of /v1/models that llama-server has."""
    data = server.get("/v1/models").get("data") or [{}]
    meta = data[0].get("meta") or {}
    return {key: meta[key] for key in ("n_vocab", "n_embd", "n_params", "size", "vocab_type") if key in meta}


class Prompts:
    """Prompts of one grid. The same (session, depth, repeat) gives the same prompt on every side."""

    def __init__(self, seed: int, n_vocab: int | None, words: list[str] | None = None) -> None:
        self._seed, self._n_vocab, self._words = seed, n_vocab, words or WORDS

    def make(self, session: int, depth: int, repeat: int) -> list[int] | str:
        """A prompt of `depth` tokens (words: about as many)."""
        random = np.random.default_rng([self._seed, session, depth, repeat])
        if self._n_vocab is None:
            return " ".join(self._words[i] for i in random.integers(0, len(self._words), depth))
        first = min(FIRST_ID, self._n_vocab // 4)
        last = max(first + 1, int(LAST_PART * self._n_vocab))
        return [int(i) for i in random.integers(first, last, depth)]

    def longer(self, prompt: list[int] | str, which: int = 0) -> list[int] | str:
        """The same prompt and one token more, one that is in it, so that nothing has to be taken back from the slot."""
        if isinstance(prompt, list):
            return [*prompt, prompt[which % len(prompt)]]
        words = prompt.split(" ", which + 1)
        return f"{prompt} {words[which % len(words)]}"


def single_words(server: Server) -> list[str]:
    """The words that this server's vocabulary holds as one token each; all of them where it cannot be asked."""
    try:
        found = [word for word in WORDS if len(server.post("/tokenize", {"content": f" {word}"})["tokens"]) == 1]
    except (SideError, KeyError, TypeError):
        return list(WORDS)
    return found or list(WORDS)
