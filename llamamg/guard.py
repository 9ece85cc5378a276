"""What a plugin promises about the model's answers. The replay that checks a promise reads these values."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


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


class Outcome(Enum):
    """How one replay ended. A tie is a divergence where the two best logits were too near to call."""

    HELD = "held"
    TIE = "tie"
    VIOLATED = "violated"


@dataclass(frozen=True, slots=True)
class Verdict:
    """The result of replaying one request with the plugin off."""

    plugin: str
    guard: Guard
    outcome: Outcome
    n_tokens: int  # tokens compared
    first_difference: int | None = None  # position of the first differing token
    margin: float | None = None  # gap of the two best logits there
