"""What the sessions of a block do. A block is the same work each time, so that its time can be compared."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from llamamg.request import Tokens
from llamamg.vocab import Vocabulary

WORDS = [
    "river",
    "lamp",
    "stone",
    "green",
    "seven",
    "walk",
    "paper",
    "cloud",
    "under",
    "bright",
    "copper",
    "slow",
    "garden",
    "wheel",
    "salt",
    "north",
    "open",
    "quiet",
    "bridge",
    "winter",
    "apple",
    "board",
    "letter",
    "round",
    "deep",
    "yellow",
    "music",
    "basket",
    "narrow",
    "hill",
    "cotton",
    "early",
    "silver",
    "farm",
    "window",
    "light",
]


@dataclass(frozen=True, slots=True)
class Load:
    """Resident sessions that decode, and perhaps a prompt that arrives meanwhile."""

    name: str
    help: str
    n_sessions: int
    metrics: tuple[str, ...]  # the first one is what the load is about
    ends_early: tuple[int, ...] = ()  # sessions that end as soon as all decode
    has_prompt: bool = False  # one slot more, for a prompt computed beside the decoders
    repeats: bool = False  # sessions hold a text and begin to repeat it
    returns: bool = False  # all sessions share one slot; the first one comes back after the others had it
    n_pairs: int = 40  # enough to find 5 % on a machine whose blocks spread by that much

    @property
    def n_slots(self) -> int:
        """Slots it takes."""
        return 1 if self.returns else self.n_sessions + self.has_prompt


DECODE = ("decode_tps", "itl_p99_ms", "itl_max_ms")
MIXED = ("itl_max_ms", "itl_p99_ms", "prefill_tps", "decode_tps")
RETURN = ("prefill_tps", "decode_tps")
LOADS = {
    load.name: load
    for load in (
        Load("solo", "one session decodes", 1, DECODE),
        Load("five", "five sessions, of which the second and the fourth end at once: gaps between busy slots", 5, DECODE, (1, 3)),
        Load("mixed", "two sessions decode while a prompt arrives", 2, MIXED, has_prompt=True, n_pairs=10),
        Load("rewrite", "one session repeats a text it has just read", 1, DECODE, repeats=True),
        Load("return", "a conversation comes back to a slot that another one had meanwhile", 2, RETURN, returns=True, n_pairs=10),
    )
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Sizes:
    """Tokens: what each session holds, what it generates in a block, and the prompt that arrives."""

    depth: int = 256
    n_tokens: int = 24
    n_prompt: int = 1024

    def n_predict(self, load: Load) -> int:
        """Tokens a session may generate: more than a block takes, also where prompts advance by a few tokens a step."""
        return max(256, 2 * self.n_prompt) if load.has_prompt else 2 * self.n_tokens + 64

    def needed(self, load: Load) -> int:
        """Context of one slot, in tokens."""
        decoding = self.depth + self.n_predict(load) + 8
        return max(decoding, self.n_prompt + 8) if load.has_prompt else decoding


def resident_prompt(vocab: Vocabulary, load: Load, sizes: Sizes, session: int) -> Tokens:
    """What a session holds: words in an order of its own; with `repeats`, a paragraph written out again and again."""
    random = np.random.default_rng(1000 + session)
    if not load.repeats:
        return words(vocab, random, sizes.depth)
    paragraph = words(vocab, random, max(16, sizes.depth // 4))
    return np.resize(paragraph, sizes.depth).astype(np.int32)


def arriving_prompt(vocab: Vocabulary, sizes: Sizes) -> Tokens:
    """The prompt that arrives; always the same one, and computed anew each time."""
    return words(vocab, np.random.default_rng(77), sizes.n_prompt)


def words(vocab: Vocabulary, random: np.random.Generator, n: int) -> Tokens:
    """Exactly `n` tokens of random common words."""
    parts: list[NDArray[np.int32]] = []
    have = 0
    while have < n:
        text = "".join(f" {WORDS[i]}" for i in random.integers(0, len(WORDS), 64))
        parts.append(vocab.tokenize(text, have == 0, False))
        have += len(parts[-1])
    return np.concatenate(parts)[:n]
