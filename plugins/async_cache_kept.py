"""States on their devices: taken between two batches without anybody waiting, and brought to main memory beside decodes."""

from __future__ import annotations

import weakref
from typing import Any

import numpy as np

from llamamg import Cells, Copier, KeptState, StateWork, Transfer, Workers

MIB = 1 << 20
N_LEFT = 1024 * MIB  # bytes that stay free on each device
N_AUTO = 2048 * MIB
PART_AUTO = 4  # of what is free
N_FIRST = 8  # states that memory is taken for at once: each time it takes milliseconds, in which everybody waits


def device_bytes(cells: Cells, n_mib: int) -> int:
    """Bytes that states may take on devices. -1 is a quarter of what is free, at most 2 GiB; in main memory none."""
    if n_mib >= 0:
        return n_mib * MIB
    free = cells.memory_free()
    return min(N_AUTO, len(free) * max(0, min(free) - N_LEFT) // PART_AUTO) if free else 0


class KeptStates:
    """Takes states. The device's copy of one that is in main memory too goes when there is no room for another one."""

    def __init__(self, cells: Cells, copier: Copier, workers: Workers, n_bytes_max: int) -> None:
        self._cells, self._copier, self._workers = cells, copier, workers
        self.n_bytes_max = n_bytes_max
        self._order: list[weakref.ref[KeptState]] = []  # on devices, the one used last at the end
        self._is_stocked = False
        self.n_taken = self.n_put = 0  # on a device, and back from there
        cells.limit_states(n_bytes_max, N_LEFT if cells.memory_free() else 0)

    @property
    def n_bytes(self) -> int:
        """Memory on devices in use for states."""
        return self._cells.state_bytes()

    def take(self, seq_id: int) -> KeptState:
        """The state of a sequence as it is now. Raises NativeError."""
        copying = self._cells.save_state(seq_id)
        if self.detach(copying):
            if not self._is_stocked:
                self._stock(seq_id)
            return self._keep(seq_id, copying)
        try:
            data = np.empty(copying.n_bytes, np.uint8)
            copying.copy(data, 0, copying.n_bytes)
        finally:
            copying.close()
        return KeptState(copying.n_bytes, data=data)

    def _stock(self, seq_id: int) -> None:
        """Memory for the states to come, as far as there is room: that of copies that are given up at once."""
        self._is_stocked = True
        copies = []
        for _ in range(N_FIRST - 1):
            copying = self._cells.save_state(seq_id)
            copies.append(copying)
            if not copying.detach():
                break
        for copying in copies:
            copying.close()

    def detach(self, copying: Any) -> bool:
        """Give a state memory of its own on its devices, for which others go; False when there is no room."""
        if not self.n_bytes_max:
            return False
        while not copying.detach():
            if not self._give_up_one():
                return False
        return True

    def _keep(self, seq_id: int, copying: Any) -> KeptState:
        kept = KeptState(copying.n_bytes, copying)
        self._order.append(weakref.ref(kept))
        self.n_taken += 1
        kept.copying = Transfer(seq_id, to_host=True)
        self._workers.add(kept.copying, [StateWork(self._copier, copying, True, None, _into(weakref.ref(kept)))])
        kept.copying.seal()
        return kept

    def used(self, kept: KeptState) -> None:
        """It was put into a sequence from its device."""
        self.n_put += 1
        self._order = [ref for ref in self._order if (one := ref()) is not None and one is not kept]
        self._order.append(weakref.ref(kept))

    def _give_up_one(self) -> bool:
        """Free the device memory of the state unused for longest; False when none can be spared."""
        self._order = [ref for ref in self._order if (kept := ref()) is not None and kept.device is not None]
        for ref in self._order:
            kept = ref()
            if kept is not None and kept.data is not None:
                kept.device = None
                return True
        return False

    def stop(self) -> None:
        """Devices get back what nobody uses."""
        for ref in self._order:
            kept = ref()
            if kept is not None and kept.data is not None:
                kept.device = None
        self._cells.limit_states(0, 0)


def _into(ref: weakref.ref[KeptState]) -> Any:
    def done(data: Any) -> None:
        kept = ref()
        if kept is not None:
            kept.data = data

    return done
