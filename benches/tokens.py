"""Whether two runs generated the same, and if not, whether the model itself could not decide."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from llamamg.request import TokenProb

Others = list[tuple[int, float]]  # token, nats
TIE_MARGIN = 0.5  # nats between the two best tokens; other batch shapes move quantized models by up to about this much


@dataclass(frozen=True, slots=True)
class Difference:
    """The first token at which a session went another way. `behind`: by how many nats the reference preferred its own token
    to the one that came; None when it is not among the reference's best, or nothing is known of them."""

    session: int
    position: int
    expected: int
    got: int
    behind: float | None

    @property
    def tie(self) -> bool:
        """Whether the two tokens were too near to call. That two others were near each other excuses nothing."""
        return self.behind is not None and self.behind < TIE_MARGIN


@dataclass(slots=True)
class TokenCount:
    """All comparisons of one side with the reference."""

    n_compared: int = 0
    n_ties: int = 0
    n_changed: int = 0  # sessions and blocks that went another way without a tie
    first: Difference | None = None  # the first that was no tie

    def add(self, differences: Sequence[Difference], n_compared: int) -> None:
        """Count a block."""
        self.n_compared += n_compared
        for difference in differences:
            if difference.tie:
                self.n_ties += 1
            else:
                self.n_changed += 1
                self.first = self.first or difference

    def json(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)


@dataclass(slots=True)
class Reference:
    """What the sessions generate with the plugin off, and what else the model could have said: `best_others`."""

    tokens: list[list[int]]
    others: list[list[Others]] = field(default_factory=list)

    def compare(self, tokens: Sequence[Sequence[int]]) -> tuple[list[Difference], int]:
        """The first difference of each session, and how many tokens were compared."""
        found: list[Difference] = []
        n_compared = 0
        for session, (expected, got) in enumerate(zip(self.tokens, tokens, strict=True)):
            n = min(len(expected), len(got))
            at = next((i for i in range(n) if expected[i] != got[i]), None)
            n_compared += n if at is None else at + 1
            if at is not None:
                found.append(Difference(session, at, expected[at], got[at], self._behind(session, at, got[at])))
        return found, n_compared

    def _behind(self, session: int, at: int, token: int) -> float | None:
        others = self.others[session] if session < len(self.others) else []
        return dict(others[at]).get(token) if at < len(others) else None


def best_others(probs: Sequence[TokenProb], is_eog: Callable[[int], bool] = lambda token: False) -> list[Others]:
    """For each token given, the other candidates that may be sampled and how many nats each was behind it."""
    return [
        [(token, prob.prob - p) for token, p in prob.top if token != prob.id and not is_eog(token)] for prob in probs
    ]
