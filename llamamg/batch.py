"""What one step computes: rows of tokens, gathered into batches, gathered into a plan."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Any

from llamamg.request import Tokens
from llamamg.sequence import Sequence


class PlanError(ValueError):
    """A plugin made a plan that does not hold the rows the scheduler chose."""


@dataclass(slots=True, eq=False)
class Row:
    """Consecutive tokens of one sequence. Logits are wanted for the last `n_logits` of them.

    `waits`: what it leaves in the sequence's memory may be read before the next row of it, so it must be computed by then.
    """

    sequence: Sequence
    tokens: Tokens | list[int]
    pos0: int
    n_logits: int
    is_prompt: bool = False
    waits: bool = False

    def __len__(self) -> int:
        return len(self.tokens)


@dataclass(slots=True, eq=False)
class Batch:
    """One llama_decode. `group` names the decode group; `switches` are native switches set for it alone."""

    rows: list[Row] = field(default_factory=list)
    group: int = 0
    switches: dict[str, int] = field(default_factory=dict)

    @property
    def n_tokens(self) -> int:
        """Tokens over all rows."""
        return sum(len(row) for row in self.rows)

    @property
    def has_logits(self) -> bool:
        """Whether anything is sampled from it."""
        return any(row.n_logits for row in self.rows)

    @property
    def waits(self) -> bool:
        """Whether somebody needs it to be computed, not only handed to a device."""
        return any(row.waits for row in self.rows)

    def halves(self) -> tuple[Batch, Batch]:
        """The batch cut in two near its middle, a long row too: the way out when the KV cache has no room for all of it."""
        room = max(1, self.n_tokens // 2)
        head, tail = Batch(group=self.group, switches=self.switches), Batch(group=self.group, switches=self.switches)
        for row in self.rows:
            if room >= len(row):
                head.rows.append(row)
                room -= len(row)
            elif room > 0 and row.n_logits <= len(row) - room:
                begin, rest, pos = row.tokens[:room], row.tokens[room:], row.pos0 + room
                head.rows.append(Row(row.sequence, begin, row.pos0, 0, row.is_prompt))
                tail.rows.append(Row(row.sequence, rest, pos, row.n_logits, row.is_prompt, row.waits))
                room = 0
            else:
                tail.rows.append(row)
                room = 0
        return head, tail


@dataclass(slots=True, eq=False)
class Plan:
    """The batches of one step. Plugins may split, move and reorder; `check` proves that no row was lost or changed."""

    batches: list[Batch] = field(default_factory=list)
    _rows: list[tuple[Row, Tokens | list[int], int, int, int, int]] = field(default_factory=list)

    def seal(self) -> Plan:
        """Remember the rows as the scheduler chose them."""
        self._rows = [
            (row, row.tokens, len(row), row.pos0, row.n_logits, batch.group)
            for batch in self.batches
            for row in batch.rows
        ]
        return self

    def split(self, batch: Batch, groups: Seq[Seq[Row]]) -> list[Batch]:
        """Replace `batch` by one batch for each of `groups` (empty groups are dropped)."""
        at = self.batches.index(batch)
        made = [Batch(list(rows), batch.group, dict(batch.switches)) for rows in groups if rows]
        self.batches[at : at + 1] = made
        return made

    def move(self, row: Row, batch: Batch) -> None:
        """Put `row` at the end of `batch`."""
        for other in self.batches:
            if row in other.rows:
                other.rows.remove(row)
        batch.rows.append(row)
        self.batches = [b for b in self.batches if b.rows]

    def reorder(self, batch: Batch, key: Callable[[Row], Any]) -> None:
        """Sort the rows of `batch`."""
        batch.rows.sort(key=key)

    def check(self, n_batch: int) -> None:
        """Raise PlanError unless every chosen row is there once, unchanged, and no batch is too large."""
        have = {id(row): batch.group for batch in self.batches for row in batch.rows}
        if sum(len(batch.rows) for batch in self.batches) != len(self._rows) or len(have) != len(self._rows):
            raise PlanError("a row was added, lost or put into two batches")
        for row, tokens, n, pos0, n_logits, group in self._rows:
            same = row.tokens is tokens and (len(row), row.pos0, row.n_logits) == (n, pos0, n_logits)
            if id(row) not in have or not same:
                raise PlanError("a row's tokens, position or outputs were changed")
            if have[id(row)] != group:
                raise PlanError("a row was put into a batch of another decode group, where its sequence is not")
        if any(batch.n_tokens > n_batch for batch in self.batches):
            raise PlanError(f"a batch has more than n_batch = {n_batch} tokens")


@dataclass(slots=True)
class StepState:
    """What hooks may know of a step. Read-only; one object, refreshed each step, so keep nothing of it.

    With several decode groups `prefilling` and `decoding` are, in hooks about rows, those of the context that is planned.
    """

    n_batch: int
    n_ubatch: int
    slots: list[Any] = field(default_factory=list)
    waiting: list[Any] = field(default_factory=list)
    prefilling: list[Sequence] = field(default_factory=list)
    decoding: list[Sequence] = field(default_factory=list)
    step: int = 0
    itl: Any = None  # ItlWindow
    n_users: int = 0  # sequences in slots
    n_decoding: int = 0  # sequences that decode, in all contexts
    groups: tuple[range, ...] = ()  # sequence ids of each decode group; one group unless a plugin asked for more

    @property
    def itl_p50_ms(self) -> float:
        """Median of the last inter-token gaps, 0.0 before there are any."""
        return float(self.itl.percentile_ms(50)) if self.itl else 0.0

    @property
    def itl_p99_ms(self) -> float:
        """99th percentile of the last inter-token gaps, 0.0 before there are any."""
        return float(self.itl.percentile_ms(99)) if self.itl else 0.0
