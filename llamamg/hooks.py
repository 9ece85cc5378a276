"""Hooks called while serving, compiled from pluggy's registrations to tuples of plain positional functions.

Calling an empty hook costs the test of an empty tuple. `LLAMAMG_TRACE_HOOKS=1` compiles timed functions instead.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from collections.abc import Sequence as Seq
from inspect import signature
from typing import Any

import pluggy

from llamamg import hookspecs

Hook = Callable[..., Any]

REQUEST_HOOKS = (
    "request_arrived",
    "admit",
    "select_slot",
    "find_prefix",
    "slot_released",
    "take_state",
    "is_stored",
    "slot_changing",
    "request_finished",
)
STEP_HOOKS = (
    "batches_in_flight",
    "balance_groups",
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
ONCE = (
    "register_options",
    "configure",
    "native_switches",
    "engine_start",
    "engine_stop",
    "register_metrics",
    "register_routes",
)


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

    __slots__ = (*COMPILED, "_functions", "_owners", "seconds", "traced")

    request_arrived: tuple[Hook, ...]
    admit: tuple[Hook, ...]
    select_slot: tuple[Hook, ...]
    find_prefix: tuple[Hook, ...]
    slot_released: tuple[Hook, ...]
    take_state: tuple[Hook, ...]
    is_stored: tuple[Hook, ...]
    slot_changing: tuple[Hook, ...]
    request_finished: tuple[Hook, ...]
    batches_in_flight: tuple[Hook, ...]
    balance_groups: tuple[Hook, ...]
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
    _owners: dict[Hook, tuple[str, str]]
    _functions: dict[tuple[str, str], Hook]

    def __init__(self, *, traced: bool = False) -> None:
        self.traced = traced
        self.seconds = {}  # (plugin, hook) -> seconds spent; filled only when traced
        self._owners = {}
        self._functions = {}
        for name in COMPILED:
            setattr(self, name, ())

    def compile(self, manager: pluggy.PluginManager, order: Seq[str]) -> None:
        """Take the implementations of the enabled plugins, given in calling order; tryfirst and trylast outrank it."""
        rank = {plugin: i for i, plugin in enumerate(order)}
        tuples = {}
        for name in COMPILED:
            impls = [i for i in getattr(manager.hook, name).get_hookimpls() if i.plugin_name in rank]
            impls.sort(key=lambda impl: (impl.trylast - impl.tryfirst, rank[impl.plugin_name]))
            tuples[name] = tuple(self._function(impl, name) for impl in impls)
        for name, functions in tuples.items():
            setattr(self, name, functions)

    def owner(self, function: Hook) -> tuple[str, str] | None:
        """(plugin, hook) of a compiled function, also of one whose plugin is off by now."""
        return self._owners.get(function)

    def _function(self, impl: pluggy.HookImpl, hook: str) -> Hook:
        """The compiled function of an implementation; the same one at every toggle, so that `owner` always knows it."""
        key = (impl.plugin_name, hook)
        function = self._functions.get(key)
        if function is None:
            function = positional(impl, ARGUMENTS[hook])
            if self.traced:
                function = self._timed(function, *key)
            self._functions[key] = function
            self._owners[function] = key
        return function

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
