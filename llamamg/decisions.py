"""What hooks answer with, where a plain number or list would not say enough."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from llamamg.slot import Slot


@dataclass(frozen=True, slots=True)
class Admit:
    """`admit`: the request may take a slot now."""


@dataclass(frozen=True, slots=True)
class Defer:
    """`admit`: the request stays at the head of the queue and is asked about again in the next step."""


@dataclass(frozen=True, slots=True)
class Reject:
    """`admit`: the client gets an error with this sentence."""

    reason: str


@dataclass(frozen=True, slots=True)
class Retry:
    """`batch_failed`: run the same rows again in `n_parts` batches."""

    n_parts: int = 2


@dataclass(frozen=True, slots=True)
class Fail:
    """`batch_failed`: end the sequences of this batch with an error; all others go on."""


@dataclass(frozen=True, slots=True)
class Shrink:
    """`batch_failed`: give up at least `n_tokens` cached tokens of idle slots, then run the batch again."""

    n_tokens: int


class PrefixHit(Protocol):
    """`find_prefix`: `n_tokens` of the prompt are computed already and can be put into a slot.

    The engine calls `start` once if it takes the offer, then `ready` in each step until it is True, then `restore`. The slot
    is nobody else's from `start` on, other requests go on. All on the engine thread.

    With an attribute `starts_early` that is true, `start` touches nothing of the slot's memory: it may be called before the
    slot is emptied, which takes milliseconds and is done while a device computes the next batch. `batch_submitted` and `ready`
    find it empty.
    """

    n_tokens: int  # may become less, even 0, until `ready` says True

    def start(self, slot: Slot, n_kept: int) -> None:
        """The slot's sequence holds the first `n_kept` tokens of the prompt and nothing else: begin to add to it."""

    def ready(self) -> bool:
        """True once `restore` will not wait. Must not wait itself."""

    def restore(self, slot: Slot) -> None:
        """When this returns, the slot's sequence holds the first `n_tokens` tokens of the prompt and nothing else."""

    def abandon(self) -> None:
        """The request is gone or waited too long: when this returns, nothing writes into the slot's memory any more."""
