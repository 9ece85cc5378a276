"""When to snapshot the memory that cannot be cut back, which snapshots to keep, and which one a prompt can start from.

The rules are llama-server's, so that the same chats hit in both: near the end of a prompt and at user messages.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from llamamg.kept import KeptState
from llamamg.kvcache import KVCache
from llamamg.sequence import Sequence
from llamamg.slot import Checkpoint, Slot

TAIL = 4  # the last tokens of a chat prompt are the template's; a follow-up shares everything before them


@dataclass(frozen=True, slots=True)
class CheckpointPolicy:
    """`n_max` snapshots for each slot, at least `min_step` tokens apart in the middle of a prompt.

    `take` may have a better way to keep a slot's state than in main memory, copied at once.
    """

    n_max: int
    min_step: int
    n_batch: int
    n_ubatch: int
    kv: KVCache
    take: Callable[[Slot], KeptState | None] = lambda slot: None
    is_settled: Callable[[int], bool] = lambda context: True  # whether no decode will copy cells about in it

    @property
    def active(self) -> bool:
        """Whether this model needs checkpoints at all."""
        return self.n_max > 0 and self.kv.needs_checkpoints

    def stop_at(self, sequence: Sequence, begin: int, end: int) -> int:
        """Where prompt tokens [begin, end) must end so that a snapshot can be made there; `end` when nowhere."""
        if not self.active:
            return end
        stops = list(self._stops(sequence.n_prompt))
        starts = sequence.request.user_starts
        checkpoints = sequence.slot.checkpoints
        for at in starts:
            if at == starts[-1] or not checkpoints or at > checkpoints[-1].n_tokens + self.min_step:
                stops.append(at)
        return min((at for at in stops if begin < at < end), default=end)

    def _stops(self, n_prompt: int) -> tuple[int, int]:
        return n_prompt - min(self.n_batch, TAIL + self.n_ubatch), n_prompt - min(self.n_batch, TAIL)

    def wanted(self, sequence: Sequence, begin: int, end: int, *, is_cut: bool = False) -> bool:
        """Whether to snapshot the state before tokens [begin, end) of the prompt are computed.

        `is_cut`: a plugin's budget made them so few. Then the end of a prompt is many steps, and not each needs a snapshot.
        """
        if not self.active:
            return False
        n_prompt, starts = sequence.n_prompt, sequence.request.user_starts
        near_end = begin in self._stops(n_prompt) if is_cut else n_prompt < end + self.n_ubatch
        if end < n_prompt and begin not in starts and not near_end:
            return False
        checkpoints = sequence.slot.checkpoints
        is_last_user = bool(starts) and begin == starts[-1]
        return not checkpoints or is_last_user or near_end or begin > checkpoints[-1].n_tokens + self.min_step

    def may_follow(self, sequence: Sequence, end: int, *, is_cut: bool) -> bool:
        """Whether a snapshot may be made when tokens up to `end` of the prompt are computed, and more of it is to come."""
        if not self.active or end >= sequence.n_prompt:
            return False
        farthest = self.stop_at(sequence, end, min(end + self.n_batch, sequence.n_prompt))  # less only makes it rarer
        return any(self.wanted(sequence, end, farthest, is_cut=cut) for cut in (is_cut, True))  # the next may be cut

    def make(self, slot: Slot, n_tokens: int, request_id: int) -> None:
        """Snapshot `slot`, which holds `n_tokens`; not where these are not there yet."""
        pos_min, pos_max = self.kv.pos_min(slot.seq_id), self.kv.pos_max(slot.seq_id)
        if pos_min < 0:
            return
        if self.kv.n_swa and not self.is_settled(slot.context):
            return  # a sequence that was moved has its window's rows only after the next decode
        data = self.take(slot) or self.kv.save(slot.seq_id)
        if data is None:
            return
        kept = self._thinned(slot.checkpoints, request_id)
        kept = [c for c in kept[max(0, len(kept) - self.n_max + 1) :] if c.n_tokens != n_tokens]
        kept.append(Checkpoint(n_tokens, pos_min, pos_max, request_id, data))
        slot.checkpoints = kept

    def _thinned(self, checkpoints: list[Checkpoint], request_id: int) -> list[Checkpoint]:
        """A full list loses those of older requests that lie close behind another, the earliest first, until there is room."""
        kept: list[Checkpoint] = []
        n_over = len(checkpoints) + 2 - self.n_max
        for c in checkpoints:
            if n_over > 0 and kept and c.request_id != request_id and c.n_tokens <= kept[-1].n_tokens + self.min_step:
                n_over -= 1
                continue
            kept.append(c)
        return kept

    def reusable(self, slot: Slot, n_past: int, n_prompt: int) -> int:
        """What `rewind` would keep, without doing anything. A state that libllama then refuses makes it less."""
        needed = self._needed(slot, n_past, n_prompt)
        if needed is None:
            return n_past
        found = self._usable(slot, n_past, needed)
        return min(n_past, max(found.pos_min + 1, found.pos_max), found.n_tokens) if found is not None else 0

    def _needed(self, slot: Slot, n_past: int, n_prompt: int) -> int | None:
        """The position from which on a snapshot is needed to continue at `n_past`; None when none is."""
        if n_past <= 0:
            return None
        pos_min = self.kv.pos_min(slot.seq_id)
        needed = max(0, n_past - self.kv.n_swa - (0 if n_past < n_prompt else 1))
        return needed if pos_min < 0 or pos_min >= needed else None

    def _usable(self, slot: Slot, n_past: int, needed: int) -> Checkpoint | None:
        if self.kv.pos_min(slot.seq_id) < 0:
            return None
        fitting = (c for c in reversed(slot.checkpoints) if c.pos_max <= n_past)
        return next((c for c in fitting if c.pos_min < needed or c.pos_min == 0), None)

    def rewind(self, slot: Slot, n_past: int, n_prompt: int) -> int:
        """Make the slot's memory continue at `n_past` or before; how many tokens it can keep. Drops later snapshots."""
        n_common = n_past
        if n_past > 0:
            pos_min = self.kv.pos_min(slot.seq_id)
            needed = max(0, n_past - self.kv.n_swa - (0 if n_past < n_prompt else 1))
            if pos_min < 0:
                n_past = 0
            elif pos_min >= needed:
                n_past = self._restore(slot, n_past, needed)
        # llama-server keeps one that ends a token behind the common prefix too, and may restore that wrong state later.
        slot.checkpoints = [c for c in slot.checkpoints if c.pos_max <= n_past and c.n_tokens <= n_common]
        return n_past

    def _restore(self, slot: Slot, n_past: int, needed: int) -> int:
        for c in reversed(slot.checkpoints):
            if c.pos_max <= n_past and (c.pos_min < needed or c.pos_min == 0) and self._put(slot.seq_id, c):
                return min(n_past, max(c.pos_min + 1, c.pos_max), c.n_tokens)
        return 0

    def _put(self, seq_id: int, checkpoint: Checkpoint) -> bool:
        data = checkpoint.data
        if isinstance(data, KeptState):
            if data.put(seq_id):
                return True
            copied = data.host_bytes()
            return copied is not None and self.kv.restore(seq_id, copied)
        return self.kv.restore(seq_id, data)
