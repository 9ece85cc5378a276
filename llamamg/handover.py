"""Getting a sequence from one context of a model into another: cells, recurrent state, everything."""

from __future__ import annotations

from typing import Any, Protocol

from llamamg.abi import ffi
from llamamg.kvcache import KVCache
from llamamg.statebytes import OddState

WHOLE = 0  # state flags: everything of a sequence


class HandoverError(RuntimeError):
    """A sequence could not be moved; it still is where it was."""


class Handover(Protocol):
    """A way to copy a sequence into an empty one of another context. Neither context may compute meanwhile."""

    def move(self, giver: KVCache, source: int, taker: KVCache, target: int) -> None:
        """Copy. Raises HandoverError."""


class ThroughHost:
    """With any library: the state is read into main memory and written back."""

    def move(self, giver: KVCache, source: int, taker: KVCache, target: int) -> None:
        if giver.pos_max(source) < 0:
            return
        try:
            data = giver.save_for(source, taker.n_streams)
        except OddState as error:
            raise HandoverError(f"the state of this model cannot be moved: {error}") from error
        if data is None or not taker.restore(target, data, WHOLE):
            taker.remove(target, -1, -1)
            raise HandoverError("the library could not take a sequence over into another context")


class OnDevice:
    """With mg_seq_move, from device to device; through the host where the library declines."""

    def __init__(self, mg: Any) -> None:
        self._move = mg.lib.mg_seq_move
        self._through_host = ThroughHost()

    def move(self, giver: KVCache, source: int, taker: KVCache, target: int) -> None:
        if giver.pos_max(source) < 0:
            return
        pointers = [ffi.cast("void *", part.context) for part in (giver, taker)]
        if self._move(pointers[0], source, pointers[1], target) != 0:
            taker.remove(target, -1, -1)
            self._through_host.move(giver, source, taker, target)


def best(mg: Any) -> Handover:
    """The fastest way that this library has."""
    return OnDevice(mg) if getattr(mg.lib, "mg_seq_move", None) is not None else ThroughHost()
