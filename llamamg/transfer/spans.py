"""What is copied at once: runs of cells over blocks, planes of several devices mixed, and the copies these come to."""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np

from llamamg.blocks import N_ROWS, Plane, runs
from llamamg.transfer.driver import Copy
from llamamg.transfer.job import Piece


@dataclass(frozen=True, slots=True)
class Run:
    """Neighbouring cells in rows of blocks that are `pitch` bytes apart: `n` in each of `n_blocks`, from `row` on."""

    cell: int
    n: int
    block: int
    row: int
    n_blocks: int = 1
    pitch: int = 0


def spread(planes: Seq[tuple[int, Plane, int]]) -> list[tuple[int, Plane, int]]:
    """The planes of all devices mixed, so that each part of the list has of every device its part of the bytes."""
    totals: dict[int, int] = {}
    places: list[tuple[int, int]] = []  # of each plane: its device, bytes there before it
    for device, plane, _ in planes:
        places.append((device, totals.get(device, 0)))
        totals[device] = places[-1][1] + plane.n_row_bytes
    order = sorted(range(len(planes)), key=lambda i: places[i][1] / max(1, totals[places[i][0]]))
    return [planes[i] for i in order]


def merge(pieces: Seq[Piece], limit: int) -> list[Run]:
    """The runs of cells below `limit`; whole blocks behind each other whose addresses are evenly spaced become one run."""
    if (one := _one_run(pieces, limit)) is not None:
        return [one]
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


def _one_run(pieces: Seq[Piece], limit: int) -> Run | None:
    """As merge, quickly, for the common case of whole blocks that are all one run."""
    first, n = pieces[0], len(pieces)
    pitch = pieces[1].block - first.block if n > 1 else 0
    if pitch < 0 or (n > 1 and pitch == 0) or pieces[-1].pos + N_ROWS > limit:
        return None
    for i, piece in enumerate(pieces):
        if piece.row or len(piece.cells) != N_ROWS or piece.block != first.block + i * pitch:
            return None
    cells = np.concatenate([piece.cells for piece in pieces])
    if not (cells[1:] - cells[:-1] == 1).all():
        return None
    return Run(int(cells[0]), N_ROWS, first.block, 0, n, pitch)


def _end_block(run: Run) -> int:
    return run.block + run.pitch * (run.n_blocks - 1)


def _follows(last: Run, run: Run) -> bool:
    pitch = run.block - _end_block(last)
    is_even = last.n_blocks == 1 or pitch == last.pitch
    is_whole = last.n == run.n == N_ROWS and last.row == run.row == 0
    return is_whole and pitch > 0 and is_even and run.cell == last.cell + N_ROWS * last.n_blocks


def copies_of(plane: Plane, at: int, run: Run, to_host: bool) -> Iterator[Copy]:
    """One plane of one run. Rows of a plane follow each other on the device over all blocks of the run."""
    size = plane.n_bytes
    if plane.n_columns == 1:
        width = run.n * size
        pitch = run.pitch if run.n_blocks > 1 else width
        host, device = (run.block + at + run.row * size, pitch), (plane.data + run.cell * size, width)
        yield _between(host, device, to_host, width, run.n_blocks)
        return
    # Transposed: a run of elements in every column.
    for i in range(run.n_blocks):
        host = (run.block + i * run.pitch + at + run.row * size, N_ROWS * size)
        device = (plane.data + (run.cell + i * N_ROWS) * size, plane.n_cells * size)
        yield _between(host, device, to_host, run.n * size, plane.n_columns)


def _between(host: tuple[int, int], device: tuple[int, int], to_host: bool, width: int, height: int) -> Copy:
    target, source = (host, device) if to_host else (device, host)
    return Copy(target[0], source[0], target[1], source[1], width, height)
