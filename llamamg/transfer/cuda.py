"""Copies by cupy: asynchronous, on streams of their own for each device, of many blocks in one call where they lie evenly.

What is computed into the rows has ended before a copy begins: the transfer waits for its fence.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import threading
from collections.abc import Sequence as Seq
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

from llamamg.blocks import N_ROWS, BlockLayout, Cells, Plane, StateCopy
from llamamg.transfer.driver import N_PARTS, Copy, DriverCopies
from llamamg.transfer.job import Piece, Work
from llamamg.transfer.pinned import Pinned
from llamamg.transfer.spans import Run, copies_of, merge, spread

log = logging.getLogger(__name__)
CHUNK_BYTES = 32 << 20  # of blocks that are not page-locked, or of a state
GROUP_BYTES = 16 << 20  # of page-locked blocks; a cut waits for it, about 0.3 ms
WORK_BYTES = 64 << 20
N_TURNS = 2  # threads whose copies are on their way at once, on a device in a direction: that keeps it busy
D2H, H2D = 2, 1  # cudaMemcpyKind
Planes = list[tuple[Plane, int]]  # with the offset of each in a block


class CudaCopier:
    """Works of many blocks, copied some planes at a time. `cupy` is the module; tests give a stand-in.

    `driver` makes the copies of a chunk in one call; without it cupy makes them one by one.
    """

    name = "cupy"

    def __init__(
        self, cells: Cells, cupy: Any, chunk_bytes: int = CHUNK_BYTES, driver: DriverCopies | None = None
    ) -> None:
        self._cells, self.cupy, self._driver = cells, cupy, driver
        self.layout = cells.layout
        self.n_row_bytes, self._n_block_bytes = cells.layout.n_row_bytes, max(1, cells.layout.n_block_bytes)
        self._n_most = max(1, chunk_bytes // self._n_block_bytes)  # blocks of a work
        self.n_blocks = max(1, WORK_BYTES // self._n_block_bytes)  # page-locked ones
        self.state_chunk_bytes = max(chunk_bytes, self._n_block_bytes)
        self.pinned = Pinned(cupy, self.state_chunk_bytes)
        self._streams: dict[tuple[int, bool], Any] = {}
        self._own = threading.local()  # events of a thread, by device
        self._lock = threading.Lock()
        self._error = 0  # of the driver, for which its copies were given up
        self._turns: dict[tuple[int, bool], threading.Semaphore] = {}
        self._beside: ThreadPoolExecutor | None = (
            None  # where a chunk has copies of several devices: all but one of them
        )
        self._planes: dict[int, list[tuple[int, Plane, int]]] = {}
        self._groups: dict[tuple[int, int], list[dict[int, Planes]]] = {}

    @property
    def way(self) -> str:
        """As Copier's."""
        if self._error:
            return f"asynchronous copies by cupy, one by one: the driver makes none by itself (error {self._error})"
        return f"asynchronous copies by cupy, {'one by one' if self._driver is None else 'many in a call'}"

    def planes(self, seq_id: int) -> list[tuple[int, Plane, int]]:
        """Each plane of a sequence with the number of its CUDA device before it, and its offset in a block behind it."""
        known = self._planes.get(seq_id)
        if known is None:
            known, offset = [], 0
            for plane in self._cells.planes(seq_id):
                known.append((int(plane.device.removeprefix("CUDA")), plane, offset))
                offset += N_ROWS * plane.n_row_bytes
            self._planes[seq_id] = known
        return known

    def groups(self, seq_id: int, n_blocks: int) -> list[dict[int, Planes]]:
        """Planes by device, of which so many blocks have about GROUP_BYTES: of each device its part, so that all links are
        busy until the end."""
        known = self._groups.get((seq_id, n_blocks))
        if known is None:
            known, size = [], GROUP_BYTES
            for device, plane, offset in spread(self.planes(seq_id)):
                n_bytes = n_blocks * N_ROWS * plane.n_row_bytes
                if size and size + n_bytes > GROUP_BYTES:
                    known.append({})
                    size = 0
                known[-1].setdefault(device, []).append((plane, offset))
                size += n_bytes
            self._groups[seq_id, n_blocks] = known
        return known

    def stream(self, device: int, to_host: bool) -> Any:
        """The stream of a device and direction, made when it is first used; the device must be the current one."""
        with self._lock:
            if (device, to_host) not in self._streams:
                self._streams[device, to_host] = self.cupy.cuda.Stream(non_blocking=True)
            return self._streams[device, to_host]

    def events(self, device: int) -> list[Any]:
        """Events of this thread on a device, which must be the current one."""
        if not hasattr(self._own, "events"):
            self._own.events = {}
        if device not in self._own.events:
            self._own.events[device] = [self.cupy.cuda.Event(block=True, disable_timing=True) for _ in range(N_PARTS)]
        return self._own.events[device]  # type: ignore[no-any-return]

    def works(self, seq_id: int, to_host: bool, pieces: Seq[Piece]) -> list[Work]:
        """As Copier's; called on the engine thread."""
        made: list[Work] = []
        begin = 0
        while begin < len(pieces):
            area, end = self.pinned.area(pieces[begin].block), begin + 1
            # What is read from disk first goes in small works: a cut waits for that.
            n_most = self._n_most if area < 0 or pieces[begin].prepare is not None else self.n_blocks
            while end < len(pieces) and end - begin < n_most and self.pinned.area(pieces[end].block) == area:
                end += 1
            made.append(CudaWork(self, seq_id, to_host, tuple(pieces[begin:end]), area >= 0))
            begin = end
        return made

    def copy_direct(self, seq_id: int, to_host: bool, group: dict[int, Planes], merged: Seq[Run]) -> None:
        """Copy planes of page-locked blocks, those of each device at the same time, and wait for that."""
        first, *others = group
        waiting: list[Future[None]] = []
        try:
            for device in others:
                waiting.append(self._threads().submit(self._copy_one, device, to_host, group[device], merged))
            self._copy_one(first, to_host, group[first], merged)
        finally:
            wait(waiting)  # also after an error: whoever made the cut may write then
        for one in waiting:
            one.result()

    def _threads(self) -> ThreadPoolExecutor:
        with self._lock:
            if self._beside is None:
                n_devices = len({plane.device for plane in self._cells.planes(0)})
                n = 2 * N_TURNS * max(1, n_devices - 1)
                self._beside = ThreadPoolExecutor(n, thread_name_prefix="llamamg-copy-beside")
            return self._beside

    def _copy_one(self, device: int, to_host: bool, planes: Planes, merged: Seq[Run]) -> None:
        """What of it lies on one device."""
        copies = [copy for plane, at in planes for run in merged for copy in copies_of(plane, at, run, to_host)]
        with self._lock:
            turn = self._turns.setdefault((device, to_host), threading.Semaphore(N_TURNS))
        with turn:
            with self.cupy.cuda.Device(device):
                stream = self.stream(device, to_host)
            try:
                with self.cupy.cuda.Device(device):
                    events = self._begin(stream, device, to_host, copies)
                for event in events:
                    event.synchronize()
            except BaseException:
                # What was begun before it must not run while the caller uses the memory for something else.
                with contextlib.suppress(Exception):  # a device that is gone copies nothing
                    stream.synchronize()
                raise

    def _begin(self, stream: Any, device: int, to_host: bool, copies: list[Copy]) -> list[Any]:
        """Copies of one device; what is to be waited for."""
        events = self.events(device)
        driver = self._driver
        if driver is not None:
            events[0].record(stream)  # by the runtime, which makes its context this thread's for the driver
            error = driver.run(to_host, copies, stream.ptr, [event.ptr for event in events])
            if not error:
                return []
            self._give_up_driver(error)
        runtime, kind = self.cupy.cuda.runtime, D2H if to_host else H2D
        for c in copies:
            if c.height == 1:
                runtime.memcpyAsync(c.target, c.source, c.width, kind, stream.ptr)
            else:
                runtime.memcpy2DAsync(
                    c.target, c.target_pitch, c.source, c.source_pitch, c.width, c.height, kind, stream.ptr
                )
        events[0].record(stream)
        return events[:1]

    def _give_up_driver(self, error: int) -> None:
        """From now on cupy makes the copies; said once, though several threads may come here."""
        with self._lock:
            if self._driver is None:
                return
            self._driver, self._error = None, error
        log.warning("copies go another way from now on: %s", self.way)

    def copy_bounced(self, seq_id: int, to_host: bool, pieces: Seq[Piece], limit: int) -> None:
        """Copy what of the pieces lies below `limit`, through page-locked memory."""
        pieces = [piece for piece in pieces if piece.pos < limit]
        if not pieces:
            return  # all of it lies behind a cut
        size = self._n_block_bytes
        with self.pinned.bounce() as buffer:
            base = int(buffer.ctypes.data)
            on_the_way = [Piece(p.pos, p.cells, base + i * size, p.row) for i, p in enumerate(pieces)]
            if not to_host:
                for piece, way in zip(pieces, on_the_way, strict=True):
                    ctypes.memmove(way.block, piece.block, size)
            merged = merge(on_the_way, limit)
            for group in self.groups(seq_id, len(pieces)):
                self.copy_direct(seq_id, to_host, group, merged)
            if to_host:
                for piece, way in zip(pieces, on_the_way, strict=True):
                    n = min(limit - piece.pos, len(piece.cells))
                    move_rows(self.layout, way.block, piece.block, piece.row, n)

    def copy_state(self, copying: StateCopy, address: int, begin: int, end: int, to_host: bool) -> None:
        """As Copier's, through page-locked memory."""
        with self.pinned.bounce() as buffer:
            way = int(buffer.ctypes.data)
            if not to_host:
                ctypes.memmove(way, address + begin, end - begin)
            copying.copy_at(way, begin, end)
            if to_host:
                ctypes.memmove(address + begin, way, end - begin)


def move_rows(layout: BlockLayout, source: int, target: int, row: int, n: int) -> None:
    """Copy `n` rows from `row` on from one block to another, plane by plane unless they are all."""
    if n == N_ROWS:
        ctypes.memmove(target, source, layout.n_block_bytes)
        return
    at = 0
    for _, n_bytes, n_columns in layout.planes:
        for _ in range(n_columns):
            ctypes.memmove(target + at + row * n_bytes, source + at + row * n_bytes, n * n_bytes)
            at += N_ROWS * n_bytes


class CudaWork:
    """Several pieces, all or none of them in one piece of page-locked memory."""

    def __init__(self, copier: CudaCopier, seq_id: int, to_host: bool, pieces: tuple[Piece, ...], pinned: bool) -> None:
        self._copier, self._seq_id, self._to_host, self.pieces = copier, seq_id, to_host, pieces
        self.start, self.end = pieces[0].pos, pieces[-1].pos + len(pieces[-1].cells)
        self.n_bytes = copier.n_row_bytes * sum(len(piece.cells) for piece in pieces)
        self._groups = copier.groups(seq_id, len(pieces)) if pinned else []
        self.n_chunks = max(1, len(self._groups))
        self._merged: list[Run] = []
        self._limit = 0  # of what is merged

    def copy(self, chunk: int, limit: int) -> None:
        """As Work's: some planes of all blocks, or everything where it is not page-locked."""
        if chunk == 0:
            for piece in self.pieces:
                if piece.prepare is not None and piece.pos < limit:
                    piece.prepare()
        if not self._groups:
            self._copier.copy_bounced(self._seq_id, self._to_host, self.pieces, limit)
            return
        if limit != self._limit:
            self._merged, self._limit = merge(self.pieces, limit), limit
        self._copier.copy_direct(self._seq_id, self._to_host, self._groups[chunk], self._merged)

    def finish(self, limit: int) -> None:
        """As Work's."""
        for piece in self.pieces:
            n = min(limit - piece.pos, len(piece.cells))
            if piece.done is not None and n > 0:
                piece.done(n)
