"""What plugins share whose work the library does: their effect is a counter of the library."""

from __future__ import annotations

from typing import ClassVar

from llamamg import has_switch, native_count


class NativeEffect:
    """`effect` is how often the library came to the points `counted` since this was made; 0 with a build that lacks `switch`."""

    counted: ClassVar[tuple[str, ...]]
    switch: ClassVar[str]

    def __init__(self) -> None:
        self._n_before = self._count()

    def _count(self) -> int:
        return sum(native_count(name) for name in self.counted) if has_switch(self.switch) else 0

    @property
    def effect(self) -> int:
        """Read whenever somebody looks; nothing is done in a step."""
        return self._count() - self._n_before
