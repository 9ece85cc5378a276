"""Requests whose slot is being filled with stored state: a plugin copies, everybody else goes on."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from llamamg.decisions import PrefixHit
from llamamg.hookcalls import HookCalls
from llamamg.hooks import Hook
from llamamg.kvcache import KVCache
from llamamg.slot import Slot
from llamamg.transfer.job import ALL

if TYPE_CHECKING:
    from llamamg.admission import Waiting

log = logging.getLogger(__name__)
RESTORE_S_MAX = 30.0  # after that the prompt is computed instead


@dataclass(slots=True, eq=False)
class Restoring:
    """A request and the slot that `hit` fills for it; `owner` is the hook function of the plugin that does."""

    waiting: Waiting
    slot: Slot
    hit: PrefixHit
    owner: Hook
    n_kept: int  # tokens the slot held by itself
    t_latest: float
    has_room: bool = True  # the slot's memory is cut


class Restorer:
    """Takes offers of `find_prefix` and sees them through. On the engine thread."""

    def __init__(self, kv: KVCache, calls: HookCalls, changing: Callable[[Slot, int], None]) -> None:
        self._kv, self._calls, self._changing = kv, calls, changing
        self.under_way: list[Restoring] = []
        self.timeout_s = RESTORE_S_MAX
        self.may_defer = False  # the only context is about to compute others: slots may be emptied meanwhile

    def offer(self, waiting: Waiting, slot: Slot, n_common: int, n_own: int, may_wait: bool) -> bool:
        """Ask the plugins for more than the `n_own` tokens that the slot can reuse of the `n_common` it shares.

        A slot that is being filled is `restoring`, and `finished` gives the request back. Filling cuts what is still being copied
        out of the slot: True when a request that `may_wait` is to be offered again later instead.
        """
        prompt, kept, has_room, is_later = waiting.request.prompt, 0, True, False

        def begin(hit: PrefixHit) -> str | None:
            nonlocal kept, has_room, is_later
            if hit.n_tokens > len(prompt):
                return f"it claims {hit.n_tokens} tokens of a prompt of {len(prompt)}"
            is_later = may_wait and hit.n_tokens > n_own and slot.loses(self._kept(n_common), ALL)
            if hit.n_tokens > n_own and not is_later:
                has_room = not (self.may_defer and getattr(hit, "starts_early", False))
                kept, has_room = self._prepare(slot, self._kept(n_common), has_room)
                slot.restoring = True
                hit.start(slot, kept)
            return None

        hit, owner = self._calls.first_with_owner("find_prefix", waiting.request, slot, check=begin)
        if is_later:
            return True
        if slot.restoring and hit is None:
            self._give_up(slot)  # its plugin raised on the way
        if not slot.restoring or owner is None:
            return False
        restoring = Restoring(waiting, slot, hit, owner, kept, time.perf_counter() + self.timeout_s, has_room)
        if has_room and self._is_through(restoring):
            return False
        self.under_way.append(restoring)
        return False

    def make_room(self) -> bool:
        """Empty the slots that were not emptied yet; whether there were any. A batch of other sequences may be on its way."""
        late = [restoring for restoring in self.under_way if not restoring.has_room]
        for restoring in late:
            restoring.has_room = True
            self._kv.remove(restoring.slot.seq_id, -1, -1)
        return bool(late)

    def finished(self, free: Any) -> list[Restoring]:
        """Those that need not wait any longer, whatever came of it; only slots of the `free` contexts are looked at."""
        through = [r for r in self.under_way if r.slot.context in free and self._is_through(r)]
        self.under_way = [r for r in self.under_way if r not in through]
        return through

    def remove(self, request_id: int) -> Waiting | None:
        """The request is gone; its slot is empty then."""
        for restoring in self.under_way:
            if restoring.waiting.request.id == request_id:
                self.under_way.remove(restoring)
                self._abandon(restoring)
                return restoring.waiting
        return None

    def _is_through(self, restoring: Restoring) -> bool:
        hit, slot = restoring.hit, restoring.slot
        if not restoring.has_room:
            self.make_room()
        is_ready, alive = self._calls.on_behalf(restoring.owner, hit.ready)
        if alive and not is_ready:
            if time.perf_counter() < restoring.t_latest:
                return False
            log.warning("slot %d: stored state did not come in time, the prompt is computed", slot.id)
            self._abandon(restoring)
            return True
        if alive:
            _, alive = self._calls.on_behalf(restoring.owner, lambda: hit.restore(slot))
        if not alive:
            self._abandon(restoring)
            return True
        prompt = restoring.waiting.request.prompt
        slot.tokens.keep(0)
        slot.tokens.extend(prompt[: hit.n_tokens])
        slot.restoring = False
        return True

    def _kept(self, n_common: int) -> int:
        """Tokens that stay in a slot that is filled."""
        return 0 if self._kv.needs_checkpoints else n_common

    def _prepare(self, slot: Slot, kept: int, at_once: bool) -> tuple[int, bool]:
        """Cut the slot back to what can stay; how many tokens that is. Its memory too `at_once`, or where something stays;
        whether that was done."""
        self._changing(slot, kept)
        at_once = at_once or kept > 0
        if at_once and not self._kv.remove(slot.seq_id, kept, -1):
            kept = 0
            self._kv.remove(slot.seq_id, -1, -1)
        slot.tokens.keep(kept)
        slot.checkpoints = []
        return kept, at_once

    def _abandon(self, restoring: Restoring) -> None:
        self._calls.on_behalf(restoring.owner, restoring.hit.abandon)
        self._give_up(restoring.slot)

    def _give_up(self, slot: Slot) -> None:
        """Nobody knows what the slot's memory holds now."""
        self._kv.remove(slot.seq_id, -1, -1)
        slot.tokens.keep(0)
        slot.checkpoints = []
        slot.restoring = False
