"""Moving sequences between sequence ids of the KV cache. Plugins say which; this does it without losing what idle slots hold."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from llamamg.batch import StepState
from llamamg.hookcalls import HookCalls
from llamamg.kvcache import KVCache
from llamamg.request import Tokens
from llamamg.slot import Slot
from llamamg.stats import Stats

SWAP_BYTES_MAX = 256 << 20  # a larger idle state would stall the step longer than computing it anew is worth


@dataclass(slots=True)
class _Parked:
    slot: Slot
    tokens: Tokens
    data: NDArray[np.uint8]


class Arranger:
    """Performs `arrange_slots`. libllama copies a moved sequence's cells at the next decode, so what the idle slot held
    is read out first and put back only after that decode."""

    def __init__(self, slots: list[Slot], kv: KVCache, calls: HookCalls, stats: Stats) -> None:
        self._slots, self._kv, self._calls, self._stats = slots, kv, calls, stats
        self._parked: list[_Parked] = []

    def arrange(self, state: StepState) -> None:
        """Ask the plugins and move."""
        for source, target in self._calls.first("arrange_slots", state, check=self._complaint) or ():
            self._move(self._at(source), self._at(target))

    def give_back(self) -> None:
        """After a decode: restore what idle slots held, unless they were taken meanwhile."""
        for parked in self._parked:
            slot = parked.slot
            if not slot.busy and len(slot.tokens) == 0 and self._kv.restore(slot.seq_id, parked.data, flags=0):
                slot.tokens.extend(parked.tokens)
            else:
                self._stats.n_moves_dropped += 1
        self._parked.clear()

    def _at(self, seq_id: int) -> Slot:
        return next(slot for slot in self._slots if slot.seq_id == seq_id)

    def _complaint(self, moves: list[tuple[int, int]]) -> str | None:
        busy = {slot.seq_id for slot in self._slots if slot.busy}
        known = {slot.seq_id for slot in self._slots}
        for source, target in moves:
            if source not in busy or target not in known or target in busy:
                return f"cannot move sequence {source} to {target}: the first must be busy and the second idle"
            busy = busy - {source} | {target}
        return None

    def _move(self, busy: Slot, idle: Slot) -> None:
        a, b = busy.seq_id, idle.seq_id
        if len(idle.tokens):
            data = self._kv.save(b, flags=0) if self._kv.size(b) <= SWAP_BYTES_MAX else None
            if data is not None:
                self._parked.append(_Parked(idle, idle.tokens.view().copy(), data))
            else:
                self._stats.n_moves_dropped += 1
                idle.checkpoints = []
            idle.tokens.keep(0)
        self._kv.remove(b, -1, -1)
        self._kv.copy(a, b)
        self._kv.remove(a, -1, -1)
        busy.seq_id, idle.seq_id = b, a
        self._stats.n_moves += 1
