"""The latency target: what the fit learns from steps, and which chunk comes out of it. All clocks are simulated."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import pytest

from llamamg import Batch, Request, Row, Sequence, SequenceState, Slot, StepState
from llamamg_plugins.chunk_choice import ChunkChoice
from llamamg_plugins.prefill_gate import PrefillGate
from llamamg_plugins.step_fit import StepFit, StepShape

Law = Callable[[int, int, float], float]


def linear(n_rows: int, n_chunk: int, depth: float) -> float:
    """A dense model: 10 ms for the weights, 0.2 ms per prompt token, more with depth."""
    return 0.010 + 0.0002 * n_rows + 0.0002 * n_chunk * (1 + depth / 1e5)


def mixture(n_rows: int, n_chunk: int, depth: float) -> float:
    """Experts: the first tokens of a chunk cost most."""
    return 0.008 + 0.0003 * n_rows + 0.02 * (1 - np.exp(-n_chunk / 24)) + 0.0001 * n_chunk


class Bench:
    """A server on a simulated clock: `n_rows` sequences decode at 20 000 tokens while a long prompt is computed."""

    def __init__(self, law: Law, *, n_rows: int = 2, noise: float = 0.03, seed: int = 1, **wanted: float) -> None:
        self.now = 0.0
        self.law, self.noise, self.rng = law, noise, random.Random(seed)
        settings = {"target_s": 0.0, "ratio": 0.0, "min_share": 0.0, **wanted}
        self.choice = ChunkChoice(512, clock=lambda: self.now, **settings)
        self.decoders = [sequence(20_000, i, 0) for i in range(n_rows)]
        self.prompt = sequence(0, n_rows, 1 << 30)

    def step(self, n_chunk: int, decoders: bool = True) -> float:
        rows = [Row(s, [1], s.n_past, 1) for s in self.decoders] if decoders else []
        done = self.prompt.n_past
        if n_chunk:
            rows.append(Row(self.prompt, [1] * n_chunk, done, 0 if decoders else 1, is_prompt=True))
        elapsed = self.law(len(self.decoders) if decoders else 0, n_chunk, float(done))
        elapsed *= 1 + self.rng.uniform(-self.noise, self.noise)
        self.now += elapsed
        self.prompt.n_past += n_chunk
        self.choice.observe(Batch(rows), elapsed)
        return elapsed

    def state(self) -> StepState:
        return StepState(2048, 512, decoding=self.decoders, prefilling=[self.prompt])

    def run(self, n_steps: int, n_most: int = 2046) -> list[tuple[int, float]]:
        """(chunk, seconds) of each step."""
        out = []
        for _ in range(n_steps):
            n_chunk = self.choice.choose(self.state(), n_most)
            out.append((n_chunk, self.step(n_chunk)))
        return out


def sequence(n_past: int, slot: int, n_prompt: int) -> Sequence:
    state = SequenceState.PREFILL if n_prompt else SequenceState.DECODE
    request = Request(np.zeros(0, np.int32), None)  # type: ignore[arg-type]
    return Sequence(request, Slot(slot, slot), None, None, state, n_past=n_past)  # type: ignore[arg-type]


@pytest.mark.parametrize("law", [linear, mixture])
@pytest.mark.parametrize("target_ms", [25, 60, 150])
def test_the_99th_percentile_lies_within_a_fifth_of_the_target(law: Law, target_ms: float) -> None:
    bench = Bench(law, target_s=target_ms / 1e3)
    bench.run(30)
    times = [seconds for _, seconds in bench.run(600)]
    assert 0.8 * target_ms <= 1e3 * np.percentile(times, 99) <= 1.2 * target_ms


@pytest.mark.parametrize("law", [linear, mixture])
def test_a_ratio_is_one_of_the_step_without_prompt(law: Law) -> None:
    bench = Bench(law, ratio=3.0)
    for _ in range(40):
        bench.step(0)
    bench.run(30)
    alone = law(2, 0, 0.0)
    times = [seconds for _, seconds in bench.run(300)]
    assert 2.2 * alone <= np.percentile(times, 99) <= 3.3 * alone


def test_depth_makes_the_chunk_smaller_and_the_target_holds() -> None:
    bench = Bench(linear, target_s=0.050)
    shallow = bench.run(60)[-1][0]
    bench.prompt.n_past = 150_000
    bench.run(30)
    deep = bench.run(200)
    assert deep[-1][0] < 0.6 * shallow
    assert 0.040 <= np.percentile([seconds for _, seconds in deep], 99) <= 0.060


def test_the_prompt_keeps_its_share_where_the_target_cannot_be_met() -> None:
    bench = Bench(linear, target_s=0.001, min_share=0.3)
    bench.step(2048, decoders=False)
    solo = bench.choice.solo_tps
    bench.prompt.n_past = 0
    bench.run(30)
    steps = bench.run(100)
    rate = sum(n for n, _ in steps) / sum(seconds for _, seconds in steps)
    assert 0.27 * solo <= rate <= 0.45 * solo


def test_without_a_target_in_reach_and_without_a_share_the_smallest_chunk_goes() -> None:
    bench = Bench(linear, target_s=0.001)
    bench.run(30)
    assert {n for n, _ in bench.run(20)} == {1}


def test_the_limit_of_the_caller_holds() -> None:
    bench = Bench(linear, target_s=10.0)
    assert max(n for n, _ in bench.run(50, n_most=100)) == 96  # the largest size that fits


def test_a_chunk_that_never_changes_does_not_blur_the_fit() -> None:
    """A thousand equal steps say nothing about the slope; what was known of it must still be there."""
    fit = StepFit(512)
    for n in (16, 32, 64, 128, 256) * 4:
        fit.add(StepShape(2, n), linear(2, n, 0))
    for _ in range(1000):
        fit.add(StepShape(2, 64), linear(2, 64, 0))
    predicted = fit.predict(StepShape(2, 0), np.array([32, 128, 256]))
    assert predicted == pytest.approx([linear(2, n, 0) for n in (32, 128, 256)], rel=0.1)


def test_a_hiccup_is_left_out() -> None:
    fit = StepFit(512)
    for n in (16, 32, 64, 128) * 4:
        fit.add(StepShape(2, n), linear(2, n, 0))
    before = fit.predict(StepShape(2, 0), np.array([64]))[0]
    fit.add(StepShape(2, 64), 3.0)
    assert fit.predict(StepShape(2, 0), np.array([64]))[0] == before


def test_a_step_behind_an_unfinished_batch_is_not_believed() -> None:
    """A batch without outputs returns at once on a GPU; its time would land on the step behind it."""
    bench = Bench(linear, target_s=0.05)
    bench.run(20)
    n_seen = bench.choice.fit.n_seen
    rows = [Row(bench.prompt, [1] * 512, 0, 0, is_prompt=True)]
    bench.choice.observe(Batch(rows), 0.0001)
    bench.step(64)
    assert bench.choice.fit.n_seen == n_seen
    bench.step(64)
    assert bench.choice.fit.n_seen == n_seen + 1


def test_one_answer_per_step() -> None:
    """Two hooks of a step ask for the budget; they must get the same one."""
    gate = PrefillGate(itl_target_ms=50)
    bench = Bench(linear)
    state = bench.state()
    state.step = 7
    first = gate.prefill_budget(state)
    assert gate.prefill_budget(state) == first == 1
