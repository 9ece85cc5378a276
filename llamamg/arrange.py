"""Moving sequences between sequence ids of the KV cache. Plugins say which; this does it without losing what idle slots hold."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from llamamg.batch import StepState
from llamamg.hookcalls import HookCalls
from llamamg.kvcache import KVCache
from llamamg.request import Tokens
from llamamg.slot import Slot
from llamamg.stats import Stats

log = logging.getLogger(__name__)
SWAP_BYTES_MAX = 256 << 20  # a larger idle state would stall the step for too long


@dataclass(slots=True)
class _Parked:
    slot: Slot
    context: int
    tokens: Tokens
    data: NDArray[np.uint8]


class Runs(Protocol):
    """What is needed of the runner."""

    def run(self, contexts: tuple[int, ...], job: Callable[[], Any], finished: Callable[[Any, Any], None]) -> None: ...


class Arranger:
    """Performs `arrange_slots`. libllama copies a moved sequence's cells at the next decode, so what the idle slot held
    is read out first and put back only after that decode."""

    def __init__(self, slots: list[Slot], kv: KVCache, calls: HookCalls, stats: Stats) -> None:
        self._slots, self._kv, self._calls, self._stats = slots, kv, calls, stats
        self._parked: list[_Parked] = []
        self._lazy: set[int] = set()  # contexts whose next decode copies cells
        self.changing: Callable[[Slot], None] = lambda slot: None  # told before what a slot holds goes elsewhere

    def arrange(self, state: StepState) -> bool:
        """Ask the plugins and move. `state.slots` are those of one context. Whether a plugin wants to be asked again."""

        def complaint(moves: list[tuple[int, int]]) -> str | None:
            return _complaint(moves, state.slots)

        moves = self._calls.first("arrange_slots", state, check=complaint)
        if any(self._at(target).stays for _, target in moves or ()):
            return False  # all or nothing: one move may make room for the next
        for source, target in moves or ():
            self._move(self._at(source), self._at(target))
        return moves is not None and not moves

    def is_settled(self, context: int) -> bool:
        """Whether no move within a context waits for its next decode."""
        return context not in self._lazy

    def settle(self, context: int, runner: Runs) -> None:
        """Nothing is to be decoded there: have the cells of moved sequences copied nevertheless, so that nobody waits for it."""
        # Ids that hold nothing there: whoever was moved left one, and a slot whose prompt is computed elsewhere has left its own.
        here = (slot for slot in self._slots if slot.group == context and not slot.restoring)
        empty = [slot.home for slot in here if slot.seq_id != slot.home or not len(slot.tokens)]

        def finished(was_copied: Any, error: BaseException | None) -> None:
            if was_copied:
                self.give_back(context)
            elif error is not None:
                log.error("cells of moved sequences could not be copied: %s", error)

        if empty:
            runner.run((context,), lambda: any(self._kv.copy_now(seq_id) for seq_id in empty), finished)

    def give_back(self, context: int) -> None:
        """After a decode: restore what idle slots of the context held, unless they were taken meanwhile."""
        if context not in self._lazy:
            return
        self._lazy.discard(context)
        parked_here = [parked for parked in self._parked if parked.context == context]
        self._parked = [parked for parked in self._parked if parked.context != context]
        for parked in parked_here:
            slot = parked.slot
            if not slot.busy and len(slot.tokens) == 0 and self._kv.restore(slot.seq_id, parked.data, flags=0):
                slot.tokens.extend(parked.tokens)
            else:
                self._stats.n_moves_dropped += 1

    def _at(self, seq_id: int) -> Slot:
        return next(slot for slot in self._slots if slot.seq_id == seq_id)

    def _move(self, busy: Slot, idle: Slot) -> None:
        a, b = busy.seq_id, idle.seq_id
        self.changing(busy)
        self.changing(idle)
        if len(idle.tokens):
            data = self._kv.save(b, flags=0) if self._kv.size(b) <= SWAP_BYTES_MAX else None
            if data is not None:
                self._parked.append(_Parked(idle, idle.context, idle.tokens.view().copy(), data))
            else:
                self._stats.n_moves_dropped += 1
                idle.checkpoints = []
            idle.tokens.keep(0)
        self._kv.remove(b, -1, -1)
        self._kv.copy(a, b)
        self._kv.remove(a, -1, -1)
        busy.seq_id, idle.seq_id = b, a
        busy.home, idle.home = b, a
        self._lazy.add(busy.context)
        self._stats.n_moves += 1


def _complaint(moves: list[tuple[int, int]], slots: list[Slot]) -> str | None:
    busy = {slot.seq_id for slot in slots if slot.busy}
    known = {slot.seq_id for slot in slots}
    for source, target in moves:
        if source not in busy or target not in known or target in busy:
            return f"cannot move sequence {source} to {target}: the first must be busy and the second idle"
        busy = busy - {source} | {target}
    return None
