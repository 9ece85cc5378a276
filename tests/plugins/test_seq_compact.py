"""seq-compact: fewest moves, good places, one ubatch per step in the engine, and the same answers."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from llamamg import Batch, Request, Row, Slot, StepState, hookimpl
from llamamg.config import PluginsConfig
from llamamg.plugins import PluginError, PluginSet, plugin_switches
from llamamg.plugins.testing import config as full_config
from llamamg.plugins.testing import on, unconfigured
from llamamg.request import Failed, Finished
from llamamg.testing import ask, fake_engine, run
from llamamg_plugins.pass_times import N_SHAPES, PassTimes, runs_of
from llamamg_plugins.seq_compact import PATIENCE, SeqCompact, compact


def test_the_issues_example() -> None:
    assert compact([0, 2, 4], range(5)) == [(4, 1)]


@pytest.mark.parametrize("n_ids", range(1, 8))
def test_moves_are_legal_leave_no_gap_and_are_as_few_as_possible(n_ids: int) -> None:
    for n in range(n_ids + 1):
        for busy in itertools.combinations(range(n_ids), n):
            after = set(busy)
            moves = compact(busy, range(n_ids))
            for source, target in moves:
                assert source in after
                assert target not in after
                after = after - {source} | {target}
            windows = [set(range(first, first + n)) for first in range(n_ids - n + 1)]
            assert after in windows
            assert len(moves) == min(len(set(busy) - window) for window in windows)
            fewest = [w for w in windows if len(set(busy) - w) == len(moves)]
            assert sorted(after) == min(sorted(w) for w in fewest)


@pytest.mark.parametrize("n_ids", range(1, 7))
def test_nobody_goes_where_something_is_kept(n_ids: int) -> None:
    for n in range(n_ids + 1):
        for busy in itertools.combinations(range(n_ids), n):
            idle = sorted(set(range(n_ids)) - set(busy))
            for n_kept in range(len(idle) + 1):
                for kept in itertools.combinations(idle, n_kept):
                    moves = compact(busy, range(n_ids), kept)
                    windows = [set(range(first, first + n)) for first in range(n_ids - n + 1)]
                    open_ = [window for window in windows if not window & set(kept)]
                    after = (set(busy) - {a for a, _ in moves}) | {b for _, b in moves}
                    assert after in open_ if open_ else not moves
                    assert len(moves) == min((len(set(busy) - window) for window in open_), default=0)


def test_a_slot_that_stays_is_left_where_it_is() -> None:
    slots = slots_of("x.x..")
    slots[1].stays = True
    assert SeqCompact(always=True).arrange_slots(StepState(64, 16, slots=slots)) == [(0, 3)]
    slots[3].stays = True
    assert SeqCompact(always=True).arrange_slots(StepState(64, 16, slots=slots)) is None


def slots_of(busy: str, used: tuple[float, ...] | None = None) -> list[Slot]:
    """ "x.x": busy, idle, busy."""
    slots = [Slot(i, i, t_last_used=used[i] if used else -1.0) for i in range(len(busy))]
    for slot, mark in zip(slots, busy, strict=True):
        slot.sequence = object() if mark == "x" else None  # type: ignore[assignment]
    return slots


def asked(text: str, **fields: Any) -> Request:
    return ask(text, **fields)


def test_moves_are_asked_for_and_counted() -> None:
    plugin = SeqCompact(always=True)
    assert plugin.arrange_slots(StepState(64, 16, slots=slots_of("x.x.x"))) == [(4, 1)]
    assert plugin.arrange_slots(StepState(64, 16, slots=slots_of("xxx.."))) is None
    assert plugin.arrange_slots(StepState(64, 16, slots=slots_of("....."))) is None
    assert plugin.effect == 1


def test_slots_are_taken_by_where_they_lie_now_not_by_their_number() -> None:
    slots = slots_of("x.x")
    slots[1].seq_id, slots[2].seq_id = 2, 1
    assert SeqCompact().arrange_slots(StepState(64, 16, slots=slots)) is None


@pytest.mark.parametrize(
    ("busy", "used", "chosen"),
    [
        ("..x..", (9.0, 5.0, 0.0, 4.0, 1.0), 3),  # beside the busy one, the longer unused
        ("..x..", (9.0, 4.0, 0.0, 5.0, 1.0), 1),
        ("x.x..", (0.0, 9.0, 0.0, 1.0, 0.0), 3),
        ("x....", (0.0, 9.0, 1.0, 1.0, 1.0), 1),  # the only neighbour
        (".....", (4.0, 3.0, 2.0, 1.0, 0.0), None),  # nobody to be beside
        ("xxxxx", (0.0,) * 5, None),
    ],
)
def test_a_new_prompt_goes_beside_the_busy_slots(busy: str, used: tuple[float, ...], chosen: int | None) -> None:
    slot = SeqCompact().select_slot(asked("something new"), slots_of(busy, used))
    assert (slot.id if slot else None) == chosen


@pytest.mark.parametrize(("n_common", "is_left_alone"), [(10, False), (11, True), (100, True)])
def test_a_prompt_with_a_useful_prefix_is_left_to_the_default(n_common: int, is_left_alone: bool) -> None:
    slots = slots_of("x...")
    slots[3].tokens.extend(np.array([7] * n_common + [8] * 50, np.int32))
    slot = SeqCompact().select_slot(ask([7] * 100), slots)
    assert (slot is None) == is_left_alone


def test_a_prefix_does_not_count_where_the_request_wants_no_cache() -> None:
    slots = slots_of("x...")
    slots[3].tokens.extend(np.array([7] * 100, np.int32))
    slot = SeqCompact().select_slot(ask([7] * 100, cache_prompt=False), slots)
    assert slot is slots[1]


def test_a_prefix_in_a_busy_slot_does_not_count() -> None:
    slots = slots_of("x...")
    slots[0].tokens.extend(np.array([7] * 100, np.int32))
    assert SeqCompact().select_slot(ask([7] * 100), slots) is slots[1]


def test_the_threshold_is_the_servers() -> None:
    from dataclasses import replace

    config = full_config()
    config = replace(config, generation=replace(config.generation, slot_prompt_similarity=0.5))
    plugins = unconfigured(SeqCompact, enable=("seq-compact",))
    plugins.configure(config)
    slots = slots_of("x...")
    slots[3].tokens.extend(np.array([7] * 40, np.int32))
    (select_slot,) = plugins.hooks.select_slot
    assert select_slot(ask([7] * 100), slots) is slots[1]


@pytest.mark.parametrize(
    ("context", "reason"),
    [
        ({"n_parallel": 1}, "there is one slot"),
        ({"n_parallel": -1}, "the KV cache is unified"),
        ({"n_parallel": 4, "kv_unified": True}, "the KV cache is unified"),
        ({"n_parallel": 4}, None),
        ({"n_parallel": -1, "kv_unified": False}, None),
    ],
)
def test_where_it_applies(context: dict[str, Any], reason: str | None) -> None:
    plugins = unconfigured(shipped=(SeqCompact,))
    plugins.configure(full_config(**context))
    view = plugins.views()[0]
    assert view.enabled == (reason is None)
    assert (reason or "") in (view.reason or "")
    if reason is not None:
        with pytest.raises(PluginError, match=reason):
            unconfigured(SeqCompact, enable=("seq-compact",)).configure(full_config(**context))


def test_the_forks_flags_are_declared() -> None:
    flags = {(s.flag, s.enable, s.env) for s in plugin_switches() if s.plugin == "seq-compact"}
    env = "LLAMA_ARG_SEQ_COMPACT"
    assert flags == {("--seq-compact", True, env), ("--no-seq-compact", False, env)}


# ---- in the engine


def n_ubatches(seq_ids: list[int]) -> int:
    """Passes libllama makes for one token of each: it starts anew where the next id is not the last one plus one."""
    return sum(i == 0 or id_ != seq_ids[i - 1] + 1 for i, id_ in enumerate(seq_ids))


def off() -> PluginSet:
    plugins = PluginSet.discover(PluginsConfig(none=True))
    plugins.configure(full_config())
    return plugins


ALWAYS = {"options": {"seq-compact": {"always": "true"}}}


def seconds(joint: float) -> Callable[[Any], float]:
    """A machine on which a pass of one takes 10 ms, and each more in the same pass `joint` times that."""

    def of(batch: Any) -> float:
        runs = runs_of(row.sequence.slot.seq_id for row in batch.rows)
        return sum(0.01 * (1 + joint * (n - 1)) for n in runs)

    return of


def two_of_five_end(
    plugins: PluginSet, elapsed_s: Callable[[Any], float] | None = None, **options: Any
) -> tuple[list[int], list[str], list[int]]:
    """Passes per step once the sequences in slots 1 and 3 are over; all texts; the slots that clients saw."""
    engine, runner, events = fake_engine(5, plugins=plugins, n_batch=64, **options)
    if elapsed_s is not None:
        runner.elapsed_s = elapsed_s
    requests = [ask(f"prompt {i}", n_predict=6 if i in (1, 3) else 30, id_slot=i) for i in range(5)]
    for request in requests:
        engine.submit(request)
    while sum(isinstance(event, Finished) for _, event in events) < 2:
        engine.step()
    begin = len(runner.batches)
    for _ in range(10):
        engine.step()
    passes = [n_ubatches([row[0] for row in batch]) for batch in runner.batches[begin:]]
    run(engine)
    assert not any(isinstance(event, Failed) for _, event in events)
    finished = {id_: event for id_, event in events if isinstance(event, Finished)}
    return passes, [finished[r.id].text for r in requests], [finished[r.id].id_slot for r in requests]


@pytest.mark.parametrize("hybrid", [False, True])
def test_seq_compact_off_equals_on_and_steps_do_not_split(hybrid: bool) -> None:
    plugins = on(SeqCompact, **ALWAYS)
    passes_off, texts_off, slots_off = two_of_five_end(off(), hybrid=hybrid)
    passes_on, texts_on, slots_on = two_of_five_end(plugins, hybrid=hybrid)
    assert set(passes_off) == {3}
    assert set(passes_on) == {1}
    assert texts_on == texts_off
    assert slots_on == slots_off == [0, 1, 2, 3, 4]
    assert plugins.views()[0].effect >= 1


def test_toggled_on_later_it_repairs_at_the_next_change() -> None:
    plugins = on(SeqCompact, **ALWAYS)
    plugins.toggle("seq-compact", False)
    engine, runner, events = fake_engine(5, plugins=plugins)
    for i in range(5):
        engine.submit(ask(f"prompt {i}", n_predict={1: 4, 3: 4, 4: 20}.get(i, 40), id_slot=i))
    while sum(isinstance(event, Finished) for _, event in events) < 2:
        engine.step()
    engine.step()
    assert [row[0] for row in runner.batches[-1]] == [0, 2, 4]
    engine.call(lambda _: plugins.toggle("seq-compact", True))
    while sum(isinstance(event, Finished) for _, event in events) < 3:
        engine.step()
    engine.step()
    assert n_ubatches([row[0] for row in runner.batches[-1]]) == 1


@pytest.mark.parametrize("hook", ["arrange_slots", "select_slot"])
def test_seq_compact_raising_costs_no_request(hook: str) -> None:
    def boom(self: Any) -> Any:
        raise RuntimeError("boom")

    plugins = on(type("Broken", (SeqCompact,), {hook: hookimpl(boom)}))
    engine, _, events = fake_engine(3, plugins=plugins)
    for i in range(5):
        engine.submit(ask(f"prompt {i}", n_predict=5))
    run(engine)
    assert sum(isinstance(event, Finished) for _, event in events) == 5
    assert not any(isinstance(event, Failed) for _, event in events)
    assert plugins.views()[0].quarantined == f"{hook}: RuntimeError: boom"


# ---- only where it gains


@pytest.mark.parametrize("hybrid", [False, True])
def test_where_joint_passes_are_faster_it_moves_after_a_few_steps(hybrid: bool) -> None:
    plugins = on(SeqCompact)
    passes, texts, _ = two_of_five_end(plugins, seconds(joint=0.1), hybrid=hybrid)
    assert passes == [3] * 3 + [1] * 7
    assert texts == two_of_five_end(off(), hybrid=hybrid)[1]
    assert plugins.views()[0].effect == 1


@pytest.mark.parametrize("joint", [1.0, 1.3])
def test_where_they_are_not_batches_are_those_without_it(joint: float) -> None:
    def batches(plugins: PluginSet) -> Any:
        engine, runner, _ = fake_engine(5, plugins=plugins, n_batch=64)
        runner.elapsed_s = seconds(joint)
        for i in range(5):
            engine.submit(ask(f"prompt {i}", n_predict={0: 50, 2: 40, 4: 40}.get(i, 6), id_slot=i))
        run(engine)
        return runner.batches

    plugins = on(SeqCompact)
    assert batches(plugins) == batches(off())
    assert plugins.views()[0].effect == 0


def test_what_was_learned_decides_the_next_gap_at_once() -> None:
    for joint, n_passes in ((0.1, 1), (1.3, 3)):
        engine, runner, events = fake_engine(5, plugins=on(SeqCompact), n_batch=64)
        runner.elapsed_s = seconds(joint)
        for n_before in (0, 5):
            requests = [ask(f"{n_before} {i}", n_predict=6 if i in (1, 3) else 30, id_slot=i) for i in range(5)]
            for request in requests:
                engine.submit(request)
            while sum(isinstance(event, Finished) for _, event in events) < n_before + 2:
                engine.step()
            begin = len(runner.batches)
            run(engine)
        assert n_ubatches([row[0] for row in runner.batches[begin]]) == n_passes


def test_it_is_tried_where_times_never_come() -> None:
    """A prompt in every batch, or drafts: nothing can be compared."""
    plugin, state = SeqCompact(), StepState(64, 16, slots=slots_of("x.x"))
    assert [plugin.arrange_slots(state) for _ in range(PATIENCE)] == [[]] * PATIENCE
    assert plugin.arrange_slots(state) == [(2, 1)]
    assert plugin.arrange_slots(state) == [], "the next gap waits anew"
    plugin.batch_done(Batch([Row(None, [1, 2], 9, 2)]), 0.01)  # type: ignore[arg-type]
    assert plugin.arrange_slots(state) == [(2, 1)], "where drafts are verified there is nothing to wait for"


def test_a_step_that_copies_cells_is_not_learned_from() -> None:
    engine, runner, _ = fake_engine(5, plugins=on(SeqCompact), n_batch=64)
    moves: list[int] = []

    def slow_after_a_move(batch: Any) -> float:
        moves.append(engine.stats.n_moves)
        return 9.0 if len(moves) > 1 and moves[-1] > moves[-2] else seconds(0.1)(batch)

    runner.elapsed_s = slow_after_a_move
    for i in range(5):
        engine.submit(ask(f"prompt {i}", n_predict={0: 60, 1: 6, 2: 60, 3: 6, 4: 60}[i], id_slot=i))
    run(engine)
    (plugin,) = (function.__self__ for function in engine.plugins.hooks.arrange_slots)
    assert engine.stats.n_moves == 1
    assert plugin._times.is_worth((1, 1, 1), 50) is True


def rows_of(ids: list[int], is_prompt: bool = False) -> list[Row]:
    slots = [Slot(i, i) for i in ids]
    return [Row(SimpleNamespace(slot=slot), [1], 9, 1, is_prompt=is_prompt) for slot in slots]  # type: ignore[arg-type]


@pytest.mark.parametrize("which_first", ["the prompt", "the step", "neither"])
def test_a_step_beside_another_contexts_prompt_is_not_learned_from(which_first: str) -> None:
    plugin = SeqCompact()
    prompt = Batch(rows_of([7], is_prompt=True), group=1)
    for _ in range(3):
        step = Batch(rows_of([0, 1]), group=0)
        for batch in (prompt, step) if which_first == "the prompt" else (step, prompt):
            plugin.batch_submitted(batch)
            if which_first == "neither":
                plugin.batch_done(batch, 0.01)
        if which_first != "neither":
            plugin.batch_done(prompt, 9.0)
            plugin.batch_done(step, 9.0)
    assert plugin._times.is_known((2,), 9) == (which_first == "neither")


def test_a_prompt_that_failed_disturbs_no_step_after_it() -> None:
    plugin = SeqCompact()
    plugin.batch_submitted(prompt := Batch(rows_of([7], is_prompt=True), group=1))
    plugin.batch_failed(prompt)
    for _ in range(3):
        plugin.batch_submitted(step := Batch(rows_of([0, 1]), group=0))
        plugin.batch_done(step, 0.01)
    assert plugin._times.is_known((2,), 9)


def test_a_new_prompt_goes_where_the_engine_puts_it_where_nothing_is_gained() -> None:
    plugin = SeqCompact()
    for _ in range(3):
        plugin._times.add((1,), 10, 0.010)
        plugin._times.add((2,), 10, 0.021)
    assert plugin.select_slot(asked("something new"), slots_of("..x..")) is None
    for _ in range(8):
        plugin._times.add((2,), 10, 0.012)
    assert plugin.select_slot(asked("something new"), slots_of("..x..")) is not None


@pytest.mark.parametrize(
    ("ids", "runs"), [([], ()), ([3], (1,)), ([0, 1, 2], (3,)), ([0, 2, 3, 7], (1, 2, 1)), ([2, 1, 0], (1, 1, 1))]
)
def test_passes_of_a_step(ids: list[int], runs: tuple[int, ...]) -> None:
    assert runs_of(ids) == runs
    assert n_ubatches(ids) == len(runs)


def test_times_that_were_not_measured_lie_between_those_that_were() -> None:
    times = PassTimes()
    assert times.is_worth((1, 1), 0) is None
    for _ in range(3):
        times.add((1, 1, 1), 0, 0.030)  # 10 ms each
    assert times.is_worth((1, 1), 0) is None, "no joint pass was ever seen"
    assert times.is_known((1, 1, 1), 0)
    assert not times.is_known((1, 1, 1), 100_000)
    for _ in range(3):
        times.add((5,), 0, 0.030)
    assert times.is_worth((1, 1), 0) is True  # 15 instead of 20 ms
    assert times.is_worth((1, 2), 0) is True  # 20 instead of 25
    assert times.is_worth((1, 1, 1, 1, 1, 1), 0) is True  # on the same line
    for _ in range(8):
        times.add((5,), 0, 0.049)
    assert times.is_worth((1, 1), 0) is False, "less than 5 % are not worth it"


def test_shapes_seen_longest_ago_are_forgotten() -> None:
    """Each comparison looks at all of them, in every step while a gap stays."""
    times = PassTimes()
    shapes = [(1,), (2,), *((1, n) for n in range(2, N_SHAPES))]
    for shape in [*shapes, (1,)]:
        for _ in range(3):
            times.add(shape, 0, 0.01)
    assert times.is_known((1,), 0)
    assert times.is_known((2,), 0)
    times.add((9, 9), 0, 0.01)
    assert not times.is_known((2,), 0)
    assert times.is_known((1,), 0)
    assert times.is_known((1, N_SHAPES - 1), 0)


def test_one_slow_step_decides_nothing() -> None:
    times = PassTimes()
    for elapsed in (0.010, 0.010, 9.0):
        times.add((1,), 0, elapsed)
    for elapsed in (0.011, 7.0, 0.011):
        times.add((2,), 0, elapsed)
    assert times.is_worth((1, 1), 0) is True


def test_times_at_another_depth_count_until_there_are_some_at_this_one() -> None:
    times = PassTimes()
    for _ in range(3):
        times.add((1,), 100_000, 0.010)
        times.add((2,), 100_000, 0.030)
    assert times.is_worth((1, 1), 50) is False
    for _ in range(3):
        times.add((1,), 50, 0.010)
        times.add((2,), 50, 0.011)
    assert times.is_worth((1, 1), 50) is True
    assert times.is_worth((1, 1), 100_000) is False
    assert times.is_worth((1, 1), 90_000) is False
    assert times.is_worth((1, 1), 4000) is True
