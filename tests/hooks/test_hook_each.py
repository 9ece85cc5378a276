"""One test per hook: it is called as its contract says, with its arguments under their names."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest

from llamamg.decisions import Admit, Defer, Reject, Retry, Shrink
from llamamg.hooks import ARGUMENTS, COMPILED, ONCE, first
from llamamg.plugins import PluginError, Unavailable

ENGINE = SimpleNamespace(slots=[])


def test_every_hook_has_a_test() -> None:
    here = vars(sys.modules[__name__])
    assert [name for name in ONCE + COMPILED if f"test_hook_{name}" not in here] == []


def check_all(make: Any, hook: str, *args: Any) -> None:
    """Every enabled plugin is called once, with each argument under its own name, whatever order it lists them in."""
    calls: list[Any] = []
    names = ARGUMENTS[hook]
    scope = {"calls": calls}
    source = "def whole(self, {0}): calls.append(('whole', [{0}]))\n".format(", ".join(names))
    source += "def turned(self, {0}): calls.append(('turned', [{0}]))\n".format(", ".join(reversed(names)))
    source += f"def last(self, {names[-1]}): calls.append(('last', [{names[-1]}]))\n"
    source += "def none(self): calls.append(('none', []))\n"
    exec(source, scope)
    kinds = ("whole", "turned", "last", "none")
    plugins = make.on(*[make.plugin(f"p{i}", {hook: scope[kind]}) for i, kind in enumerate(kinds)])
    for function in getattr(plugins.hooks, hook):
        assert function(*args) is None
    assert calls == [("whole", [*args]), ("turned", [*reversed(args)]), ("last", [args[-1]]), ("none", [])]


def check_first(make: Any, hook: str, answer: Any, *args: Any) -> None:
    """None passes the question on, the first answer ends it, nobody answering gives None."""
    asked: list[str] = []

    def hook_of(name: str, value: Any) -> Any:
        scope: dict[str, Any] = {"asked": asked, "name": name, "value": value}
        exec(f"def h(self, {', '.join(ARGUMENTS[hook])}):\n    asked.append(name)\n    return value", scope)
        return scope["h"]

    values = {"p0": None, "p1": answer, "p2": "too late"}
    plugins = make.on(*[make.plugin(name, {hook: hook_of(name, value)}) for name, value in values.items()])
    functions = getattr(plugins.hooks, hook)
    assert len(functions) == 3
    assert first(functions, *args) == answer
    assert asked == ["p0", "p1"]
    plugins.toggle("p1", False)
    plugins.toggle("p2", False)
    assert first(getattr(plugins.hooks, hook), *args) is None


def test_hook_register_options(make: Any) -> None:
    class Base:
        def __init__(self, depth: int = 1) -> None:
            self.depth = depth

    cls = make.declared("deep", Base)
    from llamamg.hookspecs import hookimpl

    cls.register_options = hookimpl(lambda self, options: options.add("depth", type=int, default=3, help="how deep"))
    plugins = make.on(cls, options={"deep": {"depth": "7"}})
    assert plugins.views()[0].options == {"depth": 7}


def test_hook_configure(make: Any) -> None:
    from dataclasses import replace

    def wider(self: Any, config: Any) -> Any:
        return replace(config, context=replace(config.context, n_draft_max=config.context.n_draft_max + 4))

    def seen(self: Any, devices: Any, config: Any) -> None:
        self.effect = config.context.n_draft_max + len(devices)

    plugins = make.unconfigured(
        make.plugin("a", {"configure": wider}), make.plugin("b", {"configure": seen}), enable=("a", "b")
    )
    config = plugins.configure(make.config(), devices=["gpu"])
    assert config.context.n_draft_max == 4
    assert {view.name: view.effect for view in plugins.views()} == {"a": 0, "b": 5}


def test_hook_configure_may_decline(make: Any) -> None:
    def decline(self: Any) -> None:
        raise Unavailable("needs two GPUs")

    cls = make.plugin("a", {"configure": decline})
    plugins = make.unconfigured(shipped=(cls,))
    plugins.configure(make.config())
    view = plugins.views()[0]
    assert (view.state, view.reason, view.enabled) == ("unavailable", "needs two GPUs", False)
    with pytest.raises(PluginError, match="needs two GPUs"):
        make.unconfigured(cls, enable=("a",)).configure(make.config())


def test_hook_native_switches(make: Any) -> None:
    a = make.plugin("a", {"native_switches": lambda self: {"x": 1, "y": 2}})
    b = make.plugin("b", {"native_switches": lambda self, config: {"y": 2, "z": config.context.n_parallel}})
    plugins = make.on(a, b)
    applied: list[Any] = []
    plugins.apply_switches = applied.append
    assert plugins.native_switches() == {"x": 1, "y": 2, "z": 4}
    plugins.toggle("a", False)
    assert applied == [{"y": 2, "z": 4}]


def test_hook_engine_start(make: Any) -> None:
    calls: list[Any] = []
    a = make.plugin("a", {"engine_start": lambda self, engine: calls.append(("a", engine))})
    b = make.plugin("b", {"engine_start": lambda self, engine: calls.append(("b", engine))})
    plugins = make.unconfigured(a, b, enable=("a",))
    plugins.configure(make.config())
    plugins.start(ENGINE)
    assert calls == [("a", ENGINE)]
    plugins.toggle("b", True)
    plugins.toggle("b", False)
    plugins.toggle("b", True)
    assert calls == [("a", ENGINE), ("b", ENGINE)]


def test_hook_engine_stop(make: Any) -> None:
    calls: list[str] = []
    a = make.plugin("a", {"engine_stop": lambda self: calls.append("a")})
    b = make.plugin("b", {"engine_stop": lambda self: calls.append("b")})
    plugins = make.unconfigured(a, b, enable=("a",))
    plugins.configure(make.config())
    plugins.start(ENGINE)
    plugins.toggle("a", False)
    plugins.stop()
    plugins.stop()
    assert calls == ["a"]  # once, though off by then; never for one that did not start


def test_hook_register_metrics(make: Any) -> None:
    seen: list[Any] = []
    plugins = make.on(make.plugin("a", {"register_metrics": lambda self, metrics: seen.append(metrics)}))
    plugins.start(ENGINE)
    assert seen == [plugins.registry]


def test_hook_register_routes(make: Any) -> None:
    plugins = make.on(make.plugin("a", {"register_routes": lambda self: ["route"]}), make.plugin("b"))
    plugins.start(ENGINE)
    assert plugins.routes == {"a": ["route"]}


def test_hook_request_arrived(make: Any) -> None:
    check_all(make, "request_arrived", "request")


def test_hook_admit(make: Any) -> None:
    for answer in (Admit(), Defer(), Reject("full")):
        check_first(make, "admit", answer, "request", "state")


def test_hook_select_slot(make: Any) -> None:
    check_first(make, "select_slot", "slot", "request", "slots")


def test_hook_find_prefix(make: Any) -> None:
    check_first(make, "find_prefix", "hit", "request", "slot")


def test_hook_slot_released(make: Any) -> None:
    check_all(make, "slot_released", "slot", "sequence", "reason")


def test_hook_take_state(make: Any) -> None:
    check_first(make, "take_state", "a kept state", "slot")


def test_hook_is_stored(make: Any) -> None:
    check_first(make, "is_stored", True, "slot")


def test_hook_slot_changing(make: Any) -> None:
    check_all(make, "slot_changing", "slot", "n_kept")


def test_hook_request_finished(make: Any) -> None:
    check_all(make, "request_finished", "request", "timings")


def test_hook_batches_in_flight(make: Any) -> None:
    check_first(make, "batches_in_flight", 2, "state")


def test_hook_balance_groups(make: Any) -> None:
    check_first(make, "balance_groups", [(4, 1)], "state")


def test_hook_arrange_slots(make: Any) -> None:
    check_first(make, "arrange_slots", [(4, 1)], "state")


def test_hook_order_prefills(make: Any) -> None:
    check_first(make, "order_prefills", ["b", "a"], "state", ["a", "b"])


def test_hook_prefill_budget(make: Any) -> None:
    check_first(make, "prefill_budget", 0, "state")  # 0 is an answer, only None passes on


def test_hook_spec_limit(make: Any) -> None:
    check_first(make, "spec_limit", 0, "state")


def test_hook_draft(make: Any) -> None:
    check_first(make, "draft", [1, 2], "sequence", 4)


def test_hook_plan_step(make: Any) -> None:
    check_all(make, "plan_step", "state", "plan")


def test_hook_batch_submitted(make: Any) -> None:
    check_all(make, "batch_submitted", "batch")


def test_hook_batch_done(make: Any) -> None:
    check_all(make, "batch_done", "batch", 0.02)


def test_hook_draft_verified(make: Any) -> None:
    check_all(make, "draft_verified", "sequence", 4, 2)


def test_hook_step_done(make: Any) -> None:
    check_all(make, "step_done", "state", "outputs")


def test_hook_idle(make: Any) -> None:
    check_all(make, "idle", "state")


def test_hook_batch_failed(make: Any) -> None:
    for answer in (Retry(2), Shrink(100)):
        check_first(make, "batch_failed", answer, "batch", "error")


def test_hook_plugin_quarantined(make: Any) -> None:
    told: list[Any] = []
    watcher = make.plugin("a", {"plugin_quarantined": lambda self, name, reason: told.append((name, reason))})
    plugins = make.on(watcher, make.plugin("b", {"idle": lambda self: 1 / 0}))
    plugins.quarantine(plugins.hooks.idle[0], ZeroDivisionError("division by zero"))
    assert told == [("b", "idle: ZeroDivisionError: division by zero")]
