"""One installed plugin in one server: its instance, its options and its state."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from llamamg.guard import GuardCounts
from llamamg.hooks import Hooks
from llamamg.plugins.declaration import PluginError
from llamamg.plugins.discovery import Found
from llamamg.plugins.options import Options
from llamamg.plugins.view import PluginView


@dataclass(slots=True)
class Member:
    """An instance exists once the plugin could be enabled; a broken package never has one."""

    found: Found
    instance: Any = None
    options: dict[str, Any] = field(default_factory=dict)
    enabled: bool = False
    configured: bool = False
    started: bool = False
    reason: str | None = None  # why it is off although it was wanted
    quarantined: str | None = None
    guard_counts: GuardCounts = field(default_factory=GuardCounts)

    @property
    def name(self) -> str:
        """The plugin's name."""
        return self.found.name

    def parse(self, given: Mapping[str, str]) -> dict[str, Any]:
        """Constructor keywords from option texts. Raises PluginError for an unknown option or a wrong value."""
        options = Options(self.name)
        options.declared = self.found.options
        return options.values(given)

    def instantiate(self, given: Mapping[str, str]) -> None:
        """Make the instance. Raises PluginError when the options or their combination are refused."""
        assert self.found.cls is not None
        values = self.parse(given)
        try:
            self.instance = self.found.cls(**values)
        except Exception as error:
            sentence = f"plugin {self.name} does not take these options ({text_of(error)}); see --help"
            raise PluginError(sentence) from error
        self.options = {key.replace("_", "-"): value for key, value in values.items()}

    def view(self, hooks: Hooks, *, decided: bool) -> PluginView:
        """The plugin as shown to people. `decided`: plugins were configured, so off means off."""
        declaration = self.found.declaration
        if declaration is None:
            return PluginView(self.name, available=False, reason=self.found.broken, decided=decided)
        spent_s = sum(seconds for (plugin, _), seconds in list(hooks.seconds.items()) if plugin == self.name)
        return PluginView(
            name=self.name,
            summary=declaration.summary,
            enabled=self.enabled,
            auto=self.found.shipped,
            available=self.reason is None,
            reason=self.reason,
            toggle=declaration.toggle,
            helps=declaration.helps,
            hurts=declaration.hurts,
            guard=str(declaration.guard),
            effect=int(getattr(self.instance, "effect", 0)),
            effect_unit=declaration.effect,
            note=str(getattr(self.instance, "note", "")),
            hook_ms=1e3 * spent_s if hooks.traced else None,
            quarantined=self.quarantined,
            guard_replays=self.guard_counts.n_replays,
            guard_ties=self.guard_counts.n_ties,
            guard_violations=self.guard_counts.n_violations,
            options=dict(self.options) or {name: option.default for name, option in self.found.options.items()},
            report=dict(getattr(self.instance, "report", None) or {}),
            decided=decided,
        )


def text_of(error: BaseException) -> str:
    """An exception in one line."""
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
