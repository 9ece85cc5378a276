"""Where prompts stop for snapshots, which are kept and which one is used: compared with llama-server's rules, told another way."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from llamamg.checkpoint import CheckpointPolicy
from llamamg.request import Request, SamplingParams
from llamamg.slot import Checkpoint, Slot
from llamamg.testing import FakeKV


def policy(*, n_max: int = 32, min_step: int = 8192, n_batch: int = 64, n_ubatch: int = 16, hybrid: bool = True) -> Any:
    return CheckpointPolicy(n_max, min_step, n_batch, n_ubatch, FakeKV(1, hybrid=hybrid))


def sequence(n_prompt: int, starts: tuple[int, ...] = (), slot: Slot | None = None) -> Any:
    request = Request(np.zeros(n_prompt, np.int32), SamplingParams(), user_starts=starts)
    return SimpleNamespace(request=request, slot=slot or Slot(0, 0), n_prompt=n_prompt)


def snapshot(n_tokens: int, request_id: int = 0) -> Checkpoint:
    return Checkpoint(
        n_tokens, n_tokens - 1, n_tokens - 1, request_id, np.arange(n_tokens, dtype=np.int32).view(np.uint8)
    )


def walk(rules: CheckpointPolicy, seq: Any, begin: int = 0, room: int | None = None) -> list[tuple[int, int, bool]]:
    """The chunks of a prompt as (begin, end, snapshot before it), making the snapshots."""
    chunks = []
    kv = rules.kv
    kv.held[0] = [0] * begin
    while begin < seq.n_prompt:
        end = rules.stop_at(seq, begin, min(begin + (room or rules.n_batch), seq.n_prompt))
        made = rules.wanted(seq, begin, end) and kv.pos_min(0) >= 0
        if made:
            rules.make(seq.slot, begin, seq.request.id)
        kv.held[0] = [0] * end
        chunks.append((begin, end, made))
        begin = end
    return chunks


def walk_like_llama_server(rules: CheckpointPolicy, seq: Any) -> list[tuple[int, int, bool]]:
    """The same from llama-server's procedure, token by token."""
    chunks, done, n = [], 0, seq.n_prompt
    starts, last_start = set(seq.request.user_starts), (seq.request.user_starts or (-1,))[-1]
    kept: list[int] = []
    while done < n:
        begin = done
        while done < n and done - begin < rules.n_batch:
            done += 1
            far = not kept or done > kept[-1] + rules.min_step
            if done in starts and (done == last_start or far):
                break
            if n - done in (min(rules.n_batch, 4 + rules.n_ubatch), min(rules.n_batch, 4)):
                break
        near_end = n < done + rules.n_ubatch
        wanted = done == n or begin in starts or near_end
        wanted = wanted and begin > 0
        wanted = wanted and (not kept or begin == last_start or near_end or begin > kept[-1] + rules.min_step)
        if wanted:
            kept = [*[k for k in kept if k != begin][-(rules.n_max - 1) :], begin]
        chunks.append((begin, done, wanted))
    return chunks


def test_a_prompt_stops_a_ubatch_and_four_tokens_before_its_end() -> None:
    chunks = walk(policy(n_batch=64, n_ubatch=16), sequence(200))
    assert [end for _, end, _ in chunks] == [64, 128, 180, 196, 200]
    assert [begin for begin, _, made in chunks if made] == [180, 196]


def test_a_prompt_of_a_plain_cache_never_stops() -> None:
    chunks = walk(policy(hybrid=False), sequence(200, (50, 150)))
    assert chunks == [(0, 64, False), (64, 128, False), (128, 192, False), (192, 200, False)]


def test_no_checkpoints_when_none_may_be_kept() -> None:
    assert [made for _, _, made in walk(policy(n_max=0), sequence(200))] == [False] * 4


def test_the_last_user_message_gets_a_snapshot_and_earlier_ones_when_far_enough() -> None:
    chunks = walk(policy(min_step=50), sequence(200, (30, 60, 100, 170)))
    made = [begin for begin, _, made in chunks if made]
    assert made == [30, 100, 170, 180, 196]


@pytest.mark.parametrize("seed", range(200))
def test_chunks_and_snapshots_are_llama_servers(seed: int) -> None:
    rng = random.Random(seed)
    n = rng.randrange(1, 300)
    rules = policy(
        min_step=rng.choice((0, 8, 40, 8192)), n_batch=rng.choice((8, 32, 64)), n_ubatch=rng.choice((4, 8, 16, 64))
    )
    starts = tuple(sorted(rng.sample(range(n), k=min(n, rng.randrange(0, 5)))))
    assert walk(rules, sequence(n, starts)) == walk_like_llama_server(rules, sequence(n, starts))


# -- which are kept


def make(rules: CheckpointPolicy, slot: Slot, n_tokens: int, request_id: int) -> None:
    rules.kv.held[0] = [0] * n_tokens
    rules.make(slot, n_tokens, request_id)


def test_a_full_list_loses_its_oldest() -> None:
    rules, slot = policy(n_max=3, min_step=0), Slot(0, 0)
    for n in (10, 20, 30, 40, 50):
        make(rules, slot, n, 1)
    assert [c.n_tokens for c in slot.checkpoints] == [30, 40, 50]


def test_one_at_most() -> None:
    rules, slot = policy(n_max=1), Slot(0, 0)
    for n in (10, 20):
        make(rules, slot, n, 1)
    assert [c.n_tokens for c in slot.checkpoints] == [20]


def test_a_snapshot_at_the_same_place_replaces_the_older_one() -> None:
    rules, slot = policy(), Slot(0, 0)
    make(rules, slot, 10, 1)
    make(rules, slot, 20, 1)
    make(rules, slot, 10, 2)
    assert [(c.n_tokens, c.request_id) for c in slot.checkpoints] == [(20, 1), (10, 2)]


def test_near_full_a_close_one_of_an_older_request_goes_first_and_only_as_many_as_needed() -> None:
    rules, slot = policy(n_max=5, min_step=15), Slot(0, 0)
    slot.checkpoints = [snapshot(n, request_id=1) for n in (10, 20, 40, 50)]
    make(rules, slot, 100, 2)
    assert [c.n_tokens for c in slot.checkpoints] == [10, 40, 50, 100]


def test_those_of_the_same_request_are_not_thinned() -> None:
    rules, slot = policy(n_max=5, min_step=15), Slot(0, 0)
    slot.checkpoints = [snapshot(n, request_id=2) for n in (10, 20, 40, 50)]
    make(rules, slot, 100, 2)
    assert [c.n_tokens for c in slot.checkpoints] == [10, 20, 40, 50, 100]


@pytest.mark.parametrize("seed", range(100))
def test_keeping_is_llama_servers(seed: int) -> None:
    rng = random.Random(seed)
    n_max, min_step = rng.randrange(1, 6), rng.choice((0, 5, 20))
    rules, slot = policy(n_max=n_max, min_step=min_step), Slot(0, 0)
    kept: list[tuple[int, int]] = []
    for _ in range(30):
        n, request = rng.randrange(1, 80), rng.randrange(3)
        last, i = -1, 0
        while len(kept) + 1 >= n_max and i < len(kept):
            if kept[i][1] != request and last >= 0 and kept[i][0] <= last + min_step:
                kept.pop(i)
            else:
                last = kept[i][0]
                i += 1
        while len(kept) >= n_max:
            kept.pop(0)
        kept = [k for k in kept if k[0] != n] + [(n, request)]
        make(rules, slot, n, request)
        assert [(c.n_tokens, c.request_id) for c in slot.checkpoints] == kept


def test_an_empty_slot_gives_no_snapshot() -> None:
    rules, slot = policy(), Slot(0, 0)
    make(rules, slot, 0, 1)
    assert slot.checkpoints == []


# -- which one is used


def slot_with(rules: CheckpointPolicy, n_held: int, *n_tokens: int) -> Slot:
    slot = Slot(0, 0, checkpoints=[snapshot(n) for n in n_tokens])
    rules.kv.held[0] = list(range(n_held))
    return slot


def test_a_plain_cache_continues_anywhere() -> None:
    rules = policy(hybrid=False)
    assert rules.rewind(slot_with(rules, 100), 37, 200) == 37


def test_a_hybrid_that_only_grows_goes_on_from_where_it_is() -> None:
    rules = policy()
    slot = slot_with(rules, 100, 90)
    assert rules.rewind(slot, 100, 200) == 100
    assert rules.kv.pos_max(0) == 99


def test_a_hybrid_goes_back_to_the_last_snapshot_before_the_difference() -> None:
    rules = policy()
    slot = slot_with(rules, 100, 30, 60, 90)
    assert rules.rewind(slot, 70, 200) == 60
    assert rules.kv.pos_max(0) == 59
    assert [c.n_tokens for c in slot.checkpoints] == [30, 60]


def test_the_same_prompt_again_leaves_a_token_to_compute() -> None:
    rules = policy()
    slot = slot_with(rules, 101, 80, 100)  # one generated token behind a prompt of 100
    assert rules.rewind(slot, 100, 100) < 100


def test_without_a_usable_snapshot_all_is_computed_anew() -> None:
    rules = policy()
    slot = slot_with(rules, 100, 80, 90)
    assert rules.rewind(slot, 20, 200) == 0
    assert slot.checkpoints == []


def test_a_snapshot_that_holds_the_first_differing_token_is_dropped() -> None:
    rules = policy()
    slot = slot_with(rules, 100, 30, 61)
    assert rules.rewind(slot, 60, 200) == 30
    assert [c.n_tokens for c in slot.checkpoints] == [30]
    fresh = slot_with(rules, 1, 1)
    assert rules.rewind(fresh, 0, 50) == 0
    assert fresh.checkpoints == []


def test_a_snapshot_that_the_library_refuses_is_passed_over() -> None:
    rules = policy()
    slot = slot_with(rules, 100, 30, 60)
    refused: list[int] = []

    def restore(seq_id: int, data: Any, flags: int = 1) -> bool:
        refused.append(len(data))
        return len(refused) > 1

    rules.kv.restore = restore
    assert rules.rewind(slot, 70, 200) == 30
    assert len(refused) == 2


def test_small_chunks_of_a_budget_add_no_snapshots_at_the_end() -> None:
    """A plugin's budget of 3 tokens cuts the last ubatch into six steps; the snapshots are those of whole batches."""
    from llamamg.plugins.testing import on, plugin
    from llamamg.testing import ask, fake_engine, run

    def places(budget: int | None) -> list[int]:
        plugins = on(plugin("budget", {"prefill_budget": lambda self: budget}))
        engine, _, _ = fake_engine(2, hybrid=True, plugins=plugins, n_batch=64, n_ubatch=16)
        engine.submit(ask("x" * 200, n_predict=1, id_slot=0))
        run(engine)
        return [c.n_tokens for c in engine.slots[0].checkpoints]

    assert places(None) == [180, 196]
    assert [places(budget) for budget in (1, 3, 4, 16)] == [[180, 196]] * 4


def test_a_small_batch_makes_them_as_llama_server_does() -> None:
    """Where no plugin limits anything, each batch within a ubatch of the end makes one."""
    from llamamg.testing import ask, fake_engine, run

    engine, _, _ = fake_engine(2, hybrid=True, n_batch=8, n_ubatch=16)
    engine.submit(ask("x" * 100, n_predict=1, id_slot=0))
    run(engine)
    assert len(engine.slots[0].checkpoints) > 2


@pytest.mark.parametrize("budget", [None, 1, 3, 16])
@pytest.mark.parametrize("n_prompt", [2, 20, 90, 200])
def test_what_comes_before_a_snapshot_is_waited_for(n_prompt: int, budget: int | None) -> None:
    """With small batches too; and a batch far from the end is not, so that the next one can be handed over behind it."""
    rules = policy()
    seq = sequence(n_prompt, starts=(n_prompt // 3,))
    begin, is_cut, waited = 0, False, []
    while begin < n_prompt:
        room = budget or 16
        end = rules.stop_at(seq, begin, min(begin + room, n_prompt))
        ends_early = budget is not None and end == begin + room < n_prompt
        if begin and rules.wanted(seq, begin, end, is_cut=is_cut or ends_early):
            assert waited[-1], f"the snapshot at {begin} would wait"
            rules.make(seq.slot, begin, seq.request.id)
        rules.kv.held[0] = [0] * end
        waited.append(rules.may_follow(seq, end, is_cut=ends_early))
        begin, is_cut = end, ends_early
    assert not waited[-1], "nothing follows the last batch"
    if n_prompt == 200:
        assert waited.count(True) < len(waited) / 2 + 1


def test_nothing_is_waited_for_where_no_snapshot_is_needed() -> None:
    assert not policy(hybrid=False).may_follow(sequence(20), 16, is_cut=False)
