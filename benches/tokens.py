"""Whether two runs generated the same, and if not, whether the model itself could not decide."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

TIE_MARGIN = 0.5  # nats between the two best tokens; other batch shapes move quantized models by up to about this much


@dataclass(frozen=True, slots=True)
class Difference:
    """The first token at which a session went another way. `margin` is None where it is not known."""

    session: int
    position: int
    expected: int
    got: int
    margin: float | None

    @property
    def tie(self) -> bool:
        """Whether the two best tokens were too near to call."""
        return self.margin is not None and self.margin < TIE_MARGIN


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
    """What the sessions generate with the plugin off, and how sure the model was."""

    tokens: list[list[int]]
    margins: list[list[float]] = field(default_factory=list)

    def compare(self, tokens: Sequence[Sequence[int]]) -> tuple[list[Difference], int]:
        """The first difference of each session, and how many tokens were compared."""
        found: list[Difference] = []
        n_compared = 0
        for session, (expected, got) in enumerate(zip(self.tokens, tokens, strict=True)):
            n = min(len(expected), len(got))
            at = next((i for i in range(n) if expected[i] != got[i]), None)
            n_compared += n if at is None else at + 1
            if at is not None:
                found.append(Difference(session, at, expected[at], got[at], self._margin(session, at)))
        return found, n_compared

    def _margin(self, session: int, at: int) -> float | None:
        margins = self.margins[session] if session < len(self.margins) else []
        return margins[at] if at < len(margins) and margins[at] != float("inf") else None
