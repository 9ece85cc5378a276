"""Paired statistics on synthetic data and on a clock that the test moves."""

from __future__ import annotations

import numpy as np
import pytest

from benches import pairs


def test_order_is_a_b_b_a() -> None:
    assert pairs.order(5) == "ABBAABBAAB"


def test_t_quantiles_are_the_tabulated_ones() -> None:
    for df, tabulated in ((1, 63.657), (2, 9.925), (4, 4.604), (9, 3.250), (28, 2.763), (29, 2.756)):
        assert pairs.t_quantile(0.995, df) == pytest.approx(tabulated, abs=6e-4)


class Clock:
    """A machine that gets slower while it runs, with some noise per run."""

    def __init__(self, seed: int, noise: float, drift_per_run: float = 0.0) -> None:
        self._random, self._noise, self._drift = np.random.default_rng(seed), noise, drift_per_run
        self.n = 0

    def rate(self, true: float) -> float:
        self.n += 1
        return float(true * (1 - self._drift * self.n) * np.exp(self._noise * self._random.standard_normal()))


@pytest.mark.parametrize("n_pairs", [5, 12, 40])
def test_a_against_a_gives_few_differences(n_pairs: int) -> None:
    found = 0
    for seed in range(100):
        clock = Clock(seed, noise=0.01, drift_per_run=0.002)
        values = pairs.measure(n_pairs, lambda clock=clock: clock.rate(100), lambda clock=clock: clock.rate(100))
        found += values.compare().verdict != "no difference"
    assert found <= 4


def test_a_known_effect_is_found_in_spite_of_drift() -> None:
    found = 0
    for seed in range(20):
        clock = Clock(seed, noise=0.005, drift_per_run=0.003)
        values = pairs.measure(12, lambda clock=clock: clock.rate(95), lambda clock=clock: clock.rate(100))
        result = values.compare()
        found += result.verdict == "A lower"
        assert result.mean == pytest.approx(0.95, abs=0.02)
    assert found >= 18


def test_a_sure_but_tiny_effect_is_not_claimed() -> None:
    a, b = [100.5 + 0.001 * i for i in range(10)], [100.0 + 0.001 * i for i in range(10)]
    result = pairs.compare(a, b)
    assert result.low > 1
    assert result.verdict == "no difference"


def test_the_interval_covers_the_truth_as_often_as_it_says() -> None:
    random = np.random.default_rng(1)
    covered = 0
    for _ in range(600):
        a = np.exp(random.normal(np.log(1.1), 0.02, 5))
        result = pairs.compare(list(a), [1.0] * 5)
        covered += result.low <= 1.1 <= result.high
    assert 0.975 <= covered / 600 <= 0.999


def test_many_pairs_are_bootstrapped() -> None:
    random = np.random.default_rng(2)
    a = list(np.exp(random.normal(0.05, 0.01, 30)))
    assert pairs.compare(a[:29], [1.0] * 29).method == "t"
    result = pairs.compare(a, [1.0] * 30)
    assert result.method == "bootstrap"
    assert result.verdict == "A higher"
    assert result.low < result.mean < result.high
    assert result == pairs.compare(a, [1.0] * 30)


@pytest.mark.parametrize(("a", "b"), [([1.0], [1.0]), ([1.0, 2.0], [1.0]), ([1.0, 0.0], [1.0, 1.0])])
def test_what_cannot_be_compared_is_refused(a: list[float], b: list[float]) -> None:
    with pytest.raises(ValueError, match="comparison needs|positive"):
        pairs.compare(a, b)
