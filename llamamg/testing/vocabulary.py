"""A vocabulary of bytes, and a sampler without a native chain."""

from __future__ import annotations

import numpy as np

from llamamg.request import SamplingParams, Tokens
from llamamg.vocab import Vocabulary

EOS = 2


class FakeSampler:
    """What the scheduler expects of a sampler, without a native chain."""

    def __init__(self, params: SamplingParams) -> None:
        self.params = params
        self.closed = False

    def close(self) -> None:
        """Remember that it was given back."""
        self.closed = True


class FakeVocabulary(Vocabulary):
    """256 tokens, each its own byte; 0 to 31 are special, 2 ends a generation."""

    def __init__(self) -> None:
        self.n_vocab, self.type, self.bos, self.eos, self.add_bos = 256, 2, 1, EOS, False
        self.chat_template = None
        self.bos_piece, self.eos_piece = "<s>", "</s>"

    def tokenize(self, text: str | bytes, add_special: bool, parse_special: bool) -> Tokens:
        data = text.encode() if isinstance(text, str) else text
        return np.frombuffer(data, np.uint8).astype(np.int32)

    def piece(self, token: int, special: bool = True) -> bytes:
        if token < 32 and token != 10:
            return f"<{token}>".encode() if special else b""
        return bytes([token])

    def is_eog(self, token: int) -> bool:
        return token == EOS
