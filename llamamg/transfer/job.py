"""One transfer: the rows of one sequence, in works that threads take one after the other.

Whoever is about to overwrite rows calls `cut` first: when that returns, no thread reads or writes them any more. It waits for
at most one chunk of each thread.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Protocol

from llamamg.blocks import Fence, Indexes, StateCopy

ALL = 1 << 62  # a limit that cuts nothing


@dataclass(slots=True, eq=False)
class Piece:
    """Positions from `pos` on, which lie in `cells`, and the rows from `row` on of the block at address `block`.

    `prepare` fills the block first, on the thread that copies. `done` gets how many of them were copied in full, on that
    thread; none is called for a piece that was cut away whole.
    """

    pos: int
    cells: Indexes
    block: int
    row: int
    done: Callable[[int], None] | None = None
    prepare: Callable[[], None] | None = None


class Work(Protocol):
    """A part of a transfer, copied by one thread in `n_chunks` chunks. It touches positions from `start` to below `end` only."""

    start: int
    end: int
    n_chunks: int
    n_bytes: int

    def copy(self, chunk: int, limit: int) -> None:
        """Copy one chunk of what lies below `limit`. Raises NativeError."""

    def finish(self, limit: int) -> None:
        """All chunks are copied, up to `limit` at least."""


class Copier(Protocol):
    """Makes works of pieces. `name` is shown to users."""

    name: str

    @property
    def way(self) -> str:
        """In words, how it copies at the moment: a fault of a driver changes it."""

    n_blocks: int  # pieces of a work, where nothing cuts it short
    state_chunk_bytes: int  # of a state, copied at once

    def works(self, seq_id: int, to_host: bool, pieces: Seq[Piece]) -> list[Work]:
        """The works that copy these pieces."""

    def copy_state(self, copying: StateCopy, address: int, begin: int, end: int, to_host: bool) -> None:
        """Copy the bytes [begin, end) of a detached state, whose first byte is at `address`. Raises NativeError."""


class Transfer:
    """Made, filled and cut on one thread; worked on by others.

    `earlier` copies of the same sequence: while they are not over, whoever cuts this or gives way to it means them, too.
    """

    def __init__(self, seq_id: int, to_host: bool, fence: Fence | None = None, earlier: Transfer | None = None) -> None:
        self.seq_id, self.to_host = seq_id, to_host
        self._earlier = None if earlier is None or earlier.is_over else earlier
        self._fence = fence  # what is being computed into the rows, or read from them, still
        self.error: Exception | None = None
        self.n_bytes = 0  # copied
        self._limit = ALL
        self._open: list[int] = []  # where the works begin that are not finished
        self._sealed = False
        self._active: list[int] = []  # ends of the chunks being copied
        self._changed = threading.Condition()

    # -- the thread that owns it

    def opened(self, works: Seq[Work]) -> None:
        """More works were queued."""
        with self._changed:
            self._open += [work.start for work in works]

    def seal(self) -> None:
        """No more works will come."""
        with self._changed:
            self._sealed = True
            self._changed.notify_all()

    def cut(self, limit: int) -> None:
        """Copy nothing from position `limit` on. When this returns, no thread touches it."""
        if self._earlier is not None:
            self._earlier.cut(limit)
        with self._changed:
            self._limit = min(self._limit, limit)
            self._changed.wait_for(lambda: all(end <= self._limit for end in self._active))

    def give_way(self, begin: int, end: int, wait_s: float) -> None:
        """Positions from `begin` to below `end` are about to be overwritten: finish what is to be copied of them within
        `wait_s`, or copy nothing from `begin` on. When this returns, no thread touches them.
        """
        if self._earlier is not None:
            self._earlier.give_way(begin, end, wait_s)
        with self._changed:
            # Works that are still to come find these positions overwritten.
            if not self._sealed or not self._changed.wait_for(lambda: all(at >= end for at in self._open), wait_s):
                self._limit = min(self._limit, begin)
                self._changed.wait_for(lambda: all(at <= self._limit for at in self._active))

    def abandon(self) -> None:
        """Copy nothing more. When this returns, no thread touches anything of it."""
        self.cut(0)

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until it is over; False when it is not after `timeout_s`."""
        with self._changed:
            return self._changed.wait_for(lambda: self._sealed and not self._open, timeout_s)

    def is_past(self, end: int) -> bool:
        """Whether nothing below position `end` is still to be copied."""
        if self._earlier is not None and not self._earlier.is_past(end):
            return False
        with self._changed:
            return self._sealed and all(at >= end for at in self._open)

    @property
    def is_over(self) -> bool:
        """Whether everything was copied, cut away or failed."""
        if self._earlier is not None and self._earlier.is_over:
            self._earlier = None
        return self._sealed and not self._open and self._earlier is None

    @property
    def limit(self) -> int:
        """Positions from here on are not copied."""
        return self._limit

    # -- threads that copy

    def await_rows(self) -> None:
        """Wait until the rows are computed, or not needed any more, before the first chunk is copied."""
        fence = self._fence
        if fence is not None:
            fence.wait()
            self._fence = None

    def enter(self, work: Work) -> int:
        """Begin a chunk; the limit up to which it may copy, 0: nothing."""
        with self._changed:
            limit = min(work.end, self._limit) if self.error is None else 0
            if limit > 0:
                self._active.append(limit)
                return limit
            return 0

    def leave(self, limit: int) -> None:
        """The chunk is copied."""
        with self._changed:
            self._active.remove(limit)
            self._changed.notify_all()

    def closed(self, work: Work, n_bytes: int, error: Exception | None = None) -> None:
        """A work is over."""
        with self._changed:
            self._open.remove(work.start)
            self.n_bytes += n_bytes
            self.error = self.error or error
            self._changed.notify_all()
