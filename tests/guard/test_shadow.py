"""Idle replays: they find a plugin that changes answers, leave the slots alone and give way to requests."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llamamg import hookimpl, replay_alone
from llamamg.config import Config, ContextConfig, ModelConfig, PluginsConfig
from llamamg.engine import Engine
from llamamg.guard import Guard
from llamamg.library import Library
from llamamg.loading import load
from llamamg.plugins import PluginSet, PluginView
from llamamg.plugins.testing import Point, declared
from llamamg.request import Event, Failed, Finished, Started
from llamamg.server.metrics import Metrics
from llamamg.shadow import Shadow
from llamamg.testing import ask, run

PROMPT = np.random.default_rng(5).integers(1000, 5000, 40).tolist()


class Acts:
    """Counts that it did something in each step."""

    def __init__(self) -> None:
        self.effect = 0

    @hookimpl
    def step_done(self) -> None:
        self.effect += 1


class Changes(Acts):
    """Gives another token than the model chose, once in each request."""

    @hookimpl
    def engine_start(self, engine: Engine) -> None:
        collect = engine.runner.collect

        def wrong() -> Any:
            done = collect()
            for output in done.outputs if done is not None else ():
                if output.row.sequence.n_decoded == 2:
                    output.tokens[0] = 1000 + (output.tokens[0] + 1) % 1000
            return done

        engine.runner.collect = wrong  # type: ignore[method-assign]


class Served:
    """An engine stepped by the test, with the events of its requests."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.events: list[tuple[int, Event]] = []
        engine.deliver = self.events.extend
        engine.plugins.start(engine)

    @property
    def shadow(self) -> Shadow:
        assert self.engine.shadow is not None
        return self.engine.shadow

    def answer(self, prompt: list[int], n_predict: int = 6, **fields: Any) -> list[int]:
        request = ask(prompt, n_predict=n_predict, return_tokens=True, **{"temperature": 0.0, **fields})
        self.engine.submit(request)
        run(self.engine)
        (last,) = [event for id_, event in self.events if id_ == request.id and isinstance(event, Finished | Failed)]
        assert isinstance(last, Finished)
        return list(last.tokens)

    def idle(self) -> int:
        """All replays that wait; how many slices they took."""
        n = 0
        while self.shadow.step():
            n += 1
        return n

    def view(self, name: str) -> PluginView:
        return next(view for view in self.engine.plugins.views() if view.name == name)


@pytest.fixture
def served(library: Library, micro_model: Path) -> Iterator[Callable[..., Served]]:
    """`served(*classes, every=1, **options of ContextConfig)`."""
    engines: list[Engine] = []

    def make(*classes: type[Any], every: int = 1, **options: Any) -> Served:
        names = tuple(cls.declaration.name for cls in classes)
        chosen = PluginsConfig(enable=names, only=bool(names), none=not names, guard_replay=every)
        plugins = PluginSet.discover(chosen, [Point(name, cls) for name, cls in zip(names, classes, strict=True)])
        words = {"n_ctx": 1024, "n_parallel": 2, "kv_unified": False, "n_threads": 1, "warmup": False} | options
        engine = load(Config(ModelConfig(micro_model), ContextConfig(**words), plugins=chosen), plugins)
        engines.append(engine)
        return Served(engine)

    yield make
    for engine in engines:
        engine.plugins.stop()
        engine.stop(0.0)


def plugin(name: str, base: type[Any], guard: Guard) -> type[Any]:
    return declared(name, base, guard=guard)


def test_an_honest_plugin_stays_on_and_slots_stay_as_they_are(served: Callable[..., Served]) -> None:
    s = served(plugin("honest", Acts, Guard.same_tokens()))
    first = s.answer(PROMPT)
    held = [(slot.seq_id, slot.tokens.view().tolist()) for slot in s.engine.slots]
    assert s.idle() > len(first)  # slices: the prompt, and each token
    assert [(slot.seq_id, slot.tokens.view().tolist()) for slot in s.engine.slots] == held
    assert s.engine.scheduler.kv.pos_max(s.shadow.seq_id) == -1
    view = s.view("honest")
    assert (view.guard_replays, view.guard_violations, view.enabled) == (1, 0, True)
    assert s.answer([*PROMPT, *first, 1234]) != []
    starts = [event.n_cached for _, event in s.events if isinstance(event, Started)]
    assert starts[1] > 0  # the prompt was still there


def test_the_context_of_a_slot_is_as_large_as_without(served: Callable[..., Served]) -> None:
    assert served(every=1).engine.n_ctx_slot == served(every=0).engine.n_ctx_slot == 512


def test_a_plugin_that_changes_a_token_is_switched_off(served: Callable[..., Served]) -> None:
    s = served(plugin("changer", Changes, Guard.same_tokens()))
    tokens = s.answer(PROMPT)
    s.idle()
    view = s.view("changer")
    assert (view.state, view.enabled, view.guard_replays, view.guard_violations) == ("quarantined", False, 1, 1)
    assert view.quarantined is not None
    assert f"token 2 of request {s.events[-1][0]} was {tokens[2]}" in view.quarantined
    assert "it promises same-tokens" in view.quarantined


def test_it_works_while_the_engine_thread_runs(served: Callable[..., Served]) -> None:
    s = served(plugin("changer", Changes, Guard.same_tokens()))
    s.engine.submit(ask(PROMPT, n_predict=6, temperature=0.0))
    s.engine.start()
    import time

    end = time.monotonic() + 60
    while s.view("changer").state != "quarantined" and time.monotonic() < end:
        time.sleep(0.01)
    assert s.view("changer").state == "quarantined"
    assert s.engine.alive


def test_one_in_three(served: Callable[..., Served]) -> None:
    s = served(plugin("honest", Acts, Guard.same_tokens()), every=3)
    for i in range(7):
        s.answer([*PROMPT[:10], i + 1000], n_predict=2)
        s.idle()
    assert s.view("honest").guard_replays == 2


def test_what_cannot_be_replayed_is_counted(served: Callable[..., Served]) -> None:
    s = served(plugin("honest", Acts, Guard.same_tokens()))
    s.answer(PROMPT, temperature=0.9, seed=3)
    s.answer(PROMPT, repeat_penalty=1.3)
    assert s.idle() == 0
    assert s.shadow.skipped == {"sampled": 2}
    s.answer(PROMPT, ignore_eos=True)  # only the end is forbidden: still the best of the others
    assert s.idle() > 0
    assert s.view("honest").guard_replays == 1
    text = Metrics(s.engine).text().decode()
    assert 'llamamg:guard_replays_total{plugin="honest"} 1.0' in text
    assert 'llamamg:guard_skipped_total{reason="sampled"} 2.0' in text


def test_a_new_request_gets_shared_cells_back(served: Callable[..., Served]) -> None:
    s = served(plugin("honest", Acts, Guard.same_tokens()), kv_unified=True)
    s.answer(PROMPT)
    for _ in range(4):
        assert s.shadow.step()
    kv = s.engine.scheduler.kv
    assert kv.pos_max(s.shadow.seq_id) >= 0
    s.answer(PROMPT[:5])
    assert kv.pos_max(s.shadow.seq_id) == -1
    s.idle()
    assert s.view("honest").guard_replays == 2  # the interrupted one began again


def test_a_slot_of_its_own_is_kept_while_requests_run(served: Callable[..., Served]) -> None:
    s = served(plugin("honest", Acts, Guard.same_tokens()))
    s.answer(PROMPT)
    for _ in range(4):
        s.shadow.step()
    at = s.engine.scheduler.kv.pos_max(s.shadow.seq_id)
    s.answer(PROMPT[:5])
    assert s.engine.scheduler.kv.pos_max(s.shadow.seq_id) == at >= 0


def test_no_room_is_counted_and_harmless(served: Callable[..., Served]) -> None:
    s = served(plugin("honest", Acts, Guard.same_tokens()), kv_unified=True, n_ctx=256)
    s.answer(np.random.default_rng(1).integers(1000, 5000, 200).tolist(), n_predict=2)
    s.idle()
    assert s.shadow.skipped == {"no room": 1}
    assert s.engine.scheduler.kv.pos_max(s.shadow.seq_id) == -1
    assert len(s.answer(PROMPT[:5])) == 6


class Switches(Acts):
    """Wants a native switch, which a test's stand-in lets change the logits."""

    @hookimpl
    def native_switches(self) -> dict[str, int]:
        return {"stand-in": 1}


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> Callable[[Served], None]:
    """A native switch: while it is on, the model prefers token 1999 at every position of a replay."""

    def install(s: Served) -> None:
        state = {"stand-in": 1}
        read = replay_alone.read_logits

        def other(*args: Any) -> Any:
            logits = read(*args)
            if state.get("stand-in"):
                logits[:, 1999] = 1e4
            return logits

        def apply(wanted: Any) -> None:
            state.clear()
            state.update(wanted)

        monkeypatch.setattr(replay_alone, "read_logits", other)
        s.engine.plugins.apply_switches = apply
        collect = s.engine.runner.collect

        def sampled() -> Any:
            done = collect()
            for output in done.outputs if done is not None else ():
                if state.get("stand-in"):
                    output.tokens[0] = 1999
            return done

        s.engine.runner.collect = sampled  # type: ignore[method-assign]

    return install


def test_the_plugin_whose_switch_explains_it_is_accused(
    served: Callable[..., Served], stand_in: Callable[[Served], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    guard = Guard.same_tokens()
    monkeypatch.setattr("llamamg.loading._connect_switches", lambda *args: None)
    s = served(plugin("bystander", Acts, guard), plugin("switcher", Switches, guard))
    stand_in(s)
    assert s.answer(PROMPT) == [1999] * 6
    s.idle()
    assert s.view("switcher").state == "quarantined"
    assert s.view("bystander").state == "on"
    assert (s.view("bystander").guard_replays, s.view("bystander").guard_violations) == (1, 0)


@pytest.mark.parametrize(("top1", "state"), [(0.0, "on"), (0.99, "quarantined")])
def test_a_promised_share_is_judged_over_many_tokens(
    served: Callable[..., Served],
    stand_in: Callable[[Served], None],
    monkeypatch: pytest.MonkeyPatch,
    top1: float,
    state: str,
) -> None:
    monkeypatch.setattr("llamamg.loading._connect_switches", lambda *args: None)
    s = served(plugin("switcher", Switches, Guard.close(kl=1.0, top1=top1)))
    stand_in(s)
    s.answer(PROMPT, n_predict=4)
    s.idle()
    assert s.view("switcher").state == "on"  # four tokens say nothing about a share
    s.answer(PROMPT, n_predict=4)
    s.idle()
    assert s.view("switcher").state == state


def test_a_difference_near_no_plugin_is_only_reported(
    served: Callable[..., Served], monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    s = served()
    s.answer(PROMPT)
    read = replay_alone.read_logits

    def other(*args: Any) -> Any:
        logits = read(*args)
        logits[:, 1999] = 1e4
        return logits

    monkeypatch.setattr(replay_alone, "read_logits", other)
    s.idle()
    assert s.shadow.n_unexplained == 1
    assert "no plugin had acted" in caplog.text
