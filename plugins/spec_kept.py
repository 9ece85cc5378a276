"""What the plugin spec keeps: of each slot its index, of each request the draft of this step and one that is only compared."""

from __future__ import annotations

from dataclasses import dataclass

from llamamg import Draft, DraftIndex
from llamamg_plugins.spec_cost import Account


@dataclass(slots=True)
class Found:
    """A draft of one sequence; the first `width` tokens of it are verified in this step."""

    draft: Draft
    kind: int
    width: int = 0


@dataclass(slots=True)
class Guess:
    """A draft that was not verified: it is compared with the tokens that come, which costs nothing and tells as much."""

    tokens: list[int]
    draft: Draft
    n_decoded: int  # of the sequence when it was made
    n_right: int = 0


@dataclass(slots=True)
class Reader:
    """What is kept of one slot: an index for each kind, and which request it follows."""

    indexes: list[DraftIndex]
    request: int = -1
    account: Account | None = None  # of that request
    is_behind: bool = False  # there is more of its text to take in
