"""The latency target: what the fit learns from steps, and which chunk comes out of it. All clocks are simulated."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable

import numpy as np
import pytest

from llamamg import Batch, Request, Row, Sequence, SequenceState, Slot, StepState
from llamamg_plugins.chunk_choice import ChunkChoice, Limits
from llamamg_plugins.chunk_ladder import SIZES
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
        self.choice = ChunkChoice(512, Limits(**wanted), clock=lambda: self.now)
        self.new_s = 0.0  # what a chunk of another size than the one before costs
        self._n_before = 0
        self.decoders = [sequence(20_000, i, 0) for i in range(n_rows)]
        self.prompt = sequence(0, n_rows, 1 << 30)

    def step(self, n_chunk: int, decoders: bool = True) -> float:
        rows = [Row(s, [1], s.n_past, 1) for s in self.decoders] if decoders else []
        done = self.prompt.n_past
        if n_chunk:
            rows.append(Row(self.prompt, [1] * n_chunk, done, 0 if decoders else 1, is_prompt=True))
        elapsed = self.law(len(self.decoders) if decoders else 0, n_chunk, float(done))
        elapsed *= 1 + self.rng.uniform(-self.noise, self.noise)
        elapsed += self.new_s * (n_chunk != self._n_before)
        self._n_before = n_chunk
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
    solo = bench.choice.solo.tps
    bench.prompt.n_past = 0
    bench.run(30)
    steps = bench.run(100)
    rate = sum(n for n, _ in steps) / sum(seconds for _, seconds in steps)
    assert 0.27 * solo <= rate <= 0.45 * solo


@pytest.mark.parametrize("law", [linear, mixture])
def test_the_share_is_kept_where_no_prompt_was_ever_alone(law: Law) -> None:
    """Somebody decodes from the first second on: what a prompt would have by itself is guessed from larger chunks."""
    bench = Bench(law, target_s=0.001, min_share=0.3)
    learning = bench.run(100)
    assert max(seconds for _, seconds in learning) < 0.6 * law(2, 512, 0.0), "far below a whole ubatch"
    steps = bench.run(100)
    rate = sum(n for n, _ in steps) / sum(seconds for _, seconds in steps)
    assert bench.choice.solo.tps == 0.0
    assert 0.2 <= rate / (512 / law(0, 512, bench.prompt.n_past)) <= 0.5


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
    bench.step(64)  # the second of a size says nothing either
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


def hybrid(n_rows: int, n_chunk: int, depth: float) -> float:
    """One H200: 12 ms alone, 28 ms with the first prompt token, little for each more of them."""
    return 0.012 + (0.016 + 0.00025 * n_chunk if n_chunk else 0.0)


SOLO_HYBRID = 512 / (0.013 + 512 * 0.00025)


@pytest.mark.parametrize("n_alone", [40, 0])
def test_where_any_prompt_token_costs_as_much_as_the_ratio_allows_the_prompt_does_not_crawl(n_alone: int) -> None:
    """Twice and a half of alone is 30 ms, and a step with one token takes 28: a few tokens more cost next to nothing."""
    bench = Bench(hybrid, ratio=2.5, min_share=0.3)
    bench.choice.solo.tps = SOLO_HYBRID
    for _ in range(n_alone):
        bench.step(0)
    bench.run(40)
    steps = bench.run(500)
    rate = sum(n for n, _ in steps) / sum(seconds for _, seconds in steps)
    assert rate >= 0.3 * SOLO_HYBRID
    assert np.percentile([seconds for _, seconds in steps], 99) <= 3.6 * 0.012


def test_a_fixed_cost_of_mixed_steps_is_no_slope() -> None:
    """With a target of 60 ms 128 tokens fit; a fit that spreads the fixed 16 ms over the first tokens takes far fewer."""
    bench = Bench(hybrid, target_s=0.060)
    for _ in range(40):
        bench.step(0)
    bench.run(40)
    times = [seconds for _, seconds in bench.run(500)]
    assert 0.048 <= np.percentile(times, 99) <= 0.066
    assert np.median([n for n, _ in bench.run(50)]) >= 96


@pytest.mark.parametrize("law", [linear, mixture, hybrid])
def test_the_chunk_stays_so_that_its_graph_is_used_again(law: Law) -> None:
    bench = Bench(law, target_s=0.050)
    bench.new_s = 0.005
    bench.run(60)
    chunks = [n for n, _ in bench.run(500)]
    assert sum(a != b for a, b in itertools.pairwise(chunks)) <= 8
    times = sorted(seconds for _, seconds in bench.run(300))
    assert 0.040 <= times[int(0.99 * len(times))] <= 0.060


def test_sizes_are_few_and_those_beyond_the_first_are_multiples_of_eight() -> None:
    assert all(n % 8 == 0 for n in SIZES[SIZES >= 32])
    assert len(SIZES[SIZES <= 2048]) <= 36
    ratios = SIZES[1:][SIZES[:-1] >= 32] / SIZES[:-1][SIZES[:-1] >= 32]
    assert ratios.max() <= 1.25


@pytest.mark.parametrize("law", [linear, mixture, hybrid])
def test_no_step_is_far_too_long_while_the_fit_learns(law: Law) -> None:
    """From the first prompt on. The smallest steps are what they are; beyond them nothing takes much more than is wanted."""
    bench = Bench(law, ratio=2.5)
    for _ in range(40):
        bench.step(0)
    wanted = max(2.5 * law(2, 0, 0.0), law(2, 2, 0.0))
    assert max(seconds for _, seconds in bench.run(300)) <= 1.2 * wanted


def test_a_given_chunk_is_taken_as_it_is() -> None:
    """Sizes of the ladder are for what is learned; a fixed chunk may be anything."""
    for chunk in (1, 7, 256, 2048):
        gate = PrefillGate(itl_ratio=0, chunk=chunk)
        state = Bench(linear).state()
        assert gate.prefill_budget(state) == chunk


def test_the_solo_rate_of_a_shallow_prompt_is_less_deep_in_one() -> None:
    """Half of what 512 tokens took in the beginning of a prompt is not half of what they take behind 200 000 others."""
    bench = Bench(linear, target_s=0.001, min_share=0.3)
    bench.step(2048, decoders=False)
    bench.prompt.n_past = 0
    bench.run(100)
    bench.prompt.n_past = 200_000
    bench.run(150)
    steps = bench.run(100)
    rate = sum(n for n, _ in steps) / sum(seconds for _, seconds in steps)
    solo = 2048 / linear(0, 2048, 200_000.0)
    assert 0.25 * solo <= rate <= 0.6 * solo


def test_a_slow_machine_does_not_make_the_chunk_larger() -> None:
    """When every step takes twice as long, so would a prompt alone: its share does not ask for more tokens."""
    slow = [1.0]
    bench = Bench(lambda *of: slow[0] * hybrid(*of), ratio=1.5, min_share=0.2)
    bench.choice.solo.tps = SOLO_HYBRID
    for _ in range(40):
        bench.step(0)
    before = bench.run(200)[-1][0]
    slow[0] = 2.0
    bench.run(60)
    assert np.mean([n for n, _ in bench.run(100)]) <= 1.4 * before


def test_it_says_when_the_share_decides() -> None:
    for ratio, decided in ((1.5, "min-share"), (10.0, "latency")):
        gate = PrefillGate(itl_ratio=ratio, min_share=0.2)
        gate.learn(512, SOLO_HYBRID)
        assert gate._budgets is not None
        bench = Bench(hybrid, ratio=ratio, min_share=0.2)
        bench.choice.solo.tps = SOLO_HYBRID
        gate._budgets._choices[0] = bench.choice
        bench.run(60)
        report = gate.report["context_0"]
        assert report["decided_by"].startswith(decided)
        assert report["chunk"] == bench.run(1)[0][0]
        assert (report["expected_ms"] > report["wanted_ms"]) == (decided == "min-share")


def test_depth_counts_for_small_chunks_too() -> None:
    """On a CPU a few tokens are all that fits; attention makes the prompt by itself slow as well, and its share less."""

    def cpu(n_rows: int, n_chunk: int, depth: float) -> float:
        return 0.022 + (0.010 + 0.004 * n_chunk + (n_rows + n_chunk) * depth * 3e-6 if n_chunk else 0.0)

    bench = Bench(cpu, ratio=2.5, min_share=0.2)
    bench.choice.solo.tps = 240.0
    for _ in range(40):
        bench.step(0)
    bench.run(40)
    late = []
    while bench.prompt.n_past < 2500:
        late = bench.run(10)
    assert np.mean([seconds for _, seconds in late]) <= 1.05 * max(2.5 * 0.022, cpu(2, 3, 2500.0))


@pytest.mark.parametrize("seed", range(12))
def test_a_bad_beginning_does_not_keep_the_chunk_small(seed: int) -> None:
    """Each new size is a hiccup of its own length at first. What was learned of the slope then must not last."""

    def tiny(n_rows: int, n_chunk: int, depth: float) -> float:
        return 0.0022 + (0.003 + 0.00033 * n_chunk if n_chunk else 0.0)

    bench = Bench(tiny, ratio=2.8, min_share=0.32, noise=0.25, seed=seed)
    bench.choice.solo.tps = 2970.0
    for _ in range(24):
        bench.step(0)
    for _ in range(60):
        bench.new_s = bench.rng.choice([0.0, 0.004, 0.020])
        bench.run(1)
    bench.new_s = 0.0
    bench.run(60)
    steps = bench.run(100)
    assert sum(n for n, _ in steps) / sum(seconds for _, seconds in steps) >= 0.8 * 0.32 * 2970


def test_a_prompt_that_somebody_came_beside_tells_no_solo_rate() -> None:
    bench = Bench(linear, noise=0.0, ratio=2.0)
    bench.step(2048, decoders=False)
    first = bench.choice.solo.tps
    assert first > 0
    bench.choice.observe(Batch([Row(bench.prompt, [1] * 512, 2048, 0, is_prompt=True)]), 0.1)  # no end of a prompt
    bench.now += 50.0
    for _ in range(3):
        bench.step(1)
    bench.step(512, decoders=False)
    assert bench.choice.solo.tps == pytest.approx(0.5 * (first + 512 / linear(0, 512, 2051.0)), rel=0.01)
