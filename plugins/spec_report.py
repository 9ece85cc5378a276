"""What the plugin spec counts and tells."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Any

from llamamg_plugins.spec_cost import WIDTHS, StepTimes
from llamamg_plugins.spec_kept import Reader


@dataclass(slots=True)
class Totals:
    """Since the start."""

    n_drafts: int = 0
    n_draft: int = 0
    n_accepted: int = 0
    n_again: int = 0  # accepted tokens that were computed twice, because a snapshot came back
    accepted_per_pos: list[int] = field(default_factory=list)
    by_width: Counter[int] = field(default_factory=Counter)  # drafts
    n_lookups: int = 0
    lookup_s: float = 0.0
    verify_s: float = 0.0  # what steps with drafts took longer than those without
    why_not: Counter[str] = field(default_factory=Counter)  # sequences and steps without a draft, by reason

    def verified(self, n_draft: int, n_accepted: int) -> None:
        """Count a draft."""
        self.n_drafts += 1
        self.by_width[n_draft] += 1
        self.n_draft += n_draft
        self.n_accepted += n_accepted
        self.accepted_per_pos.extend([0] * (n_accepted - len(self.accepted_per_pos)))
        for i in range(n_accepted):
            self.accepted_per_pos[i] += 1

    def report(self, times: StepTimes, readers: Seq[Reader], n_max: int) -> dict[str, Any]:
        """Counts, where drafts were accepted, the time spent, why there was none, and what steps take."""
        return {
            "drafts": self.n_drafts,
            "drafted": self.n_draft,
            "accepted": self.n_accepted,
            "computed_again": self.n_again,
            "accepted_per_position": list(self.accepted_per_pos),
            "drafts_by_width": {str(width): n for width, n in sorted(self.by_width.items())},
            "lookup_us": round(1e6 * self.lookup_s / self.n_lookups, 2) if self.n_lookups else 0.0,
            "lookup_s": round(self.lookup_s, 4),
            "verify_s": round(self.verify_s, 3),
            "no_draft": dict(self.why_not),
            "step_times": times.table(),
            "widths": [width for width in WIDTHS if width <= n_max],
            "index_tokens": sum(len(reader.indexes[0]) for reader in readers),
            "index_mib": round(sum(index.n_bytes for reader in readers for index in reader.indexes) / 2**20, 2),
        }
