"""Sequences that change their context: prompts on their way to where they are computed and back, and moves between groups.

A move takes both contexts to itself, so it waits until neither has a batch in flight, and runs on a context's thread while
the other contexts go on. The slot counts as busy meanwhile.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any

from llamamg.arrange import SWAP_BYTES_MAX, Runs
from llamamg.kvcache import KVCache
from llamamg.layout import Layout
from llamamg.request import Failed
from llamamg.sequence import Sequence, SequenceState
from llamamg.slot import Slot
from llamamg.stats import Stats

log = logging.getLogger(__name__)
SOON = 4  # a prompt with this part of another one's tokens left is done soon beside it


@dataclass(slots=True, eq=False)
class Move:
    """`slot` goes to the id `target`; `other`, idle, is there and goes the other way."""

    slot: Slot
    target: int
    other: Slot | None = None
    seconds: float = 0.0  # it took


class Moves:
    """Decides when prompts go where, and performs moves. All of it on the engine thread but the copying."""

    def __init__(
        self,
        slots: list[Slot],
        kv: KVCache,
        layout: Layout,
        runner: Runs,
        stats: Stats,
        *,
        n_prompt_local: int,
        fail: Callable[[Sequence, Failed], None],
        moved: Callable[[Slot], None],
        is_settled: Callable[[int], bool],
    ) -> None:
        self._slots, self._kv, self._layout, self._runner, self._stats = slots, kv, layout, runner, stats
        self._n_prompt_local, self._fail, self._moved, self._is_settled = n_prompt_local, fail, moved, is_settled
        self._waiting: deque[Move] = deque()  # for their contexts
        self._for_prefill: deque[Sequence] = deque()  # for an id of the prefill context
        self._free_prefill = list(reversed(layout.prefill))
        self._at_prefill: list[Slot] = []  # that have such an id, or are on their way there
        self._oldest_next = [False, False]  # for any id, and for the last of several
        self._prefill_context = len(layout.groups)
        self.changing: Callable[[Slot], None] = lambda slot: None  # told before what a slot holds goes elsewhere

    @property
    def wanted(self) -> bool:
        """Whether anything waits to be moved."""
        return bool(self._waiting or self._for_prefill)

    def involved(self, context: int) -> bool:
        """Whether anything in this context is being moved or waits for that."""
        return any(slot.moving and context in (slot.context, slot.group) for slot in self._slots)

    # -- prompts

    def begin(self, sequence: Sequence) -> None:
        """A sequence got its slot: if much of its prompt is left, it is computed in the prefill context."""
        if self._layout.prefill and sequence.n_prompt_left > self._n_prompt_local:
            sequence.slot.moving = True
            self._for_prefill.append(sequence)

    def leave(self, slot: Slot) -> None:
        """What `slot` holds needs the prefill context no longer: it goes home."""
        if slot.context == self._prefill_context and not slot.moving:
            slot.moving = True
            self._at_prefill.remove(slot)
            self._waiting.append(Move(slot, slot.home))

    def _admit(self) -> None:
        for sequence in [s for s in self._for_prefill if s.state is SequenceState.FINISHED]:
            self._for_prefill.remove(sequence)
            sequence.slot.moving = False
        while self._for_prefill and self._free_prefill:
            next_one = self._next_prompt()
            if next_one is None:
                return
            self._for_prefill.remove(next_one)
            slot = next_one.slot
            target = self._free_prefill.pop()
            self._at_prefill.append(slot)
            if len(slot.tokens):
                self._waiting.append(Move(slot, target))
            else:
                self._place(slot, target)
                slot.moving = False

    def _next_prompt(self) -> Sequence | None:
        """Of the first priority every second time whoever has the fewest tokens left, else the oldest: nobody waits more than
        twice as long.

        The last of several ids is for a prompt that is done soon beside one that is computed: that one would not be
        computed faster for another long one next to it, and who wants a short one need not wait for both.
        """
        waiting = list(self._for_prefill)
        computed = [slot.sequence for slot in self._at_prefill if slot.sequence is not None]
        is_last = len(self._layout.prefill) > 1 and len(self._free_prefill) == 1 and bool(computed)
        if is_last:
            waiting = [sequence for sequence in waiting if _is_beside(sequence, computed)]
        if not waiting:
            return None
        first = min(sequence.request.priority for sequence in waiting)
        waiting = [sequence for sequence in waiting if sequence.request.priority == first]
        shortest = min(waiting, key=lambda sequence: sequence.n_prompt_left)
        if shortest is waiting[0]:
            return shortest
        self._oldest_next[is_last] = not self._oldest_next[is_last]
        return shortest if self._oldest_next[is_last] else waiting[0]

    # -- between groups

    def request(self, source: int, target: int) -> None:
        """Move the busy sequence at one id to another one, which an idle slot has."""
        slot, other = (next(s for s in self._slots if s.seq_id == id_) for id_ in (source, target))
        slot.moving = other.moving = True
        self._waiting.append(Move(slot, target, other))

    def exchange(self, a: Slot, b: Slot) -> None:
        """Let two idle slots change places, contents too, at once: for whoever wants slots where they were."""
        for slot in (a, b):
            self.changing(slot)
        if self._layout.context(a.seq_id) == self._layout.context(b.seq_id):
            saved = [(s, self._kv.save(s.seq_id, flags=0) if len(s.tokens) else None) for s in (a, b)]
            for slot in (a, b):
                self._kv.remove(slot.seq_id, -1, -1)
            self._swap(a, b)
            for slot, data in saved:
                if data is None or not self._kv.restore(slot.seq_id, data, flags=0):
                    self._forget(slot)
            return
        transfer: Callable[[int, int, int], bool] = self._kv.transfer  # type: ignore[attr-defined]
        if not transfer(a.seq_id, b.seq_id, 1 << 62):
            self._forget(b)
        self._swap(a, b)

    def _swap(self, a: Slot, b: Slot) -> None:
        places = (a.seq_id, b.seq_id)
        for slot, seq_id in zip((b, a), places, strict=True):
            slot.home, slot.group = seq_id, self._layout.context(seq_id)
            self._place(slot, seq_id)

    def _forget(self, slot: Slot) -> None:
        slot.tokens.keep(0)
        slot.checkpoints = []

    # -- performing

    def start(self, free: Seq[int]) -> tuple[int, ...]:
        """Begin moves whose contexts are among the `free` ones; the contexts that are left for batches."""
        if self._for_prefill:
            self._admit()
        if not self._waiting:
            return tuple(free)
        left, again = set(free), deque[Move]()
        held: set[int] = set()
        for move in self._waiting:
            contexts = (move.slot.context, self._layout.context(move.target))
            settled = [context for context in contexts if self._is_settled(context)]
            if left.issuperset(contexts) and len(settled) == 2:
                left.difference_update(contexts)
                self._begin(move, contexts)
            else:
                again.append(move)
                held.update(settled)  # the next decode of the others copies cells that the move wants
        self._waiting = again
        # A context that a move waits for gets no new batch, or the move might wait for ever.
        return tuple(context for context in free if context in left - held)

    def _begin(self, move: Move, contexts: tuple[int, int]) -> None:
        for slot in (move.slot, move.other):
            if slot is not None:
                self.changing(slot)
        source, target = move.slot.seq_id, move.target
        swap = SWAP_BYTES_MAX if move.other is not None and len(move.other.tokens) else 0
        transfer: Callable[[int, int, int], bool] = self._kv.transfer  # type: ignore[attr-defined]

        def job() -> bool:
            began = time.perf_counter()
            was_swapped = transfer(source, target, swap)
            move.seconds = time.perf_counter() - began
            return was_swapped

        self._runner.run(contexts, job, lambda *ended: self._ended(move, *ended))

    def _ended(self, move: Move, was_swapped: Any, error: BaseException | None) -> None:
        slot, other = move.slot, move.other
        if error is not None:
            log.error("slot %d could not be moved to sequence %d: %s", slot.id, move.target, error)
        else:
            self._stats.n_hand_overs += 1
            self._stats.hand_over_s += move.seconds
        if other is None:
            self._prompt_moved(slot, move.target, error)
            return
        slot.moving = other.moving = False
        if not was_swapped:
            self._stats.n_moves_dropped += len(other.tokens) > 0
            self._forget(other)
        if error is None:
            self._swap(slot, other)
            self._moved(slot)
            self._moved(other)

    def _prompt_moved(self, slot: Slot, target: int, error: BaseException | None) -> None:
        was_prefill = slot.context == self._prefill_context
        if error is not None:
            self._give_up(slot, target, was_prefill)
        else:
            if was_prefill:
                self._free_prefill.append(slot.seq_id)
            self._place(slot, target)
        slot.moving = False
        if slot.sequence is None:
            self.leave(slot)  # its request was cancelled on the way
        self._moved(slot)

    def _give_up(self, slot: Slot, target: int, was_prefill: bool) -> None:
        """The slot cannot be had where it is needed: its request fails, and what it held is forgotten."""
        if slot.sequence is not None:
            self._fail(slot.sequence, Failed(500, "server_error", "a sequence could not be moved between contexts"))
        self._kv.remove(slot.seq_id, -1, -1)
        self._forget(slot)
        self._free_prefill.append(slot.seq_id if was_prefill else target)
        if not was_prefill:
            self._at_prefill.remove(slot)
        self._place(slot, slot.home)

    def _place(self, slot: Slot, seq_id: int) -> None:
        slot.seq_id, slot.context = seq_id, self._layout.context(seq_id)


def _is_beside(sequence: Sequence, computed: Seq[Sequence]) -> bool:
    """Whether its prompt is done soon beside those that are computed, or more urgent than all of them."""
    priority = sequence.request.priority
    n_left = [other.n_prompt_left for other in computed if other.request.priority <= priority]
    return not n_left or SOON * sequence.n_prompt_left <= max(n_left)
