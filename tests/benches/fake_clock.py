"""An engine whose steps take the time that real ones took, on a clock that only moves with them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from llamamg.batch import Batch
from llamamg.engine import Engine
from llamamg.guard import Guard
from llamamg.plugins import testing as kit
from llamamg.request import TokenProb
from llamamg.runner import Output
from llamamg.testing import FakeRunner, fake_engine

STEP_MS = json.loads(Path(__file__).with_name("step_times.json").read_text())["step_ms"]


class World:
    """The clock, the recorded times it walks through, and what a plugin of a test does to the model."""

    def __init__(self, seed: int) -> None:
        self.now_s = 0.0
        self.at = int(np.random.default_rng(seed).integers(len(STEP_MS)))  # in order: noise comes in waves
        self.last_s = 0.0
        self.flips = False
        self.margin = 3.0  # nats, of every token above `other`
        self.other = ord("x")  # what the model would have said else

    def clock(self) -> float:
        return self.now_s

    def step(self) -> None:
        self.last_s = STEP_MS[self.at % len(STEP_MS)] / 1e3
        self.at += 1
        self.now_s += self.last_s


class WorldRunner(FakeRunner):
    """Takes recorded time; answers 'x' where a plugin asked for it."""

    world: World

    def submit(self, batch: Batch) -> None:
        super().submit(batch)
        self.world.step()

    def _output(self, row: Any) -> Output:
        output = super()._output(row)
        if self.world.flips and row.pos0 % 8 == 0:
            output.tokens[0] = ord("x")
        if row.sequence.sampler.params.n_probs:
            token, margin = output.tokens[0], self.world.margin
            output.probs = [TokenProb(token, -0.1, ((token, -0.1), (self.world.other, -0.1 - margin)))]
        return output


def plugins_of(world: World) -> dict[str, type[Any]]:
    """The plugins that the comparison has to see through."""

    def count(self: Any, batch: Batch) -> None:
        self.effect += 1

    def slow(self: Any, batch: Batch, elapsed_s: float) -> None:
        self.effect += 1
        world.now_s += 0.05 * world.last_s

    def flip(self: Any, batch: Batch) -> None:
        self.effect += 1
        world.flips = True

    def unflip(self: Any, batch: Batch, elapsed_s: float) -> None:
        world.flips = False

    def flip_quietly(self: Any, batch: Batch) -> None:
        world.flips = True

    def ignore(self: Any, batch: Batch) -> None:
        pass

    def fail(self: Any, batch: Batch) -> None:
        raise ArithmeticError("on purpose")

    tokens = Guard.same_tokens()
    return {
        "same": kit.plugin("same", {"batch_submitted": count}, guard=tokens),
        "slow": kit.plugin("slow", {"batch_done": slow}, guard=tokens),
        "flips": kit.plugin("flips", {"batch_submitted": flip, "batch_done": unflip}, guard=tokens),
        "quiet": kit.plugin("quiet", {"batch_submitted": flip_quietly, "batch_done": unflip}, guard=tokens),
        "nothing": kit.plugin("nothing", {"batch_submitted": ignore}, guard=tokens),
        "fails": kit.plugin("fails", {"batch_submitted": fail}, guard=tokens),
    }


def engine_with(name: str, world: World, n_slots: int = 1, hybrid: bool = False, **declaration: Any) -> Engine:
    """A fake engine with one of the plugins, off."""
    cls = plugins_of(world)[name]
    if declaration:
        cls = kit.declared(name, cls, **declaration)
    plugins = kit.unconfigured(cls, enable=(name,))
    config = plugins.configure(kit.config(n_slots), [])
    engine, fake, _ = fake_engine(n_slots, plugins=plugins, config=config, hybrid=hybrid)
    runner = WorldRunner(fake.kv, fake.next_token, fake.n_batch, fake.n_ubatch)
    runner.world = world
    engine.runner = runner
    return engine
