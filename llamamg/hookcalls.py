"""Calling hooks so that a plugin's mistake costs the plugin, not the step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from llamamg.hooks import Hook, Hooks


class Quarantine(Protocol):
    """What switches a plugin off after it raised."""

    def __call__(self, function: Hook, error: Exception) -> None: ...


class HookCalls:
    """The engine's way to call hooks. `hooks` is public for `if calls.hooks.x:` in front of hot calls."""

    __slots__ = ("_quarantine", "hooks")

    def __init__(self, hooks: Hooks, quarantine: Quarantine) -> None:
        self.hooks = hooks
        self._quarantine = quarantine

    def first(self, name: str, *args: Any, check: Callable[[Any], str | None] | None = None) -> Any:
        """The first answer that is not None and that `check` has no complaint about (its sentence quarantines the plugin)."""
        return self.first_with_owner(name, *args, check=check)[0]

    def first_with_owner(
        self, name: str, *args: Any, check: Callable[[Any], str | None] | None = None
    ) -> tuple[Any, Hook | None]:
        """As `first`, with the function that gave the answer: `on_behalf` calls more of its plugin's code."""
        for function in getattr(self.hooks, name):
            try:
                answer = function(*args)
                if answer is None:
                    continue
                complaint = check(answer) if check else None
                if complaint is None:
                    return answer, function
                raise ValueError(f"{name}: {complaint}")
            except Exception as error:
                self._quarantine(function, error)
        return None, None

    def on_behalf(self, function: Hook, code: Callable[[], Any]) -> tuple[Any, bool]:
        """Run code of the plugin that `function` belongs to: its result and True, or None and False: it is switched off."""
        try:
            return code(), True
        except Exception as error:
            self._quarantine(function, error)
            return None, False

    def each(self, name: str, *args: Any) -> list[Any]:
        """Every implementation's answer; those that raise are left out and switched off."""
        answers = []
        for function in getattr(self.hooks, name):
            try:
                answers.append(function(*args))
            except Exception as error:
                self._quarantine(function, error)
        return answers
