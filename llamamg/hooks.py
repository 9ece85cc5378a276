"""Hooks called while serving, compiled from pluggy's registrations to tuples of plain positional functions.

Calling an empty hook costs the test of an empty tuple. `LLAMAMG_TRACE_HOOKS=1` compiles timed functions instead.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection
from inspect import signature
from typing import Any

import pluggy

from llamamg import hookspecs

Hook = Callable[..., Any]

REQUEST_HOOKS = ("request_arrived", "admit", "select_slot", "find_prefix", "slot_released", "request_finished")
STEP_HOOKS = (
    "arrange_slots",
    "order_prefills",
    "prefill_budget",
    "spec_limit",
    "draft",
    "plan_step",
    "batch_submitted",
    "batch_done",
    "draft_verified",
    "step_done",
    "idle",
)
FAULT_HOOKS = ("batch_failed", "plugin_quarantined")
COMPILED = REQUEST_HOOKS + STEP_HOOKS + FAULT_HOOKS
ONCE = ("register_options", "configure", "native_switches", "engine_start", "engine_stop", "register_metrics", "register_routes")


def trace_wanted() -> bool:
    """Whether the environment asks for timed hooks."""
    return os.environ.get("LLAMAMG_TRACE_HOOKS", "") not in ("", "0")


def first(functions: tuple[Hook, ...], *args: Any) -> Any:
    """The first answer that is not None, or None."""
    for function in functions:
        answer = function(*args)
        if answer is not None:
            return answer
    return None


class Hooks:
    """One tuple of functions per hook, in calling order; arguments are positional, in the order of the hookspec.

    The object lives as long as the engine: a toggle replaces whole tuples, so nobody holds stale functions.
    """

    __slots__ = (*COMPILED, "seconds", "traced", "_owners")

    request_arrived: tuple[Hook, ...]
    admit: tuple[Hook, ...]
    select_slot: tuple[Hook, ...]
    find_prefix: tuple[Hook, ...]
    slot_released: tuple[Hook, ...]
    request_finished: tuple[Hook, ...]
    arrange_slots: tuple[Hook, ...]
    order_prefills: tuple[Hook, ...]
    prefill_budget: tuple[Hook, ...]
    spec_limit: tuple[Hook, ...]
    draft: tuple[Hook, ...]
    plan_step: tuple[Hook, ...]
    batch_submitted: tuple[Hook, ...]
    batch_done: tuple[Hook, ...]
    draft_verified: tuple[Hook, ...]
    step_done: tuple[Hook, ...]
    idle: tuple[Hook, ...]
    batch_failed: tuple[Hook, ...]
    plugin_quarantined: tuple[Hook, ...]
    seconds: dict[tuple[str, str], float]
    traced: bool
    _owners: dict[Hook, tuple[str, Hook]]

    def __init__(self, *, traced: bool = False) -> None:
        self.traced = traced
        self.seconds = {}  # (plugin, hook) -> seconds spent; filled only when traced
        self._owners = {}
        for name in COMPILED:
            setattr(self, name, ())

    def compile(self, manager: pluggy.PluginManager, enabled: Collection[str]) -> None:
        """Take the implementations of the enabled plugins; the order is pluggy's and does not depend on toggles."""
        owners: dict[Hook, tuple[str, Hook]] = {}
        tuples: dict[str, tuple[Hook, ...]] = {}
        for name in COMPILED:
            caller = getattr(manager.hook, name)
            functions = []
            for impl in reversed(caller.get_hookimpls()):  # pluggy keeps the last to be called first
                if impl.plugin_name not in enabled:
                    continue
                function = positional(impl, ARGUMENTS[name])
                if self.traced:
                    function = self._timed(function, impl.plugin_name, name)
                owners[function] = (impl.plugin_name, impl.function)
                functions.append(function)
            tuples[name] = tuple(functions)
        self._owners = owners
        for name, functions_of_hook in tuples.items():
            setattr(self, name, functions_of_hook)

    def owner(self, function: Hook) -> str | None:
        """The plugin a compiled function (or the implementation behind it) belongs to."""
        found = self._owners.get(function)
        if found is not None:
            return found[0]
        return next((plugin for plugin, source in self._owners.values() if source == function), None)

    def blame(self, error: BaseException) -> str | None:
        """The plugin whose hook raised, read from the traceback; None if no compiled hook is in it."""
        trace = error.__traceback__
        while trace is not None:
            for plugin, function in self._owners.values():
                if getattr(function, "__code__", None) is trace.tb_frame.f_code:
                    names = trace.tb_frame.f_code.co_varnames
                    owner = getattr(function, "__self__", None)  # classes may share inherited code
                    if owner is None or (names and trace.tb_frame.f_locals.get(names[0]) is owner):
                        return plugin
            trace = trace.tb_next
        return None

    def _timed(self, function: Hook, plugin: str, hook: str) -> Hook:
        key, clock, seconds = (plugin, hook), time.perf_counter, self.seconds
        seconds.setdefault(key, 0.0)

        def timed(*args: Any) -> Any:
            begin = clock()
            try:
                return function(*args)
            finally:
                seconds[key] += clock() - begin

        return timed


def positional(impl: pluggy.HookImpl, arguments: tuple[str, ...]) -> Hook:
    """The implementation as a function of the hookspec's arguments in order, all of them given by position."""
    function: Hook = impl.function
    if tuple(impl.argnames) == arguments:
        return function
    picks = tuple(arguments.index(name) for name in impl.argnames)
    if not picks:
        return lambda *_: function()
    if len(picks) == 1:
        pick = picks[0]
        return lambda *args: function(args[pick])
    return lambda *args: function(*[args[pick] for pick in picks])


def arguments_of(name: str) -> tuple[str, ...]:
    """The argument names of a hookspec."""
    return tuple(signature(getattr(hookspecs, name)).parameters)


ARGUMENTS = {name: arguments_of(name) for name in ONCE + COMPILED}
