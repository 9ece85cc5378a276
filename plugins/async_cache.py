"""Keep computed prompts in main memory and on disk, copied beside decodes, and put them back where a prompt begins like them."""

from __future__ import annotations

import logging
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from pathlib import Path
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

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
    Workers,
    hookimpl,
    pick_copier,
    plugin,
)
from llamamg.statefile import FolderInUse, FolderLock, model_identity
from llamamg_plugins.async_cache_blocks import BlockPool
from llamamg_plugins.async_cache_disk import BadFile, Disk
from llamamg_plugins.async_cache_hit import Hit
from llamamg_plugins.async_cache_kept import KeptStates, device_bytes
from llamamg_plugins.async_cache_save import N_PUBLISH, Saver
from llamamg_plugins.async_cache_tree import Tree

log = logging.getLogger(__name__)
MIB = 1 << 20
POLL_S = 0.001  # how often is looked whether a copy is through while nothing runs
N_MIN = 16  # tokens; less is computed sooner than looked for
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
        self.device_mb = device_mb
        self.disk, self.disk_gb = disk, disk_gb
        self.ram, self.idle_slots, self.stage_mb, self.threads = ram, idle_slots, stage_mb, threads
        self.effect = 0
        self.n_hits = self.n_misses = self.n_failed = 0
        self._way = ""  # how copies are made, for `note`
        self._tree: Tree | None = None  # None: nothing can be copied here
        self._waits = False
        self._disk: Disk | None = None
        self._lock: FolderLock | None = None  # of the folder
        self._hits: list[Hit] = []  # under way

    @hookimpl
    def register_options(self, options: Options) -> None:
        """Names and variables are llama-server's and llama.cpp-multigpu's."""
        options.add(
            "ram",
            type=int,
            default=8192,
            minimum=-1,
            help="MiB of main memory for prompts that left their slot; 0: none, -1: no limit",
            aliases=("-cram", "--cache-ram"),
            env=("LLAMA_ARG_CACHE_RAM",),
        )
        options.add(
            "idle-slots",
            type=bool,
            default=True,
            help="save a slot as soon as its sequence ends; off: only when its next user overwrites it, who waits for it",
            aliases=("--cache-idle-slots",),
            env=("LLAMA_ARG_CACHE_IDLE_SLOTS",),
        )
        options.add(
            "stage-mb",
            type=int,
            default=2048,
            minimum=0,
            help="MiB of the cache in page-locked memory, which a GPU reads and writes at full speed; taken at the start",
            env=("LLAMA_SERVER_XFER_STAGE_MB",),
        )
        options.add(
            "device-mb",
            type=int,
            default=-1,
            minimum=-1,
            help="MiB on the devices for recurrent states and those on their way to and from the host; 0: none, -1: a "
            "quarter of what is free, at most 2048",
            aliases=("--cache-device-mb",),
        )
        options.add(
            "threads",
            type=int,
            default=0,
            minimum=0,
            help="threads that copy; 0: one, two where the cache is on a GPU, four if there is a --cache-disk besides",
            env=("LLAMA_STATE_XFER_THREADS",),
        )
        options.add(
            "disk",
            default="",
            help="folder to keep prompts in across restarts; made if it is not there",
            aliases=("--cache-disk",),
        )
        options.add(
            "disk-gb",
            type=float,
            default=16.0,
            minimum=0,
            help="GB that folder may take; the prompts unused for longest go",
            aliases=("--cache-disk-gb",),
        )

    @hookimpl
    def configure(self, config: Config) -> None:
        """Nothing to do without memory to keep things in, or without prompts to reuse."""
        if self.ram == 0 and self.disk:
            raise PluginError("--cache-disk needs main memory too, through which all passes: --cache-ram is 0")
        if self.ram == 0:
            raise Unavailable("there is nowhere to keep prompts: --cache-ram is 0")
        if not config.generation.cache_prompt:
            raise Unavailable("prompts are not reused (--no-cache-prompt)")
        if self.disk:
            self._lock_folder(Path(self.disk))
        # Shifting a sequence rewrites the rows of all others in its stream, in the next decode.
        self._waits = config.generation.context_shift

    def _lock_folder(self, folder: Path) -> None:
        self._unlock_folder()
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=folder):
                pass
            self._lock = FolderLock(folder)
        except OSError as error:
            raise PluginError(f"--cache-disk {folder} cannot be used: {error.strerror or error}") from error
        except FolderInUse as error:
            raise PluginError(
                f"--cache-disk {error}: give each server a folder of its own, or end that process first"
            ) from error

    def _unlock_folder(self) -> None:
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    @hookimpl
    def engine_start(self, engine: Any) -> None:
        """Take the memory and start the threads."""
        cells: Cells | None = engine.cells
        if cells is None or cells.reason:
            why = cells.reason if cells is not None else "this native build is too old, run `llamamg build`"
            self._way = f"keeps nothing: the memory of this model cannot be copied ({why})"
            return
        self._engine, self._cells, self._kv = engine, cells, engine.kv
        copier, why = pick_copier(cells)
        self._copier, self._way = copier, f"{copier.name}: {why}"
        n_max = self.ram * MIB if self.ram >= 0 else 1 << 60
        on_host = all(plane.device == "" for plane in cells.planes(0))
        # Two keep a GPU's copies going; checking what comes from disk takes more.
        n_threads = self.threads or (1 if on_host else min(4 if self.disk else 2, os.cpu_count() or 1))
        pinned = getattr(copier, "pinned", None) if self.stage_mb else None
        if pinned is not None:
            pinned.reserve(n_threads)
        pool = BlockPool(
            cells.layout.n_block_bytes,
            n_max,
            pinned=None if pinned is None else pinned.allocate,
            n_pinned_bytes=self.stage_mb * MIB,
        )
        self._tree = Tree(pool, n_max)
        # On a host the decoders need the memory's bandwidth; a device copies beside its kernels.
        pause = {} if on_host else {"pause_save": 0.0, "pause_load": 0.0}
        self._workers = Workers(n_threads, **pause)
        self._kept = KeptStates(cells, copier, self._workers, device_bytes(cells, self.device_mb))
        self._saver = Saver(cells, self._kv, self._tree, copier, self._workers, self._kept)
        if self.disk:
            self._open_disk()

    def _open_disk(self) -> None:
        assert self._tree is not None
        disk = Disk(
            Path(self.disk),
            int(min(self.disk_gb * 1e9, 1 << 62)),
            self._tree,
            identity=model_identity(self._engine.config),
            planes=self._cells.layout.planes,
            model=self._engine.model.name,
        )
        disk.start()
        self._disk, self._saver.saved = disk, disk.write

    @hookimpl
    def engine_stop(self) -> None:
        """Copy nothing more."""
        if self._tree is not None:
            self._saver.drain()
            self._saver.saved = lambda path: None
            self._saver.stop()
            self._workers.stop()
            self._kept.stop()
        if self._disk is not None:
            self._disk.stop()
        self._unlock_folder()

    @hookimpl
    def register_metrics(self, metrics: Any) -> None:
        """Hits, misses, bytes and evictions."""
        metrics.register(_Counters(self))

    @property
    def note(self) -> str:
        """How copies are made, and what is kept."""
        tree = self._tree
        if tree is None:
            return self._way
        return f"{self._way}; {tree.n_bytes / MIB:.0f} MiB kept; {self.n_hits} hits, {self.n_misses} misses"

    # -- for benchmarks, on the engine thread

    @property
    def is_copying(self) -> bool:
        """Whether anything is kept here."""
        return self._tree is not None

    @property
    def n_bytes(self) -> int:
        """Bytes of main memory in use."""
        return 0 if self._tree is None else self._tree.n_bytes

    @property
    def way(self) -> str:
        """How copies are made, or why none are."""
        return self._way

    def save(self, slot: Slot) -> None:
        """Begin to save an idle slot."""
        self._save(slot, waits=False)

    def settled(self) -> bool:
        """Take note of what is copied and written; True when nothing is under way."""
        self._saver.prepare()
        self._saver.drain()
        if self._disk is not None:
            self._disk.drain()
        return self.is_settled

    @property
    def is_settled(self) -> bool:
        """Whether nothing is under way, as far as was taken note of: steps do that by themselves."""
        if self._tree is None:  # pluggy before 1.7 reads properties when a plugin is registered
            return True
        return self._saver.n_running == 0 and (self._disk is None or self._disk.n_pending == 0)

    def forget(self) -> None:
        """Forget all that nobody uses. Files stay, for the next start; nothing more is written."""
        self.settled()
        self._saver.saved = lambda path: None
        assert self._tree is not None
        self._tree.forget()

    # -- saving

    @hookimpl
    def slot_released(self, slot: Slot, sequence: Sequence, reason: FinishReason) -> None:
        """Begin to save what is new."""
        if self._tree is None or reason is FinishReason.FAILED or sequence.truncated:
            return
        if self.idle_slots:
            self._save(slot, waits=self._waits)

    def _save(self, slot: Slot, *, waits: bool) -> None:
        n = len(slot.tokens)
        if n < N_MIN or not self._engine.runner.is_free(slot.context):
            return
        if self._kv.pos_max(slot.seq_id) != n - 1:
            return  # cut short by an error
        save = self._saver.save(slot, slot.tokens.view().copy())
        if not self._engine.scheduler.running:
            self._saver.prepare()
        elif waits or self._engine.runner.n_contexts > 1:  # another context's thread may change what is looked at
            self._saver.prepare(slot)
        if waits:
            save.transfer.wait()

    @hookimpl
    def take_state(self, slot: Slot) -> KeptState | None:
        """A checkpoint on its devices, where there is room."""
        # What a window holds depends on the context that it is in; a recurrent state does not.
        if self._tree is None or not self._kept.n_bytes_max or self._kv.removal is Removal.PART:
            return None
        return self._kept.take(slot.seq_id)

    @hookimpl
    def batch_submitted(self, batch: Batch) -> None:
        """While a device computes: make copies, and what was copied becomes a part of the tree."""
        for hit in self._hits:
            hit.go_on_beside(PREPARE_S)
        if self._tree is not None and self._saver.n_running:
            self._saver.prepare(within_s=PREPARE_S)
            self._saver.drain(N_PUBLISH)

    @hookimpl
    def slot_changing(self, slot: Slot, n_kept: int) -> None:
        """Know what is still to be copied of it. If it was to be saved only now, do so at once."""
        if self._tree is not None:
            self._saver.prepare(slot)
        if self._tree is None or self.idle_slots or slot.busy or n_kept >= len(slot.tokens):
            return
        self._save(slot, waits=True)

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
        tree = self._tree
        if tree is None or len(request.prompt) < N_MIN:
            return None
        self._saver.drain()
        needs_state = self._kv.needs_checkpoints
        # A state cannot go back by the one token that must be computed.
        path, n = tree.find(request.prompt[: len(request.prompt) - needs_state])
        state = None
        if needs_state:
            state = tree.best_state(path, n)
            n = state.n_tokens if state is not None else 0
        if n < N_MIN:
            self.n_misses += 1
            return None
        path = [node for node in path if node.start < n]
        return Hit(
            path, request.prompt[:n], state, tree, self._cells, self._kv, self._copier, self._workers, self._kept,
            self._load, self._ended, is_alone=lambda: self._engine.stats.n_requests_processing == 0,
            under_way=self._hits,
        )  # fmt: skip

    def _load(self, stored: Any, memory: Any) -> None:
        assert self._disk is not None
        self._disk.load(stored, memory)

    def _ended(self, hit: Hit) -> None:
        if hit.n_tokens:
            self.n_hits += 1
            self.effect += hit.n_tokens - hit.n_kept
            if self._disk is not None:
                self._disk.touch(hit.path)
            return
        self.n_failed += hit.failed is not None
        if hit.failed is not None:
            log.warning("stored state could not be restored, the prompt is computed: %s", hit.failed)
        if isinstance(hit.failed, BadFile) and self._disk is not None:
            self._disk.n_bad += 1
            self._disk.forget(hit.failed.entry)

    @hookimpl
    def idle(self, state: StepState) -> bool:
        """What was copied becomes a part of the tree, and goes to disk, as soon as it is there: the server may end soon."""
        if self._tree is None:
            return False
        self._saver.prepare()
        if self._saver.n_running:
            time.sleep(POLL_S)
        self._saver.drain()
        if self._disk is not None:
            self._disk.drain()
        return self._saver.n_running > 0

    def counters(self) -> Iterator[tuple[str, str, float, bool]]:
        """Name, help, value, and whether it only grows."""
        tree = self._tree
        if tree is None:
            return
        saver = self._saver
        yield "hits", "Prompts whose beginning was restored", self.n_hits, True
        yield "misses", "Prompts of which nothing was kept", self.n_misses, True
        yield "failed", "Restores that came to nothing, so that the prompt was computed", self.n_failed, True
        yield "restored_tokens", "Tokens restored", self.effect, True
        yield "saves", "Slots saved", saver.n_saved, True
        yield "saves_cut", "Slots whose next user came before all was saved", saver.n_cut, True
        yield "saves_failed", "Slots of which some could not be copied", saver.n_failed, True
        yield "saved_bytes", "Bytes copied from slots", saver.n_bytes, True
        yield "evicted_blocks", "Blocks that went to make room", tree.n_evicted, True
        yield "bytes", "Main memory in use", tree.n_bytes, False
        yield "bytes_max", "Main memory allowed", tree.n_bytes_max, False
        yield "device_states", "States kept on their devices", self._kept.n_taken, True
        yield "device_hits", "States put into a slot from their devices", self._kept.n_put, True
        yield "device_bytes", "Memory on devices in use for states", self._cells.state_bytes(), False
        disk = self._disk
        if disk is not None:
            yield "disk_written_bytes", "Bytes written to the folder", disk.n_written, True
            yield "disk_read_bytes", "Bytes read from the folder", disk.n_read, True
            yield "disk_evicted_files", "Files deleted to make room", disk.n_evicted, True
            yield "disk_bad_files", "Files deleted because they were damaged", disk.n_bad, True
            yield "disk_bytes", "Bytes of the folder in use", disk.n_bytes, False


class _Counters(Collector):
    """Read at each scrape."""

    def __init__(self, cache: AsyncCache) -> None:
        self._cache = cache

    def collect(self) -> Iterator[Metric]:
        for name, text, value, grows in self._cache.counters():
            family: Callable[..., Metric] = CounterMetricFamily if grows else GaugeMetricFamily
            yield family(f"llamamg:async_cache_{name}", text, value=value)
