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
        self._sizes: dict[int, tuple[int, int]] = {}  # slot -> tokens, and the bytes that these take
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
        n_bytes = self._n_bytes(slot, free)
        if n_bytes is not None and n_bytes <= arrange.SWAP_BYTES_MAX:
            return False
        return not (self._calls.hooks.is_stored and self._calls.first("is_stored", slot))

    def _n_bytes(self, slot: Slot, free: Seq[int]) -> int | None:
        n_tokens = len(slot.tokens)
        known = self._sizes.get(slot.id)
        if known is None or known[0] != n_tokens:
            if slot.context not in free:
                return None
            known = self._sizes[slot.id] = (n_tokens, self._kv.size(slot.seq_id))
        return known[1]
