"""seq-compact weighs passes by the times of the server's own steps, and moves only where one pass is faster."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from compact_runs import asked, n_ubatches, off, seconds, slots_of, two_of_five_end

from llamamg import Batch, Row, Slot, StepState
from llamamg.plugins import PluginSet
from llamamg.plugins.testing import on
from llamamg.request import Finished
from llamamg.testing import ask, fake_engine, run
from llamamg_plugins.pass_times import N_SHAPES, PassTimes, runs_of
from llamamg_plugins.seq_compact import PATIENCE, SeqCompact


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
