"""Which rows an ablation has, on fake engines with plugins that stand in each other's way."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from benches import ablation, rpc_servers
from benches.ablation import Ablation, summary
from benches.errors import BenchError
from benches.judge import ACTED, NO_EFFECT, NOT_APPLICABLE, NOT_MEASURED, TOKENS_CHANGED
from benches.loads import LOADS, Sizes
from benches.report_load import machines
from benches.sides import SideError
from llamamg.config import Config
from llamamg.engine import Engine
from llamamg.plugins import Found, Unavailable, discover
from llamamg.plugins import testing as kit
from llamamg.plugins.pluginset import PluginSet
from llamamg.testing import fake_engine

from . import fake_clock

SIZES = Sizes(depth=24, n_tokens=8)


def count(self: Any, batch: Any) -> None:
    self.effect += 1


def counting(name: str, **declaration: Any) -> type[Any]:
    hooks = {"batch_submitted": count, **declaration.pop("hooks", {})}
    return kit.plugin(name, hooks, **declaration)


def rows(
    monkeypatch: pytest.MonkeyPatch,
    classes: list[type[Any]],
    on: tuple[str, ...],
    failed: tuple[str, ...] = (),
    make: Callable[..., Any] = fake_engine,
) -> dict[str, dict[str, Any]]:
    """The rows of one model and load `solo`; `on` are the plugins that it was started with, `failed` those switched off."""
    plugins = kit.unconfigured(*classes, enable=on)
    config = plugins.configure(kit.config(2), [])
    engine, _, _ = make(2, plugins=plugins, config=config)

    @contextlib.contextmanager
    def opened(config: Config) -> Iterator[Engine]:
        yield engine

    monkeypatch.setattr(ablation, "opened", opened)
    monkeypatch.setattr(ablation, "config_of", lambda flags: config)
    found = {c.declaration.name: Found(c.declaration.name, False, "a test", c, c.declaration) for c in classes}
    bar = SimpleNamespace(set_description=lambda text: None, update=lambda n: None)
    made = Ablation([], SIZES, 3, lambda: 10.0, found).rows(list(found), [LOADS["solo"]], bar)
    assert sorted(engine.plugins.enabled()) == sorted(set(on) - set(failed)), "the start is as it was"
    return {row["plugin"]: row for row in made}


def test_each_one_off_and_each_other_one_on(monkeypatch: pytest.MonkeyPatch) -> None:
    made = rows(monkeypatch, [counting("a"), counting("b"), counting("c", toggle="idle")], ("a", "c"))
    assert {name: row["mode"] for name, row in made.items()} == {"a": "one off", "b": "one on", "c": "one off"}
    assert {row["status"] for row in made.values()} == {ACTED}


def test_what_requires_a_plugin_goes_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    made = rows(monkeypatch, [counting("a"), counting("b", requires=("a",))], ("a", "b"))
    assert (made["a"]["status"], made["a"]["without"]) == (ACTED, ["b"])
    assert (made["b"]["status"], made["b"]["without"]) == (ACTED, [])


def test_a_conflict_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    made = rows(monkeypatch, [counting("a"), counting("b", conflicts=("a",))], ("a",))
    assert made["b"]["status"] == NOT_APPLICABLE
    assert "conflicts with a" in made["b"]["reason"]


def test_a_plugin_that_does_not_apply_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    def configure(self: Any, config: Any) -> None:
        raise Unavailable("no such device")

    made = rows(monkeypatch, [counting("a", hooks={"configure": configure})], ())
    assert (made["a"]["status"], made["a"]["reason"]) == (NOT_APPLICABLE, "no such device")


def test_a_plugin_that_cannot_be_enabled_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def configure(self: Any, config: Any) -> None:
        raise ArithmeticError("on purpose")

    made = rows(monkeypatch, [counting("a", hooks={"configure": configure})], ())
    assert made["a"]["status"] == NOT_MEASURED
    assert "on purpose" in made["a"]["reason"]


def test_a_plugin_that_raises_while_it_runs_is_an_error_of_its_row(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: Any, batch: Any, elapsed_s: float) -> None:
        raise ArithmeticError("on purpose")

    made = rows(monkeypatch, [counting("a", hooks={"batch_done": fail}), counting("b")], ("b",))
    assert made["a"]["status"] == NOT_MEASURED
    assert "on purpose" in made["a"]["reason"]
    assert made["b"]["status"] == ACTED


def test_what_stands_still_beside_others_is_switched_once_for_its_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    switched: list[tuple[str, bool]] = []
    toggle = PluginSet.toggle

    def spied(self: PluginSet, name: str, enabled: bool) -> None:
        switched.append((name, enabled))
        toggle(self, name, enabled)

    monkeypatch.setattr(PluginSet, "toggle", spied)
    still = kit.plugin("still", {"batch_submitted": lambda self, batch: None})
    made = rows(monkeypatch, [counting("a"), counting("b"), still, counting("off")], ("a", "b", "still"))
    assert made["still"]["status"] == NO_EFFECT
    assert {made[name]["status"] for name in ("a", "b", "off")} == {ACTED}
    assert [pair for pair in switched if pair[0] == "still"] == [("still", False), ("still", True)]
    tokens = made["still"]["tokens"]
    assert tokens["on"]["n_compared"] == 2 * tokens["off"]["n_compared"] > 0, "two blocks with it on, one off"
    assert tokens["on"]["n_changed"] == tokens["off"]["n_changed"] == 0
    assert "tokens compared in 1 rows, 0 near ties" in summary([{**made["still"], "model": "m"}])["still"]["says"]


def test_who_changes_tokens_without_counting_is_looked_at_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Among plugins that stand still one flips tokens: only its row is an error."""
    world = fake_clock.World(0)
    quiet = fake_clock.plugins_of(world)["quiet"]
    still = kit.plugin("still", {"batch_submitted": lambda self, batch: None})

    def made_engine(*args: Any, **more: Any) -> Any:
        engine, fake, other = fake_engine(*args, **more)
        runner = fake_clock.WorldRunner(fake.kv, fake.next_token, fake.n_batch, fake.n_ubatch)
        runner.world = world
        engine.runner = runner
        return engine, fake, other

    made = rows(monkeypatch, [quiet, still], ("quiet", "still"), make=made_engine)
    assert (made["quiet"]["status"], made["still"]["status"]) == (TOKENS_CHANGED, NO_EFFECT)
    assert made["still"]["tokens"]["on"]["n_compared"] > 0


def test_what_fails_beside_others_did_not_stand_still(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: Any, batch: Any, elapsed_s: float) -> None:
        raise ArithmeticError("on purpose")

    bad = kit.plugin("bad", {"batch_done": fail})
    made = rows(monkeypatch, [bad, counting("good")], ("bad", "good"), failed=("bad",))
    assert made["bad"]["status"] == NOT_MEASURED
    assert "on purpose" in made["bad"]["reason"]
    assert made["good"]["status"] == ACTED


@pytest.mark.parametrize("how", ["restart only", "changes the context"])
def test_a_plugin_that_is_fixed_at_the_start_gets_two_processes(monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    def configure(self: Any, config: Config) -> Config:
        from dataclasses import replace

        return replace(config, context=replace(config.context, n_draft_max=3))

    fixed = counting("a", toggle="restart") if how == "restart only" else counting("a", hooks={"configure": configure})
    asked = []

    class Restarted:
        def __init__(self, flags: Any, plugin: str, load: Any, sizes: Any) -> None:
            asked.append(plugin)

        def __enter__(self) -> None:
            raise BenchError("not here") from Unavailable("no second model")

        def __exit__(self, *_: object) -> None: ...

    monkeypatch.setattr(ablation, "Restarted", Restarted)
    made = rows(monkeypatch, [fixed, counting("b")], ("b",))
    assert asked == ["a"]
    assert (made["a"]["status"], made["a"]["reason"]) == (NOT_APPLICABLE, "no second model")
    assert made["b"]["status"] == ACTED


def test_what_applied_nowhere_is_known() -> None:
    made = [("a", NOT_APPLICABLE), ("a", NOT_APPLICABLE), ("b", NOT_APPLICABLE), ("b", NO_EFFECT), ("c", ACTED)]
    assert ablation.applied_nowhere([{"plugin": name, "status": status} for name, status in made]) == ["a"]


def test_what_needs_flags_of_its_own_over_rpc_gets_a_start_of_its_own() -> None:
    own = ablation.OVER_RPC["prefill-pipeline"]
    assert ablation.over_rpc_starts(["decode-groups", "prefill-pipeline", "other"]) == [
        ([], ["decode-groups", "other"]),
        (own, ["prefill-pipeline"]),
    ]
    assert ablation.over_rpc_starts(["prefill-pipeline"]) == [(own, ["prefill-pipeline"])]
    assert ablation.over_rpc_starts(["decode-groups"]) == [([], ["decode-groups"])]


def test_rpc_servers_listen_and_end() -> None:
    if rpc_servers.program() is None:
        pytest.skip("there is no rpc-server: run `llamamg build --upstream --server`")
    with rpc_servers.rpc_servers(2) as endpoints:
        assert len(set(endpoints)) == 2
        for endpoint in endpoints:
            socket.create_connection(("127.0.0.1", int(endpoint.partition(":")[2])), timeout=5).close()
    for endpoint in endpoints:
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", int(endpoint.partition(":")[2])), timeout=5)


def test_a_missing_rpc_server_is_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rpc_servers, "program", lambda: None)
    with pytest.raises(SideError, match="llamamg build --upstream --server"), rpc_servers.rpc_servers(1):
        pass


def _row(status: str, load: str = "solo") -> dict[str, Any]:
    return {"plugin": "a", "status": status, "reason": "because", "load": load, "model": "m"}


@pytest.mark.parametrize(
    ("statuses", "ok", "says"),
    [
        ([ACTED, NO_EFFECT], True, "acted: solo on m"),
        ([NO_EFFECT, NO_EFFECT], False, "no effect under any load"),
        ([NO_EFFECT, NOT_APPLICABLE], False, "no effect under any load"),
        ([NOT_APPLICABLE], True, "not applicable: because"),
        ([ACTED, TOKENS_CHANGED], False, "tokens changed: because"),
        ([ACTED, NOT_MEASURED], False, "not measured: because"),
    ],
)
def test_a_plugin_is_judged_over_all_rows(statuses: list[str], ok: bool, says: str) -> None:
    entry = summary([_row(status) for status in statuses])["a"]
    assert entry["ok"] == ok
    assert says in entry["says"]


def test_the_table_says_once_what_does_not_apply() -> None:
    made: list[dict[str, Any]] = [
        {**_row(status, load), "effect_unit": "steps", "n_pairs": 3, "metrics": metrics}
        for status, load, metrics in (
            (NOT_APPLICABLE, "solo", {}),
            (NOT_APPLICABLE, "five", {}),
            (
                ACTED,
                "mixed",
                {"decode_tps": {"change_percent": 12.34, "change_interval": [10.0, 15.0], "better": True}},
            ),
            (NO_EFFECT, "return", {}),
        )
    ]
    lines = ablation.table({"rows": made, "plugins": summary(made)}).splitlines()
    assert [" ".join(line.split()) for line in lines] == [
        "plugin model load metric change 99 % interval pairs",
        "a m solo,five not applicable: because",
        "a m mixed decode_tps +12.3 % +10.0 … +15.0 % 3 better",
        "a m return does nothing here",
        "",
        "a: acted: mixed on m",
    ]


NEEDS_CUDA = {"small-graphs", "expert-tiles"}  # its bench has rows of its own on a GPU


def test_every_shipped_plugin_acts_in_the_ablations_that_are_kept() -> None:
    """A plugin that ships is measured: `llamamg bench ablation` where this fails."""
    kept = [found.value for results in machines().values() for found in results if found.bench == ablation.NAME]
    acted = {name for result in kept for name, entry in result["plugins"].items() if entry["acted"]}
    assert acted >= {name for name, entry in discover().items() if entry.shipped} - NEEDS_CUDA
