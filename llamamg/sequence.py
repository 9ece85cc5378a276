"""A token stream being computed, and the lane it runs in."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING

import numpy as np

from llamamg.request import FinishReason, Request, Timings, Tokens

if TYPE_CHECKING:
    from llamamg.output import TextStream
    from llamamg.sampler import Sampler
    from llamamg.slot import Slot


class SequenceState(Enum):
    """Where a sequence stands."""

    WAITING = "waiting"
    PREFILL = "prefill"
    DECODE = "decode"
    FINISHED = "finished"


@dataclass(slots=True, eq=False)
class Sequence:
    """One request in one slot. `n_past` counts the tokens of it that are, or are about to be, in the KV cache."""

    request: Request
    slot: Slot
    sampler: Sampler
    text: TextStream
    state: SequenceState = SequenceState.PREFILL
    n_past: int = 0
    n_decoded: int = 0
    last_token: int = -1  # sampled, not yet in the cache
    goes_back: bool = False  # its recurrent state is taken back by its next decode, until which it must not be copied
    is_cut: bool = False  # the last part of its prompt ended where a plugin's budget did
    replay_from: int = -1  # tokens of the slot from here on are to be computed again, at the head of the next row
    n_predict: int = -1
    truncated: bool = False
    timings: Timings = field(default_factory=Timings)
    t_start: float = field(default_factory=time.perf_counter)  # into the slot; seconds
    t_prompt: float = 0.0  # prompt done
    t_last: float = 0.0  # last token
    finish: FinishReason | None = None

    @property
    def n_prompt(self) -> int:
        """Tokens of the prompt."""
        return len(self.request.prompt)

    @property
    def n_prompt_left(self) -> int:
        """Prompt tokens not yet planned."""
        return self.n_prompt - self.n_past

    @property
    def n_remaining(self) -> int:
        """Tokens that may still be generated; a large number when unlimited."""
        return self.n_predict - self.n_decoded if self.n_predict >= 0 else 1 << 30


class TokenBuffer:
    """A growing int32 array: the tokens a slot holds in the KV cache."""

    __slots__ = ("_data", "n")

    def __init__(self, capacity: int = 256) -> None:
        self._data = np.empty(capacity, np.int32)
        self.n = 0

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, index: slice | int) -> Tokens | int:
        return self.view()[index] if isinstance(index, slice) else int(self.view()[index])

    def view(self) -> Tokens:
        """The tokens, not copied; valid until the next change."""
        return self._data[: self.n]

    def _room(self, n: int) -> None:
        if n > len(self._data):
            grown = np.empty(max(n, 2 * len(self._data)), np.int32)
            grown[: self.n] = self._data[: self.n]
            self._data = grown

    def append(self, token: int) -> None:
        """Add one token."""
        self._room(self.n + 1)
        self._data[self.n] = token
        self.n += 1

    def extend(self, tokens: Tokens) -> None:
        """Add tokens."""
        self._room(self.n + len(tokens))
        self._data[self.n : self.n + len(tokens)] = tokens
        self.n += len(tokens)

    def keep(self, n: int) -> None:
        """Forget all but the first `n`."""
        self.n = min(self.n, n)

    def discard(self, start: int, n: int) -> None:
        """Cut `n` tokens out, beginning at `start`."""
        self._data[start : self.n - n] = self._data[start + n : self.n].copy()
        self.n -= n

    def common_prefix(self, tokens: Tokens) -> int:
        """How many leading tokens are the same. Compares in growing blocks, so an early difference costs little."""
        n, at, step = min(self.n, len(tokens)), 0, 64
        while at < n:
            end = min(n, at + step)
            differs = self._data[at:end] != tokens[at:end]
            if differs.any():
                return at + int(differs.argmax())
            at, step = end, step * 8
        return n
