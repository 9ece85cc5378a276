"""The sequence memory of several contexts as one: each call goes to the context where the sequence lies."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq

import numpy as np
from numpy.typing import NDArray

from llamamg.handover import Handover
from llamamg.kvcache import ON_DEVICE, PARTIAL_ONLY, KVCache, _nothing
from llamamg.layout import Layout
from llamamg.statebytes import OddState, fitted, portable, with_streams


class ContextsKV(KVCache):
    """Sequence ids are those of the layout. A call waits until the context in question does not compute.

    Only the engine thread may call it; `transfer` is for whoever has both contexts to itself.
    """

    def __init__(
        self,
        parts: Seq[KVCache],
        layout: Layout,
        handover: Handover,
        settle: Callable[[int], None] = lambda context: None,
    ) -> None:
        first = parts[0]
        self.n_swa, self.can_shift = first.n_swa, first.can_shift
        self.n_rs_seq, self.removal = first.n_rs_seq, first.removal
        self._snapshots, self.empty = {}, _nothing
        self._differ = len({part.n_streams for part in parts}) > 1
        self._parts, self._layout, self._handover, self._settle = tuple(parts), layout, handover, settle

    def _at(self, seq_id: int) -> tuple[KVCache, int]:
        context = self._layout.context(seq_id)
        self._settle(context)
        return self._parts[context], self._layout.local(seq_id)

    def local(self, seq_id: int) -> int:
        return self._layout.local(seq_id)

    def remove(self, seq_id: int, p0: int, p1: int = -1) -> bool:
        part, local = self._at(seq_id)
        if p0 <= 0 and p1 < 0:
            self.empty(seq_id)
        return part.remove(local, p0, p1)

    def copy(self, source: int, target: int) -> None:
        """Both must be in one context."""
        part, local = self._at(source)
        if self._layout.context(target) != self._layout.context(source):
            raise ValueError(f"sequences {source} and {target} are in different contexts: use transfer")
        part.copy(local, self._layout.local(target))

    def copy_now(self, seq_id: int) -> bool:
        """On any thread, while the context of `seq_id` computes nothing else."""
        return self._parts[self._layout.context(seq_id)].copy_now(self._layout.local(seq_id))

    def shift(self, seq_id: int, p0: int, p1: int, delta: int) -> None:
        part, local = self._at(seq_id)
        part.shift(local, p0, p1, delta)

    def pos_min(self, seq_id: int) -> int:
        part, local = self._at(seq_id)
        return part.pos_min(local)

    def pos_max(self, seq_id: int) -> int:
        part, local = self._at(seq_id)
        return part.pos_max(local)

    def clear(self) -> None:
        for context, part in enumerate(self._parts):
            self._settle(context)
            part.clear()

    def save(self, seq_id: int, flags: int = PARTIAL_ONLY) -> NDArray[np.uint8] | None:
        """In a form that fits every context, also where they have different numbers of streams."""
        part, local = self._at(seq_id)
        data = part.save(local, flags)
        if data is None or not self._differ or flags & ON_DEVICE:
            return data
        has_streams = not part.is_recurrent
        if flags & PARTIAL_ONLY:
            return with_streams(data, data, local, part.n_streams, 1, partial_is_kv=has_streams)
        partial = part.save(local, PARTIAL_ONLY)
        return None if partial is None else portable(data, partial, local, part.n_streams, has_streams)

    def size(self, seq_id: int, flags: int = 0) -> int:
        part, local = self._at(seq_id)
        return part.size(local, flags)

    def restore(self, seq_id: int, data: NDArray[np.uint8], flags: int = PARTIAL_ONLY) -> bool:
        part, local = self._at(seq_id)
        if not self._differ or flags & ON_DEVICE:
            return part.restore(local, data, flags)
        has_streams = not part.is_recurrent
        try:
            if flags & PARTIAL_ONLY:
                data = with_streams(data, data, 0, 1, part.n_streams, partial_is_kv=has_streams)
            else:
                data = fitted(data, part.n_streams, has_streams)
        except OddState:
            return False  # it was saved by a server with other contexts
        return part.restore(local, data, flags)

    def transfer(self, source: int, target: int, swap_bytes_max: int = 0) -> bool:
        """Move a sequence to an id of another context, on any thread while neither of the two contexts computes.

        What `target` held goes the other way if it is at most `swap_bytes_max` bytes, else it is lost; True when it did.
        Raises HandoverError; then `source` still has everything.
        """
        giver, a = self._parts[self._layout.context(source)], self._layout.local(source)
        taker, b = self._parts[self._layout.context(target)], self._layout.local(target)
        small = swap_bytes_max > 0 and taker.pos_max(b) >= 0 and taker.size(b) <= swap_bytes_max
        kept = taker.save_for(b, giver.n_streams) if small else None
        taker.remove(b, -1, -1)
        self._handover.move(giver, a, taker, b)
        giver.remove(a, -1, -1)
        return kept is not None and giver.restore(a, kept, 0)
