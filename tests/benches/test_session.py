"""Blocks: the same work each time, from the same state."""

from __future__ import annotations

import pytest

from benches.errors import BenchError
from benches.loads import LOADS, Sizes
from benches.session import Block, RanOut, Session, Window
from llamamg.plugins import testing as kit

from .fake_clock import World, engine_with

SIZES = Sizes(depth=24, n_tokens=24, n_prompt=200)


@pytest.mark.parametrize("hybrid", [False, True])
@pytest.mark.parametrize("load", list(LOADS))
def test_every_block_does_the_same(load: str, hybrid: bool) -> None:
    world = World(1)
    session = Session(engine_with("same", world, LOADS[load].n_slots, hybrid), LOADS[load], SIZES, world.clock)
    reference = session.prepare()
    runner = session.engine.runner
    shapes = []
    for _ in range(3):
        runner.batches.clear()  # type: ignore[attr-defined]
        block = session.block()
        shapes.append(list(runner.batches))  # type: ignore[attr-defined]
        assert block.tokens == reference.tokens
        assert all(n > 0 for n in block.metrics.values())
    assert shapes[0] == shapes[1] == shapes[2], "rows, positions and sizes"
    assert not any(slot.busy for slot in session.engine.slots)


def test_a_block_counts_what_the_clock_says() -> None:
    world = World(0)
    session = Session(engine_with("same", world), LOADS["solo"], SIZES, world.clock)
    session.prepare()
    block = session.block()
    assert block.metrics["decode_tps"] * block.metrics["wall_s"] == pytest.approx(24)
    assert block.metrics["itl_max_ms"] >= block.metrics["itl_p99_ms"] >= block.metrics["itl_p50_ms"]
    assert block.effects == {"same": 24}, "steps outside the window are not counted"


def test_the_resident_prompt_is_not_computed_again() -> None:
    world = World(0)
    session = Session(engine_with("same", world, 5), LOADS["five"], SIZES, world.clock)
    session.prepare()
    assert session.block().n_recomputed == 5, "one token for each session"


def test_moved_sequences_go_back_home() -> None:
    moves = kit.plugin("moves", {"arrange_slots": lambda self, state: [(4, 1)] if _gap(state) else None})
    plugins = kit.unconfigured(moves, enable=("moves",))
    config = plugins.configure(kit.config(5), [])
    from llamamg.testing import fake_engine

    engine, runner, _ = fake_engine(5, plugins=plugins, config=config)
    session = Session(engine, LOADS["five"], SIZES)
    session.prepare()
    runner.batches.clear()
    first = session.block()
    first_shapes = list(runner.batches)
    assert any(slot.seq_id != slot.id for slot in engine.slots), "it moved"
    runner.batches.clear()
    assert session.block().tokens == first.tokens
    assert runner.batches == first_shapes
    assert engine.stats.n_moves > 1


def _gap(state: object) -> bool:
    busy = {slot.seq_id for slot in state.slots if slot.busy}  # type: ignore[attr-defined]
    return busy == {0, 2, 4}


def test_a_load_deeper_than_the_context_says_which_context_it_needs() -> None:
    world = World(0)
    with pytest.raises(BenchError, match=r"needs \d+ tokens in each slot and a slot has 512: use -c \d+"):
        Session(engine_with("same", world), LOADS["solo"], Sizes(depth=500), world.clock)


def test_a_load_with_more_sessions_than_slots_says_so() -> None:
    world = World(0)
    with pytest.raises(BenchError, match="use -np 5"):
        Session(engine_with("same", world, 2), LOADS["five"], SIZES, world.clock)


@pytest.mark.parametrize("error", [None, RanOut, BenchError])
def test_plugins_have_learned_from_a_block_before_the_reference(error: type[BenchError] | None) -> None:
    """Also where a session runs out of tokens meanwhile, which is an error of any other block; other errors stay errors."""
    world = World(1)
    session = Session(engine_with("same", world, LOADS["mixed"].n_slots), LOADS["mixed"], SIZES, world.clock)
    made: list[bool] = []
    one, mixed = session.block, session._mixed

    def block(with_others: bool = False) -> Block:
        made.append(with_others)
        return one(with_others)

    def runs_out(n_probs: int) -> Window:
        window = mixed(n_probs)
        if error is not None and made == [False]:
            raise error("a plugin is in the way")
        return window

    session.block, session._mixed = block, runs_out  # type: ignore[method-assign]
    if error is BenchError:
        with pytest.raises(BenchError, match="in the way"):
            session.prepare()
        return
    session.prepare()
    assert made == [False, True]
