"""Which cells of the grid are measured, in which order, and what fits into the time there is."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from .errors import BenchError

ATTENTION_DEPTH = (
    200_000  # tokens at which a long prompt's mean rate has halved; only orders and estimates depend on it
)
COPY_SPEED = 10  # a state is saved or loaded so many times as fast as its prompt is computed, or faster
MARGIN = 1.1


@dataclass(frozen=True, slots=True)
class Cell:
    """`n_sessions` sessions of `depth` tokens each, measured for the `repeat`-th time."""

    n_sessions: int
    depth: int
    repeat: int = 0
    is_copied: bool = False  # every session gets what the cell of one session left behind

    @property
    def cost(self) -> float:
        """Work, in no particular unit."""
        if self.is_copied:
            return self.n_sessions * self.depth / COPY_SPEED
        return self.n_sessions * self.depth * (1 + self.depth / ATTENTION_DEPTH)

    @property
    def label(self) -> str:
        """For progress and messages."""
        times = f", repeat {self.repeat + 1}" if self.repeat else ""
        return f"{self.n_sessions} x {depth_name(self.depth)}{times}"


def depth_name(depth: int) -> str:
    """50000 as 50k."""
    return f"{depth // 1000}k" if depth >= 1000 and depth % 1000 == 0 else str(depth)


def parse_depths(text: str) -> list[int]:
    """`5k,50k,1500` as tokens, ascending. Raises BenchError."""
    return _numbers(text, "--depths", least=2)


def parse_counts(text: str, option: str) -> list[int]:
    """A list of positive numbers, ascending. Raises BenchError."""
    return _numbers(text, option, least=1)


def _numbers(text: str, option: str, least: int) -> list[int]:
    found = set()
    for word in text.split(","):
        digits, unit = (word.strip()[:-1], 1000) if word.strip().lower().endswith("k") else (word.strip(), 1)
        if not digits.isdigit() or int(digits) * unit < least:
            raise BenchError(
                f"{option} takes numbers of at least {least} with commas between, such as 5k,50k: {word!r} is none"
            )
        found.add(int(digits) * unit)
    return sorted(found)


def cells(slots: Sequence[int], depths: Sequence[int], n_repeats: int, copy_from: int | None = None) -> list[Cell]:
    """All cells, the most important first: each cell before its repeats, cheap ones repeated before dear ones begin.

    Several sessions of `copy_from` tokens or more are copies, and follow the one session that they are copies of.
    """

    def is_copied(n: int, depth: int) -> bool:
        return copy_from is not None and n > 1 and depth >= copy_from

    def order(cell: Cell) -> tuple[float, int, int]:
        computed = Cell(1, cell.depth) if cell.is_copied else cell
        return computed.cost * (1 + cell.repeat) ** 2, cell.repeat, cell.n_sessions

    every = [Cell(n, depth, r, is_copied(n, depth)) for n in slots for depth in depths for r in range(n_repeats)]
    return sorted(every, key=order)


class Budget:
    """Says whether a cell still fits, from what the cells before it took."""

    def __init__(self, minutes: float | None, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._deadline = None if minutes is None else clock() + 60 * minutes
        self._taken: list[tuple[Cell, float]] = []

    def left_s(self) -> float:
        """Seconds until the end; infinite without a limit."""
        return float("inf") if self._deadline is None else self._deadline - self._clock()

    def took(self, cell: Cell, seconds: float) -> None:
        """A cell is done."""
        self._taken.append((cell, seconds))

    def learn(self, other: Budget) -> None:
        """Take over what another one knows about the speed."""
        self._taken = list(other._taken)

    def estimate_s(self, cell: Cell) -> float:
        """Seconds that a cell will take; 0 while nothing is known."""
        if not self._taken:
            return 0.0
        same = [
            seconds for done, seconds in self._taken if (done.n_sessions, done.depth) == (cell.n_sessions, cell.depth)
        ]
        if same:
            return MARGIN * same[-1]
        # The cells that cost most are the best guide: what does not grow with the prompt weighs least in them.
        nearest = sorted(self._taken, key=lambda taken: taken[0].cost)[-2:]
        return MARGIN * max(seconds * cell.cost / done.cost for done, seconds in nearest)

    def refuses(self, cell: Cell) -> str | None:
        """Why a cell is left out; None when it fits."""
        left = self.left_s()
        need = self.estimate_s(cell)
        if left <= 0:
            return "the time was up"
        if need > left:
            return f"it would have taken about {need:.0f} s, and {left:.0f} s were left"
        return None
