"""Keep computed prompts in main memory and on disk, copied beside decodes, and put them back where a prompt begins like them."""

from __future__ import annotations

import time
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from pathlib import Path
from typing import Any, NoReturn

from llamamg import (
    Batch,
    Cells,
    Config,
    FinishReason,
    Guard,
    KeptState,
    Options,
    PluginError,
    PrefixHit,
    Removal,
    Request,
    Sequence,
    Slot,
    StepState,
    Unavailable,
    hookimpl,
    plugin,
)
from llamamg.statefile import FolderLock
from llamamg_plugins.async_cache_folder import lock_folder
from llamamg_plugins.async_cache_metrics import Count, Counters
from llamamg_plugins.async_cache_options import declare
from llamamg_plugins.async_cache_parts import MIB, Parts, Sizes, make_parts
from llamamg_plugins.async_cache_restore import N_MIN
from llamamg_plugins.async_cache_save import N_PUBLISH

POLL_S = 0.001  # how often is looked whether a copy is through while nothing runs
PREPARE_S = 0.002  # of a step, for making copies; hidden where a device computes meanwhile


@plugin(
    name="async-cache",
    summary="keeps prompts that left their slot in main memory and on disk, copied while others decode",
    helps="more conversations than slots; sessions that come back, also after a restart",
    hurts="memory bandwidth while a slot is saved; main memory (--cache-ram)",
    guard=Guard.same_tokens(),
    toggle="step",
    effect="tokens restored",
)
class AsyncCache:
    """Saves a slot when its sequence ends, restores when a prompt begins like something saved."""

    def __init__(
        self,
        ram: int = 8192,
        idle_slots: bool = True,
        stage_mb: int = 2048,
        threads: int = 0,
        disk: str = "",
        disk_gb: float = 16.0,
        device_mb: int = -1,
    ) -> None:
        self.disk, self.ram, self.idle_slots = disk, ram, idle_slots
        self._sizes = Sizes(ram, stage_mb, device_mb, threads, disk_gb)
        self._parts: Parts | None = None  # None: it was not started
        self._waits = False
        self._asked: list[str] = []  # options that were given and say that something is to be kept
        self._lock: FolderLock | None = None  # of the folder, until its thread has that

    @hookimpl
    def register_options(self, options: Options) -> None:
        """What it may take, and where."""
        declare(options)

    @hookimpl
    def configure(self, config: Config) -> None:
        """Nothing to do without memory to keep things in, or without prompts to reuse."""
        self._unlock_folder()
        given = config.plugins.options.get("async-cache", {})
        self._asked = [f"--cache-{name}" for name in ("ram", "disk") if given.get(name)]
        if self.ram == 0 and self.disk:
            raise PluginError("--cache-disk needs main memory too, through which all passes: --cache-ram is 0")
        if self.ram == 0:
            raise Unavailable("there is nowhere to keep prompts: --cache-ram is 0")
        if not config.generation.cache_prompt:
            raise Unavailable("prompts are not reused (--no-cache-prompt)")
        if self.disk:
            self._lock = lock_folder(Path(self.disk))
        # Shifting a sequence rewrites the rows of all others in its stream, in the next decode.
        self._waits = config.generation.context_shift

    def _refuse(self, why: str) -> NoReturn:
        """What was asked for is an error; what is on by itself does without."""
        why = f"the memory of this model cannot be copied ({why})"
        if self._asked:
            raise PluginError(f"nothing can be kept as {' and '.join(self._asked)} asks for: {why}; leave that out")
        raise Unavailable(why)

    def _unlock_folder(self) -> None:
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    @hookimpl
    def engine_start(self, engine: Any) -> None:
        """Take the memory and start the threads."""
        cells: Cells | None = engine.cells
        if cells is None or cells.reason:
            self._unlock_folder()
            self._refuse(cells.reason if cells is not None else "this native build is too old, run `llamamg build`")
        self._engine, self._kv = engine, engine.kv
        try:
            self._parts = make_parts(engine, cells, self._sizes, Path(self.disk) if self.disk else None, self._lock)
        except BaseException:
            self._unlock_folder()
            raise
        self._lock = None  # the disk's thread gives it up: it may write a little longer than the engine runs

    @hookimpl
    def engine_stop(self) -> None:
        """Copy nothing more."""
        if self._parts is not None:
            self._parts.stop()

    @hookimpl
    def register_metrics(self, metrics: Any) -> None:
        """Hits, misses, bytes and evictions."""
        metrics.register(Counters(self.counters))

    def counters(self) -> Iterator[Count]:
        """All of them, once there is anything to count."""
        return iter(()) if self._parts is None else self._parts.counts()

    @property
    def effect(self) -> int:
        """Tokens restored."""
        return 0 if self._parts is None else self._parts.restorer.n_tokens

    @property
    def note(self) -> str:
        """How copies are made, and what is kept."""
        if self._parts is None:
            return ""
        tree, restorer = self._parts.tree, self._parts.restorer
        kept = f"{tree.n_bytes / MIB:.0f} MiB kept; {restorer.n_hits} hits, {restorer.n_misses} misses"
        return f"{self._parts.way}; {kept}"

    # -- for benchmarks, on the engine thread

    @property
    def is_copying(self) -> bool:
        """Whether anything is kept here."""
        return self._parts is not None

    @property
    def n_bytes(self) -> int:
        """Bytes of main memory in use."""
        return 0 if self._parts is None else self._parts.tree.n_bytes

    @property
    def way(self) -> str:
        """How copies are made."""
        return "" if self._parts is None else self._parts.way

    @property
    def is_settled(self) -> bool:
        """Whether nothing is under way, as far as was taken note of: steps do that by themselves."""
        return self._parts is None or self._parts.is_settled  # pluggy before 1.7 reads properties at once

    def save(self, slot: Slot) -> None:
        """Begin to save an idle slot."""
        self._save(slot, waits=False)

    def settled(self) -> bool:
        """Take note of what is copied and written; True when nothing is under way."""
        return self._parts is None or self._parts.settled()

    def forget(self) -> None:
        """Forget all that nobody uses. Files stay, for the next start; nothing more is written."""
        if self._parts is not None:
            self._parts.forget()

    # -- saving

    @hookimpl
    def slot_released(self, slot: Slot, sequence: Sequence, reason: FinishReason) -> None:
        """Begin to save what is new."""
        if self._parts is None or reason is FinishReason.FAILED or sequence.truncated:
            return
        if self.idle_slots:
            self._save(slot, waits=self._waits)

    def _save(self, slot: Slot, *, waits: bool) -> None:
        n = len(slot.tokens)
        if self._parts is None or n < N_MIN or not self._engine.runner.is_free(slot.context):
            return
        if self._kv.pos_max(slot.seq_id) != n - 1 or not self._engine.scheduler.is_settled(slot.context):
            return  # cut short by an error, or moved and not copied there yet
        saver = self._parts.saver
        save = saver.save(slot, slot.tokens.view().copy())
        if not self._engine.scheduler.running:
            saver.prepare()
        elif waits or self._engine.runner.n_contexts > 1:  # another context's thread may change what is looked at
            saver.prepare(slot)
        if waits:
            save.transfer.wait()

    @hookimpl
    def take_state(self, slot: Slot) -> KeptState | None:
        """A checkpoint on its devices, where there is room."""
        # What a window holds depends on the context that it is in; a recurrent state does not.
        if self._parts is None or not self._parts.kept.n_bytes_max or self._kv.removal is Removal.PART:
            return None
        return self._parts.kept.take(slot.seq_id)

    @hookimpl
    def batch_submitted(self, batch: Batch) -> None:
        """While a device computes: make copies, and what was copied becomes a part of the tree."""
        if self._parts is None:
            return
        self._parts.restorer.go_on_beside(PREPARE_S)
        saver = self._parts.saver
        if saver.n_running:
            saver.prepare(within_s=PREPARE_S)
            saver.drain(N_PUBLISH)

    @hookimpl
    def slot_changing(self, slot: Slot, n_kept: int) -> None:
        """Know what is still to be copied of it. If it was to be saved only now, do so at once."""
        if self._parts is None:
            return
        self._parts.saver.prepare(slot)
        if self.idle_slots or slot.busy or n_kept >= len(slot.tokens):
            return
        self._save(slot, waits=True)

    @hookimpl
    def is_stored(self, slot: Slot) -> bool | None:
        """What is saved to its end comes back in a fraction of the time that computing it takes."""
        return True if self._parts is not None and self._parts.restorer.has(slot.tokens.view()) else None

    @hookimpl
    def select_slot(self, request: Request, slots: Seq[Slot]) -> Slot | None:
        """Where the least recently used slot would be taken: one that is not being saved."""
        idle = [slot for slot in slots if not slot.busy]
        saving = [slot for slot in idle if slot.copying is not None and not slot.copying.is_over]
        if not saving or len(saving) == len(idle):
            return None
        useful = self._engine.config.generation.slot_prompt_similarity * len(request.prompt)
        if any(slot.tokens.common_prefix(request.prompt) > useful for slot in idle):
            return None
        return min((slot for slot in idle if slot not in saving), key=lambda slot: (slot.t_last_used, -slot.id))

    # -- restoring

    @hookimpl
    def find_prefix(self, request: Request, slot: Slot) -> PrefixHit | None:
        """The longest prefix that can be continued."""
        if self._parts is None or len(request.prompt) < N_MIN:
            return None
        self._parts.saver.drain()
        return self._parts.restorer.find(request.prompt)

    @hookimpl
    def idle(self, state: StepState) -> bool:
        """What was copied becomes a part of the tree, and goes to disk, as soon as it is there: the server may end soon."""
        if self._parts is None:
            return False
        saver = self._parts.saver
        saver.prepare()
        if saver.n_running:
            time.sleep(POLL_S)
        self._parts.drain()
        return saver.n_running > 0
