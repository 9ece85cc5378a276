"""seq-compact as it acts where joint passes are faster, whatever this machine's times are."""

from __future__ import annotations

from typing import Any

from llamamg_plugins.seq_compact import SeqCompact


class AlwaysCompact(SeqCompact):
    """Moves at every gap."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**{**options, "always": True})
