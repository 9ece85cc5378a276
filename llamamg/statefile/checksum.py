"""Checksums of chunks: xxhash where it is installed, else zlib's CRC-32. A file says which one it has."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import Any

CHUNK_BYTES = 1 << 20
Checksum = Callable[[Any], int]


def _known() -> dict[str, Checksum]:
    found: dict[str, Checksum] = {"crc32": zlib.crc32}
    try:
        import xxhash
    except ImportError:
        return found
    return {"xxh3": xxhash.xxh3_64_intdigest, **found}


CHECKSUMS = _known()
BEST = next(iter(CHECKSUMS))


def n_chunks(n_bytes: int) -> int:
    """Checksums of so many bytes."""
    return -(-n_bytes // CHUNK_BYTES)


def checksums(name: str, data: memoryview) -> list[int]:
    """One for each chunk."""
    function = CHECKSUMS[name]
    return [function(data[at : at + CHUNK_BYTES]) for at in range(0, len(data), CHUNK_BYTES)]
