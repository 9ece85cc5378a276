"""A lane of KV cache and recurrent state. It outlives the sequences that run in it, and keeps their tokens for reuse."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from llamamg.sequence import Sequence, TokenBuffer

if TYPE_CHECKING:
    from llamamg.kept import KeptState
    from llamamg.transfer import Transfer


GIVE_WAY_S = 0.002  # for which a step waits at most; a copy is far faster than a prompt


@dataclass(slots=True)
class Checkpoint:
    """The part of a sequence's memory that cannot be cut back (recurrent state, SWA window), as it was after `n_tokens`.

    `llamamg.kept.host_bytes(data)` is it in main memory.
    """

    n_tokens: int
    pos_min: int
    pos_max: int
    request_id: int
    data: NDArray[np.uint8] | KeptState


@dataclass(slots=True, eq=False)
class Slot:
    """`id` is what clients see; `seq_id` is where it lies in the KV cache and changes when it is moved.

    `home` is the id it has in its group; only while its prompt is computed in another context it lies elsewhere.
    """

    id: int
    seq_id: int
    home: int = -1  # made equal to seq_id at first
    context: int = 0  # of seq_id
    group: int = 0  # the context of home
    moving: bool = False  # on its way to another context, or waiting for that: nobody may use it
    restoring: bool = False  # stored state is being copied into it for a request
    goes_back: bool = False  # its last sequence ended so that what it holds is taken back by the next decode only
    stays: bool = False  # idle, and what it holds would be lost for good if another sequence took its place
    copying: Transfer | None = None  # what it held when its last sequence ended is being copied out of it
    tokens: TokenBuffer = field(default_factory=TokenBuffer)
    checkpoints: list[Checkpoint] = field(default_factory=list)
    sequence: Sequence | None = None
    t_last_used: float = -1.0  # seconds, perf_counter clock; -1: never
    last: SlotView | None = None  # what the last sequence left behind, for /slots

    def __post_init__(self) -> None:
        if self.home < 0:
            self.home, self.group = self.seq_id, self.context

    @property
    def busy(self) -> bool:
        """Whether a sequence runs in it, or it is being moved or filled."""
        return self.sequence is not None or self.moving or self.restoring

    def loses(self, begin: int, end: int) -> bool:
        """Whether tokens from `begin` to below `end` are still to be copied out of it."""
        return begin < len(self.tokens) and self.copying is not None and not self.copying.is_past(end)

    def give_way(self, begin: int, end: int) -> None:
        """Cells [begin, end) are about to be written: what was to be copied of them is copied first, if that is quick."""
        if self.copying is not None:
            self.copying.give_way(begin, end, GIVE_WAY_S)
            if self.copying.is_over:
                self.copying = None

    def cut(self, n_kept: int) -> None:
        """All behind the first `n_kept` tokens is about to change: when this returns, nobody reads it any more."""
        if self.copying is not None:
            self.copying.cut(n_kept)
            if self.copying.is_over:
                self.copying = None


@dataclass(slots=True)
class SlotView:
    """A slot as /slots shows it."""

    id: int
    n_ctx: int
    is_processing: bool
    id_task: int = -1
    n_prompt_tokens: int = 0
    n_prompt_processed: int = 0
    n_prompt_cached: int = 0
    n_decoded: int = 0
    n_remain: int = -1
    has_next_token: bool = False
    has_new_line: bool = False
    n_tokens: int = 0
    params: dict[str, Any] = field(default_factory=dict)
