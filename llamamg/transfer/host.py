"""Copies by plain memory access, or by the backend's own copy where the rows are on a device."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

from llamamg.blocks import BlockLayout, Cells, StateCopy, runs
from llamamg.transfer.job import Piece, Work

CHUNK_BYTES = 1 << 20  # what a cut waits for at most: about 0.2 ms


class HostCopier:
    """One work for each piece."""

    name = "threads"
    n_blocks = 1

    def __init__(self, cells: Cells, chunk_bytes: int = CHUNK_BYTES, why: str = "") -> None:
        self._cells, self._chunk_bytes = cells, chunk_bytes
        self.way = why or "copies by threads"
        self.state_chunk_bytes = chunk_bytes

    def works(self, seq_id: int, to_host: bool, pieces: Seq[Piece]) -> list[Work]:
        """As Copier's."""
        return [PieceWork(self._cells, seq_id, to_host, piece, self._chunk_bytes) for piece in pieces]

    def copy_state(self, copying: StateCopy, address: int, begin: int, end: int, to_host: bool) -> None:
        """As Copier's."""
        copying.copy_at(address + begin, begin, end)


@dataclass(slots=True, eq=False)
class PieceWork:
    """Copies a few planes in each chunk."""

    cells: Cells
    seq_id: int
    to_host: bool
    piece: Piece
    chunk_bytes: int
    start: int = 0
    end: int = 0
    n_chunks: int = 0
    n_bytes: int = 0
    _planes: tuple[range, ...] = ()

    def __post_init__(self) -> None:
        n = len(self.piece.cells)
        self._planes = plane_groups(self.cells.layout, n, self.chunk_bytes)
        self.start, self.end = self.piece.pos, self.piece.pos + n
        self.n_chunks = len(self._planes)
        self.n_bytes = n * self.cells.layout.n_row_bytes

    def copy(self, chunk: int, limit: int) -> None:
        piece = self.piece
        if chunk == 0 and piece.prepare is not None:
            piece.prepare()
        for at, cell, n in runs(piece.cells[: max(0, limit - piece.pos)]):
            self.cells.copy(self.seq_id, self.to_host, self._planes[chunk], cell, n, piece.block, piece.row + at)

    def finish(self, limit: int) -> None:
        n = min(limit, self.end) - self.piece.pos
        if self.piece.done is not None and n > 0:
            self.piece.done(n)


def plane_groups(layout: BlockLayout, n: int, chunk_bytes: int) -> tuple[range, ...]:
    """Neighbouring planes whose `n` rows have about `chunk_bytes`, at least one plane in each group."""
    groups, first, size = [], 0, 0
    for i, (_, n_bytes, n_columns) in enumerate(layout.planes):
        n_plane = n * n_bytes * n_columns
        if size and size + n_plane > chunk_bytes:
            groups.append(range(first, i))
            first, size = i, 0
        size += n_plane
    if size:
        groups.append(range(first, len(layout.planes)))
    return tuple(groups)
