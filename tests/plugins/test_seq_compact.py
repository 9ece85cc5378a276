"""seq-compact: fewest moves, good places, one ubatch per step in the engine, and the same answers."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from compact_runs import ALWAYS, asked, n_ubatches, off, slots_of, two_of_five_end

from llamamg import StepState, hookimpl
from llamamg.plugins import PluginError, plugin_switches
from llamamg.plugins.testing import config as full_config
from llamamg.plugins.testing import on, unconfigured
from llamamg.request import Failed, Finished
from llamamg.testing import ask, fake_engine, run
from llamamg_plugins.seq_compact import SeqCompact, compact


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
