"""Prompts in a context of their own: how much of the device they take beside decoders. The device and its clock are simulated."""

from __future__ import annotations

import random

import numpy as np
import pytest

from llamamg import Batch, Request, Row, Sequence, SequenceState, Slot, StepState
from llamamg_plugins.chunk_choice import Limits
from llamamg_plugins.prefill_budgets import Budgets

ALONE_S = 0.012
SOLO_TPS = 512 / (0.010 + 512 * 0.00024)


def sequence(slot: Slot, n_past: int, *, decodes: bool) -> Sequence:
    request = Request(np.zeros(1 << 20, np.int32), None)  # type: ignore[arg-type]
    state = SequenceState.DECODE if decodes else SequenceState.PREFILL
    slot.sequence = Sequence(request, slot, None, None, state, n_past=n_past)  # type: ignore[arg-type]
    return slot.sequence


class Device:
    """Two decoders in one context, a prompt in another one, both computed at once and slowed down by each other.

    Without `waits_for_prompts` it is a GPU: a batch of a prompt is handed over and over with, unless the one before still runs.
    `hurt`: how much a decode step is slowed down by a batch of a prompt of so many tokens, as a factor.
    """

    def __init__(
        self,
        *,
        ratio: float = 0.0,
        target_s: float = 0.0,
        min_share: float = 0.0,
        seed: int = 1,
        waits_for_prompts: bool = True,
    ) -> None:
        self.now = 0.0
        self.waits_for_prompts = waits_for_prompts  # as on a CPU
        self.blocked: tuple[Batch, float, float] | None = None
        self.rng = random.Random(seed)
        self.budgets = Budgets(512, Limits(target_s, ratio, min_share), 256, clock=lambda: self.now)
        self.budgets.solo.tps = SOLO_TPS
        slots = [Slot(i, i) for i in range(3)]
        slots[2].context = 1
        self.decoders = [sequence(slots[i], 20_000, decodes=True) for i in range(2)]
        self.prompt = sequence(slots[2], 0, decodes=False)
        self.state = StepState(2048, 512, slots=slots, groups=(range(3),))
        self.decode: tuple[Batch, float, float] | None = None  # batch, begin, work left
        self.prefill: tuple[Batch, float, float] | None = None
        self.gaps: list[float] = []
        self.chunks: list[int] = []
        self.t_last = 0.0
        self.wants_prompt = True

    def hurt(self, n_chunk: int) -> float:
        return 1.4 + n_chunk / 150

    def plan(self) -> None:
        """What the engine does after each batch: whatever context is free is planned and submitted."""
        if self.decode is None:
            batch = Batch([Row(s, [1], s.n_past, 1) for s in self.decoders], group=0)
            self.budgets.submitted(batch)
            self.decode = batch, self.now, ALONE_S * self.rng.uniform(0.97, 1.03)
        is_free = self.prefill is None if self.waits_for_prompts else self.blocked is None
        if is_free and self.wants_prompt:
            self.state.step += 1
            self.state.decoding, self.state.prefilling = [], [self.prompt]
            n = self.budgets.budget(self.state)
            assert n is not None
            if n:
                batch = Batch([Row(self.prompt, [1] * n, self.prompt.n_past, 0, is_prompt=True)], group=1)
                self.prompt.n_past += n
                self.budgets.submitted(batch)
                self.chunks.append(n)
                begun = batch, self.now, (0.010 + 0.00024 * n) * self.rng.uniform(0.97, 1.03)
                if self.prefill is None:
                    self._begin(begun)
                else:
                    self.blocked = begun

    def _begin(self, begun: tuple[Batch, float, float]) -> None:
        self.prefill = begun
        if not self.waits_for_prompts:
            self.budgets.done(begun[0], 0.001)

    def run(self, n_gaps: int) -> None:
        """Advance to the end of whatever ends first, until so many decode steps are over."""
        goal = len(self.gaps) + n_gaps
        while len(self.gaps) < goal:
            self.plan()
            assert self.decode is not None
            slow_decode = self.hurt(self.prefill[0].n_tokens) if self.prefill else 1.0
            slow_prefill = 1.3 if self.prefill else 1.0
            left = [self.decode[2] * slow_decode] + ([self.prefill[2] * slow_prefill] if self.prefill else [])
            dt = min(left)
            self.now += dt
            self.decode = (*self.decode[:2], self.decode[2] - dt / slow_decode)
            if self.prefill:
                self.prefill = (*self.prefill[:2], self.prefill[2] - dt / slow_prefill)
                if self.prefill[2] < 1e-9:
                    if self.waits_for_prompts:
                        self.budgets.done(self.prefill[0], self.now - self.prefill[1])
                    self.prefill = None
                    if self.blocked is not None:
                        blocked, self.blocked = self.blocked, None
                        self._begin(blocked)
            if self.decode[2] < 1e-9:
                self.budgets.done(self.decode[0], self.now - self.decode[1])
                self.decode = None
                self.gaps.append(self.now - self.t_last)
                self.t_last = self.now

    def measure(self, n_gaps: int = 600) -> tuple[float, float]:
        """The 99th percentile of the gaps as a multiple of one alone, and the prompt's share of its solo rate."""
        self.wants_prompt = False
        self.run(40)
        self.wants_prompt = True
        self.run(100)
        begin, done, first = self.now, self.prompt.n_past, len(self.gaps)
        self.run(n_gaps)
        share = (self.prompt.n_past - done) / (self.now - begin) / SOLO_TPS
        return float(np.percentile(self.gaps[first:], 99)) / ALONE_S, share


@pytest.mark.parametrize("waits_for_prompts", [True, False])
@pytest.mark.parametrize("ratio", [1.8, 2.0, 3.0])
def test_a_ratio_bounds_the_gaps_and_is_used(ratio: float, waits_for_prompts: bool) -> None:
    device = Device(ratio=ratio, waits_for_prompts=waits_for_prompts)
    p99, share = device.measure()
    assert 0.7 * ratio <= p99 <= 1.12 * ratio
    assert share > 0.1


def test_more_room_for_the_gaps_is_more_for_the_prompt() -> None:
    shares = [Device(ratio=ratio).measure()[1] for ratio in (1.8, 2.5, 5.0)]
    assert shares[0] < 0.8 * shares[1] < 0.8 * 0.9 * shares[2]
    assert shares[2] > 0.65


def test_a_target_in_milliseconds() -> None:
    p99, _ = Device(target_s=0.030).measure()
    assert 0.8 * 30 <= p99 * 1e3 * ALONE_S <= 1.2 * 30


@pytest.mark.parametrize("waits_for_prompts", [True, False])
def test_the_share_wins_over_the_ratio(waits_for_prompts: bool) -> None:
    modest, _ = Device(ratio=1.5, waits_for_prompts=waits_for_prompts).measure()
    p99, share = Device(ratio=1.5, min_share=0.5, waits_for_prompts=waits_for_prompts).measure()
    assert share >= 0.45
    assert p99 > modest


def test_largest_gap_while_it_learns() -> None:
    """From the first batch on: sizes grow in steps, so that none is far beyond what is wanted."""
    device = Device(ratio=2.0)
    device.wants_prompt = False
    device.run(40)
    device.wants_prompt = True
    device.run(600)
    assert max(device.gaps[40:]) <= 1.25 * 2.0 * ALONE_S


def test_the_size_settles() -> None:
    device = Device(ratio=2.5)
    device.measure()
    changes = sum(a != b for a, b in zip(device.chunks[-300:], device.chunks[-299:], strict=False))
    assert changes <= 6


def test_alone_is_learned_from_steps_without_a_prompt_only() -> None:
    device = Device(ratio=2.0)
    device.measure()
    assert device.budgets._pace is not None
    assert device.budgets._pace._alone_s[2] == pytest.approx(ALONE_S, rel=0.05)


def test_overlapped_steps_do_not_teach_the_fit_of_mixed_steps() -> None:
    device = Device(ratio=2.0)
    device.measure()
    alone = device.budgets._choices[0]._alone_s[2]
    assert alone == pytest.approx(ALONE_S, rel=0.05)
    assert device.budgets._choices[0].fit.n_seen == 0


def test_a_batch_of_a_prompt_waits_for_a_step_of_every_group() -> None:
    device = Device(ratio=2.0)
    device.run(1)
    pace = device.budgets._pace
    assert pace is not None
    pace._stepped.clear()
    pace._t_submitted = device.now
    device.state.step += 1
    device.state.prefilling = [device.prompt]
    assert device.budgets.budget(device.state) == 0
    device.now += 1.5  # a group that decodes, but has no step, holds nobody up
    device.state.step += 1
    assert device.budgets.budget(device.state)


def test_without_a_latency_limit_the_chunk_counts_and_nobody_waits() -> None:
    device = Device()
    device.budgets.limits = None
    for _ in range(3):
        assert device.budgets.budget(device.state) == 256


def test_a_prompt_by_itself_is_not_held_and_tells_the_solo_rate() -> None:
    device = Device(ratio=2.0)
    for s in device.decoders:
        s.state = SequenceState.FINISHED
    device.budgets.solo.tps = 0.0
    device.state.prefilling = [device.prompt]
    assert device.budgets.budget(device.state) is None
    batch = Batch([Row(device.prompt, [1] * 2048, 0, 1, is_prompt=True)], group=1)
    device.budgets.submitted(batch)
    device.now += 0.5
    device.budgets.done(batch, 0.5)
    assert device.budgets.solo.tps == pytest.approx(4096)


def test_a_failed_batch_is_forgotten() -> None:
    device = Device(target_s=0.03)
    device.now = 10.0
    device.plan()
    assert device.prefill is not None
    assert device.budgets._beside
    batch = device.prefill[0]
    device.budgets.ended(batch)
    assert not device.budgets._beside
    device.budgets._overlapped.add(id(batch))
    assert device.budgets.ended(batch)[0]
    assert not device.budgets.ended(batch)[0], "another batch may get the same id"
    assert 1 not in device.budgets._flying


@pytest.mark.parametrize("n_before", [40, 0])
def test_the_first_prompt_of_all_is_bounded_too(n_before: int) -> None:
    """Gaps alone are known from before the first prompt, or a few are waited for, long after the clock's zero."""
    device = Device(ratio=1.8)
    device.now = device.t_last = 1e4
    device.wants_prompt = False
    device.run(n_before)
    device.wants_prompt = True
    device.run(400)
    assert np.percentile(device.gaps[n_before:], 99) <= 1.1 * 1.8 * ALONE_S
    assert device.prompt.n_past / (device.now - 1e4) > 0.3 * SOLO_TPS
