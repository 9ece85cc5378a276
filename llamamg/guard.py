"""What a plugin promises about the model's answers. The replay that checks a promise reads these values."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

# How far, in nats, a token may be behind the best one and still count as a tie. Computing the same tokens in batches of
# another shape moves the distance of two logits by up to 0.4 (SmolLM2) and 0.9 (micro hybrid) where weights are quantized,
# 99 of 100 times by less than 0.3; the tokens that fell the other way were less than 0.1 behind.
TIE_MARGIN = 0.5


class GuardKind(Enum):
    """From the strictest promise to the weakest."""

    EXACT = "exact"
    SAME_TOKENS = "same-tokens"
    CLOSE = "close"


@dataclass(frozen=True, slots=True)
class Guard:
    """A promise: `Guard.exact()`, `Guard.same_tokens()` or `Guard.close(kl=…, top1=…)`. `str()` gives the text form."""

    kind: GuardKind
    kl: float | None = None  # largest mean KL divergence, nats per token
    top1: float | None = None  # smallest share of positions whose best token agrees

    @classmethod
    def exact(cls) -> Guard:
        """Every logit has the same bits."""
        return cls(GuardKind.EXACT)

    @classmethod
    def same_tokens(cls) -> Guard:
        """Greedy decoding gives the same tokens when the batches have the same shapes."""
        return cls(GuardKind.SAME_TOKENS)

    @classmethod
    def close(cls, *, kl: float, top1: float) -> Guard:
        """Distributions stay near: mean KL at most `kl` nats, best tokens agree at a share of `top1` or more."""
        if not (kl >= 0.0 and 0.0 <= top1 <= 1.0):
            raise ValueError(f"Guard.close needs kl >= 0 and top1 between 0 and 1, not kl={kl}, top1={top1}")
        return cls(GuardKind.CLOSE, kl, top1)

    def __str__(self) -> str:
        if self.kind is GuardKind.CLOSE:
            return f"close(kl={self.kl:g}, top1={self.top1:g})"
        return str(self.kind.value)


@dataclass(frozen=True, slots=True)
class Divergence:
    """A position where the model, asked again, prefers another token than the one that was given."""

    request: int
    position: int  # of the generated token, from 0
    given: int
    best: int
    behind: float  # nats that `given` is behind `best`

    @property
    def tie(self) -> bool:
        """Whether the two were too near to call. Stricter than the margin of the two best: `given` must be near, too."""
        return self.behind < TIE_MARGIN


@dataclass(slots=True)
class GuardCounts:
    """What idle replays said of one plugin: counted are requests during which it acted."""

    n_replays: int = 0
    n_positions: int = 0  # tokens compared
    n_ties: int = 0
    n_missed: int = 0  # tokens that differ and are no tie
    n_violations: int = 0


class GuardViolation(Exception):
    """A plugin broke its promise; the text says where."""
