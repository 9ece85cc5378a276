"""Compute a finished request again, alone in a sequence and with its own tokens given, and see what the model prefers now."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from llamamg.guard import Divergence
from llamamg.replay import Logits, decode, read_logits
from llamamg.request import Tokens
from llamamg.vocab import Vocabulary

# A model may change its mind when the same tokens are cut into other batches, by more than any margin: rounding sends a
# token to another expert, or another block into sparse attention. Before anybody is accused, it is asked in these cuts.
OTHER_CUTS = (61, 16, 2, 1)
N_FINE_MAX = 4096  # longer prompts are not cut into the last two: that takes minutes


class Alone:
    """One request in sequence `seq_id`, which must be empty; the caller empties it afterwards.

    The given tokens go in whatever the model prefers, so every position is compared, not only those before the first
    difference.
    """

    def __init__(self, llama: Any, context: Any, seq_id: int, prompt: Tokens, given: Tokens, n_vocab: int) -> None:
        self._llama, self._context, self._seq_id, self._n_vocab = llama, context, seq_id, n_vocab
        self._text = [int(token) for token in (*prompt, *given)]
        self._n_prompt, self._n_past = len(prompt), 0

    @property
    def n_left(self) -> int:
        """Tokens still to be computed; the last one given needs no computation."""
        return len(self._text) - 1 - self._n_past

    def step(self, n_most: int) -> tuple[int, Logits] | None:
        """Compute up to `n_most` tokens of the prompt, or one given token; (position, [1, n_vocab]) when there are logits.

        Raises RuntimeError when the library cannot compute it.
        """
        begin = self._n_past
        end = min(begin + n_most, self._n_prompt) if begin < self._n_prompt else begin + 1
        n_logits = int(end >= self._n_prompt)
        rows = [[self._seq_id, begin, n_logits, self._text[begin:end]]]
        decode(self._llama, self._context, rows)
        self._n_past = end
        if not n_logits:
            return None
        return end - self._n_prompt, read_logits(self._llama, self._context, rows, self._n_vocab)

    def compare(self, n_most: int, request: int, never: Tokens) -> Iterator[Divergence | None]:
        """`step`, and for a position with logits what `diverges` says of it."""
        found = self.step(n_most)
        if found is not None:
            position, logits = found
            yield diverges(logits[0], self._text[self._n_prompt + position], request, position, never)


def other_cuts(n_prompt: int) -> tuple[int, ...]:
    """Prompt tokens per batch to try before a divergence is called a violation."""
    return OTHER_CUTS if n_prompt <= N_FINE_MAX else OTHER_CUTS[:2]


def still_there(before: list[Divergence], again: list[Divergence]) -> list[Divergence]:
    """Those of `before` whose given token is not (nearly) the best one in this run either."""
    positions = {d.position for d in again if not d.tie}
    return [d for d in before if d.position in positions]


def diverges(logits: Any, given: int, request: int, position: int, never: Tokens) -> Divergence | None:
    """None when `given` is the best token of `logits` [n_vocab]; `never` are tokens that could not be chosen."""
    allowed = logits.copy()
    allowed[never] = -np.inf
    best = int(allowed.argmax())
    if best == given:
        return None
    behind = float(allowed[best] - allowed[given])
    return Divergence(request, position, given, best, behind if np.isfinite(behind) else 1e30)


def forbidden(vocab: Vocabulary, ignore_eos: bool) -> Tokens:
    """Tokens that a request cannot be given."""
    ends = vocab.eog_tokens() if ignore_eos else []
    return np.array(sorted({*ends, *vocab.suppressed_tokens()}), np.int32)
