"""How the copiers of this process copy at the moment: what a report says must change when a copier falls back."""

from __future__ import annotations

import weakref
from collections import Counter

from llamamg.transfer.job import Copier

_used: weakref.WeakSet[Copier] = weakref.WeakSet()


def using(copier: Copier) -> None:
    """It is in use, as long as somebody holds it."""
    _used.add(copier)


def ways() -> dict[str, int]:
    """Copiers in use, by their way."""
    return dict(Counter(copier.way for copier in list(_used)))
