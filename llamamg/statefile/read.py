"""Reading a state file. Every byte that is used was checked before."""

from __future__ import annotations

import os
import stat
import struct
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llamamg.statefile.checksum import CHECKSUMS, checksums, n_chunks
from llamamg.statefile.format import (
    MAGIC,
    N_HEADER_MAX,
    PREFIX,
    VERSION,
    WORD,
    Header,
    NoStateFile,
    OtherVersion,
    StateFileError,
    decode,
)


class StateFile:
    """An open file whose header, length and table of checksums are right. Any thread may read records.

    Raises StateFileError with a sentence, or OSError.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        # A pipe would be waited for until somebody writes to it.
        flags = os.O_RDONLY | getattr(os, "O_BINARY", 0) | getattr(os, "O_NONBLOCK", 0)
        self._handle = os.open(path, flags)
        try:
            if not stat.S_ISREG(os.fstat(self._handle).st_mode):
                raise NoStateFile("it is no file but a folder, a pipe or a device")
            self.header = self._read_header()
            self._sizes = self.header.records()
            self._offsets = np.concatenate(([0], np.cumsum(self._sizes, dtype=np.int64))) + self._begin
            self._sums = self._read_table()
            self._first_sum = np.concatenate(([0], np.cumsum([n_chunks(size) for size in self._sizes])))
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> StateFile:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Close it."""
        if self._handle >= 0:
            os.close(self._handle)
            self._handle = -1

    def _read_header(self) -> Header:
        if not MAGIC.startswith(os.pread(self._handle, len(MAGIC), 0)):
            raise NoStateFile("it is no state file of llamamg")
        head = self._read(0, PREFIX.size)
        _, version, n = PREFIX.unpack(head)
        if version != VERSION:
            raise OtherVersion(f"it has version {version} of the format, and this program reads {VERSION} only")
        if n > N_HEADER_MAX:
            raise StateFileError("its header is damaged")
        header = decode(head, self._read(PREFIX.size, n + WORD.size))
        self._begin = PREFIX.size + n + WORD.size
        n_expected, n_found = header.n_file_bytes(), os.fstat(self._handle).st_size
        if n_found != n_expected:
            raise StateFileError(f"it has {n_found} bytes and should have {n_expected}: it was cut off or added to")
        return header

    def _read_table(self) -> tuple[int, ...]:
        n = sum(n_chunks(size) for size in self._sizes)
        data = self._read(int(self._offsets[-1]), WORD.size * (n + 1))
        if CHECKSUMS[self.header.checksum](data[: -WORD.size]) != WORD.unpack(data[-WORD.size :])[0]:
            raise StateFileError("its table of checksums is damaged")
        return struct.unpack(f"<{n}Q", data[: -WORD.size])

    def _read(self, offset: int, n: int) -> bytes:
        data = os.pread(self._handle, n, offset)
        if len(data) != n:
            raise StateFileError("it is too short: it was cut off")
        return data

    # -- records

    @property
    def n_bytes(self) -> int:
        """Bytes of the file."""
        return int(os.fstat(self._handle).st_size)

    def tokens(self) -> NDArray[np.int32]:
        """All tokens."""
        data = np.empty(self._sizes[0], np.uint8)
        self._record(0, data)
        return data.view("<i4").astype(np.int32)

    def read_block(self, index: int, memory: NDArray[np.uint8]) -> None:
        """Fill `memory` with a block."""
        self._record(1 + index, memory)

    def read_state(self, index: int, memory: NDArray[np.uint8]) -> None:
        """Fill `memory` with a state."""
        self._record(1 + self.header.n_blocks + index, memory)

    def _record(self, index: int, memory: NDArray[np.uint8]) -> None:
        size, at, offset = self._sizes[index], 0, int(self._offsets[index])
        view = memoryview(memory.data).cast("B")
        if len(view) != size:
            raise StateFileError(f"a record has {size} bytes where {len(view)} are wanted")
        while at < size:
            n = os.preadv(self._handle, [view[at:]], offset + at)
            if n <= 0:
                raise StateFileError("it is too short: it was cut off")
            at += n
        first = int(self._first_sum[index])
        found = checksums(self.header.checksum, view)
        if tuple(found) != self._sums[first : first + len(found)]:
            raise StateFileError(f"a checksum is wrong (record {index}): the file is damaged")

    def verify(self) -> Iterator[int]:
        """Check every record; yields bytes checked so far. Raises StateFileError."""
        done = 0
        for index, size in enumerate(self._sizes):
            self._record(index, np.empty(size, np.uint8))
            done += size
            yield done


def check_identity(header: Header, identity: str, planes: Any, n_rows: int) -> None:
    """Raises StateFileError when the file belongs to another model, other settings or another cache type."""
    if header.identity != identity:
        model = f" ({header.model})" if header.model else ""
        raise StateFileError(f"it was saved with another model or other settings of its context{model}")
    if header.planes != tuple(planes) or header.n_rows != n_rows:
        raise StateFileError("it was saved with other cache types (-ctk, -ctv), -fa, or layers")
