"""What a started cache consists of."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llamamg import Cells, Copier, Workers, pick_copier
from llamamg.statefile import FolderLock, model_identity
from llamamg_plugins.async_cache_blocks import BlockPool
from llamamg_plugins.async_cache_disk import Disk
from llamamg_plugins.async_cache_kept import KeptStates, device_bytes
from llamamg_plugins.async_cache_metrics import Count, counts
from llamamg_plugins.async_cache_restore import Restorer
from llamamg_plugins.async_cache_save import Saver
from llamamg_plugins.async_cache_tree import Tree

MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Sizes:
    """As the options have them; MiB, but for `n_threads` and `disk_gb`."""

    ram: int
    stage: int
    device: int
    n_threads: int
    disk_gb: float


@dataclass(slots=True, eq=False)
class Parts:
    """All of it on the engine thread."""

    copier: Copier
    tree: Tree
    workers: Workers
    kept: KeptStates
    saver: Saver
    restorer: Restorer
    disk: Disk | None

    @property
    def way(self) -> str:
        """How copies are made at the moment, for people: a fault of a driver changes it."""
        return f"{self.copier.name}: {self.copier.way}"

    @property
    def is_settled(self) -> bool:
        """Whether nothing is under way, as far as was taken note of: steps do that by themselves."""
        return self.saver.n_running == 0 and (self.disk is None or self.disk.n_pending == 0)

    def settled(self) -> bool:
        """Take note of what is copied and written; True when nothing is under way."""
        self.saver.prepare()
        self.drain()
        return self.is_settled

    def drain(self) -> None:
        """Take note of what is copied and written."""
        self.saver.drain()
        if self.disk is not None:
            self.disk.drain()

    def forget(self) -> None:
        """Forget all that nobody uses. Files stay, for the next start; nothing more is written."""
        self.settled()
        self.saver.saved = lambda path: None
        self.tree.forget()

    def counts(self) -> Iterator[Count]:
        """What there is to count."""
        return counts(self.tree, self.saver, self.restorer, self.kept, self.disk)

    def stop(self) -> None:
        """Copy nothing more; what is queued for disk is written for a moment longer."""
        self.saver.drain()
        self.saver.saved = lambda path: None
        self.saver.stop()
        self.workers.stop()
        self.kept.stop()
        if self.disk is not None:
            self.disk.stop()


def make_parts(engine: Any, cells: Cells, sizes: Sizes, folder: Path | None, lock: FolderLock | None) -> Parts:
    """Take the memory and start the threads. The lock is the folder's, and goes with the thread that writes there."""
    copier, _ = pick_copier(cells)
    n_max = sizes.ram * MIB if sizes.ram >= 0 else 1 << 60
    on_host = all(plane.device == "" for plane in cells.planes(0))
    # Two keep a GPU's copies going; checking what comes from disk takes more.
    n_threads = sizes.n_threads or (1 if on_host else min(4 if folder is not None else 2, os.cpu_count() or 1))
    pinned = getattr(copier, "pinned", None) if sizes.stage else None
    if pinned is not None:
        pinned.reserve(n_threads)
    pool = BlockPool(
        cells.layout.n_block_bytes,
        n_max,
        pinned=None if pinned is None else pinned.allocate,
        n_pinned_bytes=sizes.stage * MIB,
    )
    tree = Tree(pool, n_max)
    disk = None
    if folder is not None and lock is not None:
        disk = Disk(
            folder,
            int(min(sizes.disk_gb * 1e9, 1 << 62)),
            tree,
            identity=model_identity(engine.config),
            planes=cells.layout.planes,
            model=engine.model.name,
            ended=lock.release,
        )
        disk.start()
    # On a host the decoders need the memory's bandwidth; a device copies beside its kernels.
    pause = {} if on_host else {"pause_save": 0.0, "pause_load": 0.0}
    workers = Workers(n_threads, **pause)
    kept = KeptStates(cells, copier, workers, device_bytes(cells, sizes.device))
    saver = Saver(cells, engine.kv, tree, copier, workers, kept)
    if disk is not None:
        saver.saved = disk.write
    restorer = Restorer(engine, cells, tree, copier, workers, kept, disk)
    return Parts(copier, tree, workers, kept, saver, restorer, disk)
