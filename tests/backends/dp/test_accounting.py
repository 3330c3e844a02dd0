"""Epsilon is a monotone upper bound, is computed within seconds, and can be inverted."""

from __future__ import annotations

import math
import time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from tests.helpers.patience import patience
from trainstack.backends.dp import accounting, calibrate_noise, delta_of, epsilon_of, steps_within
from trainstack.backends.dp.accounting import merge_steps
from trainstack.backends.dp.epsilon import _LARGEST_GRID, clt_epsilon, import_opacus
from trainstack.errors import ConfigurationError

pytestmark = pytest.mark.slow
SIGMAS = st.floats(0.4, 20)
RATES = st.floats(1e-5, 1.0)
STEPS = st.integers(1, 20_000)
DELTAS = st.floats(1e-9, 0.1)
EXAMPLES = settings().max_examples  # 2000 in `make test-long`; an example takes up to half a second
both = pytest.mark.parametrize("accountant", ["prv", "rdp"])


# --- one step has a closed form


def exact_delta_of_one_step(epsilon: float, sigma: float, q: float, *, removed: bool) -> float:
    """The hockey-stick divergence between N(0) and (1-q) N(0) + q N(1), in one direction or the other."""
    growth = math.expm1(epsilon if removed else -epsilon) / q
    if growth <= -1:
        return 0.0  # the mixture never falls so far
    edge = sigma**2 * math.log1p(growth) + 0.5

    def tail(mean: float) -> float:
        return float(stats.norm.sf((edge - mean) / sigma))

    with_record, without = (1 - q) * tail(0) + q * tail(1), tail(0)
    if removed:
        return with_record - math.exp(epsilon) * without
    return (1 - without) - math.exp(epsilon) * (1 - with_record)


@pytest.mark.parametrize(("sigma", "q"), [(0.6, 0.3), (1.0, 0.1), (2.0, 0.5), (1.0, 0.01)])
def test_one_step_is_bounded_as_closely_as_stated(sigma: float, q: float) -> None:
    delta = 1e-5
    epsilon = epsilon_of([(sigma, q, 1)], delta, eps_error=1e-3)
    assert exact_delta_of_one_step(epsilon, sigma, q, removed=True) <= delta
    assert exact_delta_of_one_step(epsilon - 2.5e-3, sigma, q, removed=True) > delta


@given(st.floats(0.5, 3), st.floats(0.01, 0.9), st.floats(0.01, 3))
def test_adding_a_record_reveals_less_than_removing_one(sigma: float, q: float, epsilon: float) -> None:
    """So it suffices that opacus' prv accounts for one direction."""
    removed = exact_delta_of_one_step(epsilon, sigma, q, removed=True)
    assert exact_delta_of_one_step(epsilon, sigma, q, removed=False) <= removed + 1e-12


# --- monotony


@settings(max_examples=EXAMPLES // 5)
@given(SIGMAS, RATES, STEPS, DELTAS)
def test_more_steps_spend_more(sigma: float, q: float, steps: int, delta: float) -> None:
    assert epsilon_of([(sigma, q, steps)], delta, "rdp") <= epsilon_of([(sigma, q, 2 * steps)], delta, "rdp")


@settings(max_examples=EXAMPLES // 5)
@given(SIGMAS, st.floats(1e-5, 0.5), STEPS, DELTAS)
def test_larger_samples_spend_more(sigma: float, q: float, steps: int, delta: float) -> None:
    small, large = (epsilon_of([(sigma, rate, steps)], delta, "rdp") for rate in (q, 2 * q))
    assert small <= large * (1 + 1e-9)


@settings(max_examples=EXAMPLES // 5)
@given(SIGMAS, RATES, STEPS, DELTAS)
def test_more_noise_spends_less(sigma: float, q: float, steps: int, delta: float) -> None:
    loud, soft = (epsilon_of([(noise, q, steps)], delta, "rdp") for noise in (1.5 * sigma, sigma))
    assert loud <= soft * (1 + 1e-9)


@settings(max_examples=EXAMPLES // 20)
@given(st.floats(0.6, 4), st.floats(1e-4, 0.3), st.integers(1, 2000), st.floats(1e-7, 1e-3))
def test_the_tighter_accountant_is_monotone_too(sigma: float, q: float, steps: int, delta: float) -> None:
    here = epsilon_of([(sigma, q, steps)], delta)
    grid = 1e-3  # of prv, far below its stated error of 0.01
    assert here <= epsilon_of([(sigma, q, 2 * steps)], delta) + grid
    assert here <= epsilon_of([(sigma, min(1.0, 2 * q), steps)], delta) + grid
    assert here >= epsilon_of([(1.5 * sigma, q, steps)], delta) - grid
    assert here <= epsilon_of([(sigma, q, steps)], delta, "rdp")


@both
def test_the_same_steps_in_several_entries_are_one_entry(accountant: str) -> None:
    parts = [(1.0, 0.01, 30), (2.0, 0.01, 5), (1.0, 0.01, 70)]
    assert merge_steps(parts) == [(1.0, 0.01, 100), (2.0, 0.01, 5)]
    assert epsilon_of(parts, 1e-5, accountant) == epsilon_of(merge_steps(parts), 1e-5, accountant)


@both
def test_a_mixed_history_spends_between_its_maximum_and_its_sum(accountant: str) -> None:
    first, second = (1.0, 0.02, 200), (2.0, 0.05, 300)
    alone = [epsilon_of([entry], 1e-5, accountant) for entry in (first, second)]
    together = epsilon_of([first, second], 1e-5, accountant)
    assert max(alone) < together < sum(alone)


# --- inputs on which the accountants of other libraries fail or are slow


@both
@pytest.mark.spec("O17")
def test_nothing_spent_is_zero_and_no_noise_is_infinite(accountant: str) -> None:
    assert epsilon_of([], 1e-5, accountant) == 0.0
    assert epsilon_of([(1.0, 0.1, 0)], 1e-5, accountant) == 0.0
    assert epsilon_of([(0.0, 0.1, 0), (0.0, 0.0, 5)], 1e-5, accountant) == 0.0
    assert epsilon_of([(1.0, 0.1, 3), (0.0, 0.1, 1)], 1e-5, accountant) == math.inf


@pytest.mark.spec("O17")
@pytest.mark.parametrize(
    "history",
    [
        [(0.7, 0.5, 5000)],
        [(0.05, 0.5, 5000)],
        [(1.0, 0.01, 10_000_000)],
        [(1.0 + 0.01 * k, 0.01, 30) for k in range(30)],
    ],
    ids=["large epsilon", "larger epsilon", "long", "30 kinds of noise"],
)
def test_difficult_histories_fall_back_to_renyi_accounting_within_seconds(
    history: list[tuple[float, float, int]],
) -> None:
    began = time.process_time()
    epsilon = epsilon_of(history, 1e-5)
    assert time.process_time() - began < patience(10)
    assert epsilon == epsilon_of(history, 1e-5, "rdp")
    assert 0 < epsilon < math.inf


def test_a_long_history_is_still_accounted_for_tightly() -> None:
    history = [(1.0, 0.01, 100_000)]
    assert epsilon_of(history, 1e-5) < 0.95 * epsilon_of(history, 1e-5, "rdp")


def test_the_grid_of_a_long_history_has_a_limited_size(monkeypatch: pytest.MonkeyPatch) -> None:
    accountant = import_opacus("opacus.accountants").PRVAccountant
    choose, sizes = accountant._get_domain, list[int]()

    def stop(self: Any, **given: Any) -> Any:
        sizes.append(choose(self, **given).size)
        raise ValueError("the domain is enough")

    monkeypatch.setattr(accountant, "_get_domain", stop)
    epsilon_of([(1.0, 0.01, 90_000)], 1e-5)
    (size,) = sizes
    assert 0.9 * _LARGEST_GRID < size <= _LARGEST_GRID + 2


def test_renyi_accounting_handles_deltas_near_the_rounding_of_the_transform() -> None:
    """There the errors of opacus' prv exceed 1 in both directions: 4.7 instead of 1.5 in the first case."""
    for delta in (1e-12, 1e-11, 1e-10):
        history = [(1.0, 0.001, 30_000)]
        assert epsilon_of(history, delta) == epsilon_of(history, delta, "rdp")


def test_renyi_accounting_has_no_floor() -> None:
    """opacus' orders end at 63, so its smallest epsilon is about 0.1."""
    assert epsilon_of([(500.0, 0.001, 3)], 1e-5, "rdp") < 0.01


@pytest.mark.parametrize(
    ("history", "delta", "words"),
    [
        ([(1.0, 1.5, 3)], 1e-5, "sample_rate=1.5"),
        ([(1.0, -0.1, 3)], 1e-5, "sample_rate=-0.1"),
        ([(-1.0, 0.1, 3)], 1e-5, "noise_multiplier=-1.0"),
        ([(math.nan, 0.1, 3)], 1e-5, "noise_multiplier=nan"),
        ([(math.inf, 0.1, 3)], 1e-5, "noise_multiplier=inf"),
        ([(1.0, math.nan, 3)], 1e-5, "sample_rate=nan"),
        ([(1.0, 0.1, -3)], 1e-5, "steps=-3"),
        ([(1.0, 0.1, 2.5)], 1e-5, "steps=2.5"),
        ([(1.0, 0.1, 3)], 0.0, "delta=0.0"),
        ([(1.0, 0.1, 3)], 1.0, "delta=1.0"),
        ([(1.0, 0.1, 3)], math.nan, "delta=nan"),
    ],
)
def test_numbers_outside_their_ranges_are_refused(
    history: list[tuple[float, float, float]], delta: float, words: str
) -> None:
    with pytest.raises(ConfigurationError, match=words):
        epsilon_of(history, delta)


def test_accountants_that_report_too_little_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="reports too little"):
        epsilon_of([(1.0, 0.1, 3)], 1e-5, "gdp")


# --- noise and steps from epsilon


@both
@pytest.mark.parametrize("target", [0.1, 1.0, 3.0])
def test_calibrated_noise_meets_the_target_and_wastes_little(accountant: str, target: float) -> None:
    q, steps = 0.01, 1000
    sigma = calibrate_noise(target, 1e-5, q, steps, accountant)
    reached = epsilon_of([(sigma, q, steps)], 1e-5, accountant, eps_error=min(0.01, target / 50))
    assert target - min(0.011, target / 40) < reached <= target


def test_a_target_that_no_noise_reaches_is_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"target_epsilon=1e-05: no noise multiplier"):
        calibrate_noise(1e-5, 1e-9, 1.0, 10**6, "rdp")


def test_steps_within_a_budget_are_counted_by_the_tighter_accountant() -> None:
    prv, rdp = (epsilon_of([(1.0, 0.01, 500)], 1e-5, accountant) for accountant in ("prv", "rdp"))
    assert steps_within((prv + rdp) / 2, [], 1.0, 0.01, 1e-5, at_most=500) == 500


@both
@pytest.mark.parametrize(
    ("budget", "history", "sigma", "q"),
    [
        pytest.param(2.0, [], 1.0, 0.02, marks=pytest.mark.long),
        (3.0, [(0.9, 0.02, 40)], 1.2, 0.05),
        (0.5, [], 1.5, 0.001),
    ],
)
def test_a_budget_allows_all_steps_within_it_and_no_more(
    accountant: str, budget: float, history: list[tuple[float, float, int]], sigma: float, q: float
) -> None:
    def spent(steps: int) -> float:
        return epsilon_of([*history, (sigma, q, steps)], 1e-5, accountant, eps_error=min(0.01, budget / 50))

    steps = steps_within(budget, history, sigma, q, 1e-5, accountant)
    assert spent(steps) <= budget < spent(steps + 1)


def test_a_budget_spent_already_allows_nothing() -> None:
    assert steps_within(1.0, [(1.0, 0.1, 100)], 1.0, 0.1, 1e-5) == 0
    assert steps_within(1.0, [], 0.0, 0.1, 1e-5) == 0


def test_a_limit_within_the_budget_is_returned() -> None:
    assert steps_within(2.0, [], 1.0, 0.001, 1e-5, at_most=50) == 50
    assert steps_within(2.0, [], 1.0, 0.0, 1e-5, at_most=50) == 50


@both
def test_delta_is_the_inverse_of_epsilon(accountant: str) -> None:
    history = [(1.0, 0.05, 50)]
    delta = delta_of(2.0, history, accountant)
    assert epsilon_of(history, delta, accountant) <= 2.0 < epsilon_of(history, delta * 0.99, accountant)
    assert delta_of(1e-9, [(0.1, 1.0, 50)], accountant) == 1.0


def test_a_tiny_target_needs_seven_calls_of_the_slow_accountant(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def slow(history: list[tuple[float, float, int]], delta: float, eps_error: float, rdp: float) -> float:
        asked.append(history)
        return 1.1 * clt_epsilon(*history[0], delta)

    monkeypatch.setattr(accounting, "prv_epsilon", slow)
    sigma = calibrate_noise(0.001, 1e-5, 0.0625, 160)
    assert 0.0009 < slow([(sigma, 0.0625, 160)], 1e-5, 0.0, 0.0) <= 0.001
    assert len(asked) <= 7
