"""The layout of a state file.

    magic (8 bytes), version (u32), length of the header (u32), header (JSON), its checksum (u64)
    records: tokens, then blocks, then states, one after the other
    checksums: a u64 for each chunk (1 MiB) of each record, then one over these

All numbers are little-endian. The header says how long every record is, so the length of the file is known from it.
"""

from __future__ import annotations

import json
import struct
from dataclasses import asdict, dataclass, replace
from typing import Any

from llamamg.statefile.checksum import BEST, CHECKSUMS, n_chunks

MAGIC = b"LMGSTATE"
VERSION = 1
PREFIX = struct.Struct("<8sII")
WORD = struct.Struct("<Q")
N_HEADER_MAX = 64 << 20


class StateFileError(ValueError):
    """This file cannot be used; the sentence says why."""


class NoStateFile(StateFileError):
    """Something else's file."""


class OtherVersion(StateFileError):
    """Whole, as far as can be told, but for another version of this program, or one with other packages."""


@dataclass(frozen=True, slots=True)
class StateInfo:
    """A state (recurrent layers, sliding window) as it was after `n_tokens`."""

    n_tokens: int
    pos_min: int
    pos_max: int
    n_bytes: int


@dataclass(frozen=True, slots=True)
class Header:
    """What a file holds: tokens [0, n_tokens), the rows of those from `start` on in blocks of `n_rows`, and states."""

    identity: str  # of model and settings, see model_identity
    planes: tuple[tuple[int, int, int], ...]  # (ggml type, bytes of a cell or element, columns)
    n_rows: int
    start: int
    n_tokens: int
    states: tuple[StateInfo, ...] = ()
    model: str = ""  # its name, for people
    checksum: str = BEST
    created: str = ""
    pooled_keys: str = "rebuilt"  # they are a function of the index keys

    @property
    def n_block_bytes(self) -> int:
        """Bytes of a block."""
        return self.n_rows * sum(n_bytes * n_columns for _, n_bytes, n_columns in self.planes)

    @property
    def n_blocks(self) -> int:
        """Blocks, the last one perhaps in part."""
        return -(-(self.n_tokens - self.start) // self.n_rows)

    def records(self) -> list[int]:
        """Bytes of every record, in their order."""
        sizes = [4 * self.n_tokens] + [self.n_block_bytes] * self.n_blocks
        return sizes + [state.n_bytes for state in self.states]

    def encode(self) -> bytes:
        """Everything in front of the records."""
        body = json.dumps(asdict(self), separators=(",", ":")).encode()
        head = PREFIX.pack(MAGIC, VERSION, len(body)) + body
        return head + WORD.pack(CHECKSUMS[self.checksum](head))

    def n_file_bytes(self) -> int:
        """Length of the file."""
        sizes = self.records()
        return len(self.encode()) + sum(sizes) + WORD.size * (sum(n_chunks(size) for size in sizes) + 1)


def decode(head: bytes, rest: bytes) -> Header:
    """The header of a file that begins with `head` (PREFIX) and goes on with `rest` (header and checksum)."""
    try:
        fields: dict[str, Any] = json.loads(rest[: -WORD.size])
        name = fields["checksum"]
    except (ValueError, KeyError, TypeError) as error:
        raise StateFileError("its header is damaged") from error
    if name not in CHECKSUMS:
        raise OtherVersion(f"its checksums are {name}, which needs a package of that kind: pip install xxhash")
    if CHECKSUMS[name](head + rest[: -WORD.size]) != WORD.unpack(rest[-WORD.size :])[0]:
        raise StateFileError("its header is damaged")
    try:
        header = Header(**fields)
        states = tuple(StateInfo(**state) for state in fields["states"])
        return replace(header, planes=tuple(tuple(p) for p in header.planes), states=states)  # type: ignore[misc]
    except TypeError as error:
        raise OtherVersion("its header has other fields than this version writes") from error
