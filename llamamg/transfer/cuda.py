"""Copies by cupy: asynchronous, on streams of their own for each device, of many blocks in one call where they lie evenly.

What is computed into the rows has ended before a copy begins: the transfer waits for its fence.
"""

from __future__ import annotations

import ctypes
import itertools
import threading
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Any

from llamamg.blocks import N_ROWS, BlockLayout, Cells, Plane, StateCopy, runs
from llamamg.transfer.job import Piece, Work
from llamamg.transfer.pinned import Pinned

CHUNK_BYTES = 32 << 20  # on its way at once; a cut waits for it, about 1 ms
D2H, H2D = 2, 1  # cudaMemcpyKind


@dataclass(frozen=True, slots=True)
class Run:
    """Neighbouring cells in rows of blocks that are `pitch` bytes apart: `n` in each of `n_blocks`, from `row` on."""

    cell: int
    n: int
    block: int
    row: int
    n_blocks: int = 1
    pitch: int = 0


class CudaCopier:
    """One work for each 32 MiB. `cupy` is the module; tests give a stand-in."""

    name = "cupy"

    def __init__(self, cells: Cells, cupy: Any, chunk_bytes: int = CHUNK_BYTES) -> None:
        self._cells, self.cupy, self._chunk_bytes = cells, cupy, chunk_bytes
        self.layout = cells.layout
        n_block = max(1, self.layout.n_block_bytes)
        self._n_most = max(1, chunk_bytes // n_block)  # blocks of a work
        self.state_chunk_bytes = max(chunk_bytes, n_block)
        self.pinned = Pinned(cupy, self.state_chunk_bytes)
        self._streams: dict[tuple[int, bool], Any] = {}
        self._lock = threading.Lock()
        self._planes: dict[int, list[tuple[Plane, int]]] = {}

    def planes(self, seq_id: int) -> list[tuple[Plane, int]]:
        """Each plane of a sequence with the number of its CUDA device."""
        known = self._planes.get(seq_id)
        if known is None:
            known = [(plane, int(plane.device.removeprefix("CUDA"))) for plane in self._cells.planes(seq_id)]
            self._planes[seq_id] = known
        return known

    def stream(self, device: int, to_host: bool) -> Any:
        """The stream of a device and direction, made when it is first used; the device must be the current one."""
        with self._lock:
            if (device, to_host) not in self._streams:
                self._streams[device, to_host] = self.cupy.cuda.Stream(non_blocking=True)
            return self._streams[device, to_host]

    def works(self, seq_id: int, to_host: bool, pieces: Seq[Piece]) -> list[Work]:
        """As Copier's; called on the engine thread."""
        self.planes(seq_id)
        n = self._n_most
        return [
            CudaWork(self, self.layout.n_row_bytes, seq_id, to_host, tuple(pieces[i : i + n]))
            for i in range(0, len(pieces), n)
        ]

    def copy(self, seq_id: int, to_host: bool, pieces: Seq[Piece], limit: int) -> None:
        """Copy what of the pieces lies below `limit`, through page-locked memory where the blocks are not."""
        merged: list[Run] = []
        others: list[Piece] = []
        for area, together in itertools.groupby(pieces, lambda piece: self.pinned.area(piece.block)):
            if area < 0:
                others += (piece for piece in together if piece.pos < limit)
            else:
                merged += merge(tuple(together), limit)
        if merged:
            self._copy_runs(seq_id, to_host, merged)
        if not others:
            return
        size = self.layout.n_block_bytes
        with self.pinned.bounce() as buffer:
            base = int(buffer.ctypes.data)
            on_the_way = [Piece(p.pos, p.cells, base + i * size, p.row) for i, p in enumerate(others)]
            if not to_host:
                for piece, way in zip(others, on_the_way, strict=True):
                    ctypes.memmove(way.block, piece.block, size)
            self._copy_runs(seq_id, to_host, merge(on_the_way, limit))
            if to_host:
                for piece, way in zip(others, on_the_way, strict=True):
                    n = min(limit - piece.pos, len(piece.cells))
                    move_rows(self.layout, way.block, piece.block, piece.row, n)

    def _copy_runs(self, seq_id: int, to_host: bool, merged: Seq[Run]) -> None:
        """Queue the copies of all planes on their devices and wait for them."""
        runtime, events = self.cupy.cuda.runtime, []
        kind = D2H if to_host else H2D
        by_device: dict[int, list[tuple[Plane, int]]] = {}
        offset = 0  # of the plane in a block
        for plane, device in self.planes(seq_id):
            by_device.setdefault(device, []).append((plane, offset))
            offset += N_ROWS * plane.n_row_bytes
        for device, planes in by_device.items():
            with self.cupy.cuda.Device(device):
                stream = self.stream(device, to_host)
                for plane, at in planes:
                    for run in merged:
                        _queue(runtime, plane, at, run, to_host, kind, stream.ptr)
                event = self.cupy.cuda.Event(block=True, disable_timing=True)
                event.record(stream)
                events.append(event)
        for event in events:
            event.synchronize()

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


@dataclass(slots=True, eq=False)
class CudaWork:
    """Several pieces in one go."""

    copier: CudaCopier
    n_row_bytes: int
    seq_id: int
    to_host: bool
    pieces: tuple[Piece, ...]
    start: int = 0
    end: int = 0
    n_chunks: int = 1
    n_bytes: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        self.start = min(piece.pos for piece in self.pieces)
        self.end = max(piece.pos + len(piece.cells) for piece in self.pieces)
        self.n_bytes = self.n_row_bytes * sum(len(piece.cells) for piece in self.pieces)

    def copy(self, chunk: int, limit: int) -> None:
        for piece in self.pieces:
            if piece.prepare is not None and piece.pos < limit:
                piece.prepare()
        self.copier.copy(self.seq_id, self.to_host, self.pieces, limit)

    def finish(self, limit: int) -> None:
        for piece in self.pieces:
            n = min(limit - piece.pos, len(piece.cells))
            if piece.done is not None and n > 0:
                piece.done(n)


def merge(pieces: Seq[Piece], limit: int) -> list[Run]:
    """The runs of cells below `limit`; whole blocks behind each other whose addresses are evenly spaced become one run."""
    merged: list[Run] = []
    for piece in pieces:
        for at, cell, n in runs(piece.cells[: max(0, limit - piece.pos)]):
            run = Run(cell, n, piece.block, piece.row + at)
            last = merged[-1] if merged else None
            if last is not None and _follows(last, run):
                merged[-1] = Run(last.cell, last.n, last.block, 0, last.n_blocks + 1, run.block - _end_block(last))
            else:
                merged.append(run)
    return merged


def _end_block(run: Run) -> int:
    return run.block + run.pitch * (run.n_blocks - 1)


def _follows(last: Run, run: Run) -> bool:
    pitch = run.block - _end_block(last)
    is_even = last.n_blocks == 1 or pitch == last.pitch
    is_whole = last.n == run.n == N_ROWS and last.row == run.row == 0
    return is_whole and pitch > 0 and is_even and run.cell == last.cell + N_ROWS * last.n_blocks


def _queue(runtime: Any, plane: Plane, at: int, run: Run, to_host: bool, kind: int, stream: int) -> None:
    """One plane of one run. Rows of a plane follow each other on the device over all blocks of the run."""
    if plane.n_columns == 1:
        size = plane.n_bytes
        device, host = plane.data + run.cell * size, run.block + at + run.row * size
        width = run.n * size
        if run.n_blocks == 1:
            runtime.memcpyAsync(host if to_host else device, device if to_host else host, width, kind, stream)
            return
        a, b = (host, run.pitch), (device, width)
        target, source = (a, b) if to_host else (b, a)
        runtime.memcpy2DAsync(target[0], target[1], source[0], source[1], width, run.n_blocks, kind, stream)
        return
    # Transposed: a run of elements in every column.
    for i in range(run.n_blocks):
        device = plane.data + (run.cell + i * N_ROWS) * plane.n_bytes
        host = run.block + i * run.pitch + at + run.row * plane.n_bytes
        a, b = (host, N_ROWS * plane.n_bytes), (device, plane.n_cells * plane.n_bytes)
        target, source = (a, b) if to_host else (b, a)
        runtime.memcpy2DAsync(
            target[0], target[1], source[0], source[1], run.n * plane.n_bytes, plane.n_columns, kind, stream
        )
