"""A plugin as people see it: in `llamamg plugins`, in GET /plugins and on the status page."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class PluginView:
    """A snapshot. `reason` says why it is off although it was wanted, `quarantined` which error switched it off."""

    name: str
    summary: str = ""
    enabled: bool = False
    auto: bool = False  # shipped: on by itself where it applies
    available: bool = True
    reason: str | None = None
    toggle: str = ""
    helps: str = ""
    hurts: str = ""
    guard: str = ""
    effect: int = 0
    effect_unit: str = ""
    note: str = ""  # what the plugin has to say about itself now
    hook_ms: float | None = None  # None: hooks are not timed (LLAMAMG_TRACE_HOOKS=1 times them)
    quarantined: str | None = None
    guard_replays: int = 0  # idle replays of requests during which it acted (--guard-replay)
    guard_ties: int = 0
    guard_violations: int = 0
    options: dict[str, Any] = field(default_factory=dict)
    report: dict[str, Any] = field(default_factory=dict)  # what the plugin itself has to tell
    decided: bool = False  # False: nothing was configured yet, as in `llamamg plugins` without a server

    @property
    def state(self) -> str:
        """One word: on, off, auto, unavailable or quarantined."""
        if self.quarantined is not None:
            return "quarantined"
        if not self.available:
            return "unavailable"
        if self.enabled:
            return "on"
        return "auto" if self.auto and not self.decided else "off"

    def json(self) -> dict[str, Any]:
        """All fields and the state, as GET /plugins shows them."""
        return {**asdict(self), "state": self.state}
