"""States of sequences that are kept beside them: on their devices, in main memory, or both."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from llamamg.blocks import Bytes, StateCopy
from llamamg.errors import NativeError

if TYPE_CHECKING:
    from llamamg.transfer import Transfer

log = logging.getLogger(__name__)


class KeptState:
    """A state as it was when it was taken.

    `device` is its copy on the devices, None without one; `data` that in main memory, None until `copying` is over.
    """

    __slots__ = ("__weakref__", "copying", "data", "device", "n_bytes")

    def __init__(self, n_bytes: int, device: StateCopy | None = None, data: Bytes | None = None) -> None:
        self.n_bytes, self.device, self.data = n_bytes, device, data
        self.copying: Transfer | None = None  # to main memory

    @property
    def is_settled(self) -> bool:
        """Whether it is in main memory, or will never be."""
        return self.data is not None or self.copying is None or self.copying.is_over

    def host_bytes(self) -> Bytes | None:
        """It in main memory, waiting for that if it must be; None when it could not be copied."""
        if self.data is None and self.copying is not None:
            self.copying.wait()
        return self.data

    def put(self, seq_id: int) -> bool:
        """Put it into a sequence from its devices, between two batches; False when that is not possible."""
        if self.device is None:
            return False
        try:
            self.device.put(seq_id)
        except NativeError as error:
            log.warning("a state on the device is not taken: %s", error)
            return False
        return True


def host_bytes(data: Bytes | KeptState) -> Bytes | None:
    """What a checkpoint holds, in main memory; None when it could not be brought there."""
    return data.host_bytes() if isinstance(data, KeptState) else data


def resident_bytes(data: Bytes | KeptState) -> Bytes | None:
    """The part of it that is in main memory now; nothing is waited for, so any thread may ask."""
    return data.data if isinstance(data, KeptState) else data
