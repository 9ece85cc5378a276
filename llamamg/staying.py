"""Which idle slots nobody may be moved to, because what they hold would be lost."""

from __future__ import annotations

import time
from collections.abc import Iterable
from collections.abc import Sequence as Seq

from llamamg import arrange
from llamamg.hookcalls import HookCalls
from llamamg.kvcache import KVCache
from llamamg.slot import Slot

AGAIN_S = 0.1  # how soon a slot that stays is looked at again: its content may have been saved meanwhile
AGAIN_MAX_S = 6.4  # each time twice as late


class Staying:
    """Keeps `slot.stays` of idle slots. Runs on the engine thread."""

    def __init__(self, slots: list[Slot], kv: KVCache, calls: HookCalls) -> None:
        self._slots, self._kv, self._calls = slots, kv, calls
        self._n_small = 0  # so many tokens were found to be few enough to change places
        self._n_large = 1 << 62  # so many were not
        self._again_s, self._again_at = AGAIN_S, float("inf")

    @property
    def is_due(self) -> bool:
        """Whether slots that stayed are to be looked at again."""
        return self._again_at < float("inf") and time.monotonic() >= self._again_at

    def reset(self) -> None:
        """A sequence began or ended: look soon."""
        self._again_s = AGAIN_S

    def mark(self, slots: Iterable[Slot], free: Seq[int]) -> None:
        """Look at these slots. Memory is asked in contexts that are `free` only: in others a batch is under way."""
        for slot in slots:
            slot.stays = not slot.busy and len(slot.tokens) > 0 and self._would_be_lost(slot, free)
        self._again_at = float("inf")
        if any(slot.stays for slot in self._slots):
            self._again_at = time.monotonic() + self._again_s
            self._again_s = min(2 * self._again_s, AGAIN_MAX_S)

    def _would_be_lost(self, slot: Slot, free: Seq[int]) -> bool:
        if slot.copying is not None and not slot.copying.is_over:
            return True  # a move would cut the copy
        if self._calls.hooks.is_stored and self._calls.first("is_stored", slot):
            return False
        return not self._is_small(slot, free)

    def _is_small(self, slot: Slot, free: Seq[int]) -> bool:
        """Whether it may change places. More tokens never take less room, and to ask takes a millisecond for 50k tokens."""
        n_tokens = len(slot.tokens)
        if n_tokens <= self._n_small or n_tokens >= self._n_large or slot.context not in free:
            return n_tokens <= self._n_small
        is_small = self._kv.size(slot.seq_id) <= arrange.SWAP_BYTES_MAX
        if is_small:
            self._n_small = n_tokens
        else:
            self._n_large = n_tokens
        return is_small
