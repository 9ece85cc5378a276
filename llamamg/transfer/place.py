"""Giving out the cells of a sequence on a thread that copies, where they will be its positions."""

from __future__ import annotations

from llamamg.blocks import Cells, Indexes

N_PLACE = 4096  # cells at once: a cut waits for them, a few milliseconds


class PlaceWork:
    """Gives cells to `tokens` from position `start` on. Goes in front of the works that fill them, which need not wait."""

    n_bytes = 0

    def __init__(self, cells: Cells, seq_id: int, tokens: Indexes, start: int) -> None:
        self._cells, self._seq_id, self._tokens, self._at = cells, seq_id, tokens, start
        self.start, self.end = start, len(tokens)
        self.n_chunks = 1 + -(-(self.end - start) // N_PLACE)

    def copy(self, chunk: int, limit: int) -> None:
        """The first chunk is what is quick, the others are the rest of it."""
        if chunk == 0:
            if self.start == 0:
                self._at = self._cells.adopt(self._seq_id, self._tokens)
            return
        at, tokens = self._at, self._tokens[self._at : self._at + N_PLACE]
        if not len(tokens):
            return
        where = self._cells.place(self._seq_id, at, tokens)
        if where[0] != at or where[-1] != at + len(tokens) - 1:
            raise RuntimeError("the cells of a sequence are not its positions")
        self._at += len(tokens)

    def finish(self, limit: int) -> None:
        """Nothing is left."""
