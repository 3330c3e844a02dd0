"""Closed forms, which need no package, against known values, their own inverse and an integral."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import integrate, special, stats

from trainstack.backends.dp import epsilon_of, fixed_order_epsilon, gaussian_epsilon, shuffled_epsilon_at_least
from trainstack.backends.dp.epsilon import gaussian_delta, log_normal_cdf


@pytest.mark.parametrize("z", [-200.0, -37.5, -30.001, -30.0, -29.999, -8.0, -1.0, 0.0, 1.0, 8.0, 30.0])
def test_the_logarithm_of_the_normal_distribution_is_that_of_scipy(z: float) -> None:
    assert log_normal_cdf(z) == pytest.approx(float(special.log_ndtr(z)), rel=1e-9, abs=1e-300)


def test_delta_is_the_integral_that_defines_it() -> None:
    mu, epsilon = 1.3, 2.0
    excess, _ = integrate.quad(
        lambda x: max(0.0, stats.norm.pdf(x, mu) - math.exp(epsilon) * stats.norm.pdf(x)), -5, 15, epsabs=1e-12
    )
    assert gaussian_delta(mu, epsilon) == pytest.approx(excess, rel=1e-8)


def test_epsilon_of_a_known_mechanism() -> None:
    assert gaussian_epsilon(4.330, 1 / 550_152) == pytest.approx(28.75, abs=5e-3)
    assert gaussian_epsilon(1.0, 1e-5) == pytest.approx(4.3772, abs=5e-5)


@given(st.floats(1e-3, 30), st.floats(1e-12, 0.4))
def test_epsilon_is_the_inverse_of_delta(mu: float, delta: float) -> None:
    epsilon = gaussian_epsilon(mu, delta)
    assert gaussian_delta(mu, epsilon) <= delta * (1 + 1e-9)
    if epsilon > 0:
        assert gaussian_delta(mu, epsilon * (1 - 1e-6)) > delta * (1 - 1e-9)


def test_epsilon_is_zero_without_steps_and_infinite_without_noise() -> None:
    assert gaussian_epsilon(0.0, 1e-5) == 0.0
    assert gaussian_epsilon(math.inf, 1e-5) == math.inf
    assert fixed_order_epsilon([], 1e-5) == 0.0
    assert fixed_order_epsilon([(0.0, 0.1, 3)], 1e-5) == math.inf
    assert shuffled_epsilon_at_least(0.0, 10, 1e-5) == math.inf


@pytest.mark.parametrize(("sigma", "steps"), [(1.0, 1), (2.0, 10), (5.0, 400)])
def test_steps_with_every_record_are_one_gaussian_mechanism(sigma: float, steps: int) -> None:
    exact = gaussian_epsilon(math.sqrt(steps) / sigma, 1e-5)
    assert epsilon_of([(sigma, 1.0, steps)], 1e-5) == exact
    assert exact < epsilon_of([(sigma, 1.0, steps)], 1e-5, "rdp") < 1.2 * exact


def test_different_noise_with_every_record_adds_up_in_squares() -> None:
    mu = math.sqrt(3 / 4.0 + 5 / 9.0)
    assert epsilon_of([(2.0, 1.0, 3), (3.0, 1.0, 5)], 1e-6) == gaussian_epsilon(mu, 1e-6)


def test_a_fixed_order_counts_the_epochs_that_have_begun() -> None:
    one, two = (gaussian_epsilon(math.sqrt(times) / 2.0, 1e-5) for times in (1, 2))
    assert fixed_order_epsilon([(2.0, 0.1, 1)], 1e-5) == one
    assert fixed_order_epsilon([(2.0, 0.1, 10)], 1e-5) == one  # 10 * 0.1 is one epoch; its last bit may differ
    assert fixed_order_epsilon([(2.0, 0.1, 11)], 1e-5) == two


def test_an_epoch_with_a_partial_last_step_is_one_participation() -> None:
    one, two, four = (gaussian_epsilon(math.sqrt(times), 1e-5) for times in (1, 2, 4))
    q = 256 / 60_000  # 234.4 steps
    assert round(one, 2) == 4.38
    assert [fixed_order_epsilon([(1.0, q, steps)], 1e-5) for steps in (1, 235, 236, 470)] == [one, one, two, two]
    assert fixed_order_epsilon([(1.0, q, 471), (1.0, 1.0, 1)], 1e-5) == four
    for batch, records in ((3, 9), (7, 49), (1, 3), (999, 2997), (4096, 1 << 40)):
        whole = -(-records // batch)
        assert fixed_order_epsilon([(1.0, batch / records, whole)], 1e-5) == one
        assert fixed_order_epsilon([(1.0, batch / records, whole + 1)], 1e-5) == two


SHUFFLED = [(0.5, 9.997, 5.026), (0.6, 8.000, 2.779), (0.8, 5.554, 0.888), (1.0, 3.761, 0.393)]


@pytest.mark.parametrize(("sigma", "shuffled", "poisson"), SHUFFLED)
def test_shuffling_spends_more_than_poisson_samples_of_the_same_size(
    sigma: float, shuffled: float, poisson: float
) -> None:
    """One epoch over 60,000 records in batches of 256, at delta 1e-5."""
    history = [(sigma, 256 / 60_000, 234)]
    at_least = shuffled_epsilon_at_least(sigma, 234, 1e-5)
    assert at_least == pytest.approx(shuffled, abs=6e-4)
    assert epsilon_of(history, 1e-5) == pytest.approx(poisson, abs=0.012)  # prv's stated error, and rounding
    assert epsilon_of(history, 1e-5) < at_least <= fixed_order_epsilon(history, 1e-5)


@pytest.mark.parametrize("sigma", [0.03, 0.02, 1e-3, 1e-6, 1e-9, 1e-50, 1e-300])
def test_bounds_keep_their_order_for_tiny_noise(sigma: float) -> None:
    """Likelihoods leave the range of floats long before sigma does."""
    history = [(sigma, 0.01, 100)]
    at_least, fixed = shuffled_epsilon_at_least(sigma, 100, 1e-5), fixed_order_epsilon(history, 1e-5)
    assert shuffled_epsilon_at_least(0.1, 100, 1e-5) < at_least <= fixed
    assert epsilon_of(history, 1e-5) >= epsilon_of([(0.1, 0.01, 100)], 1e-5)
    assert epsilon_of([(sigma, 1.0, 1)], 1e-5) == fixed


@pytest.mark.parametrize("sigma", [0.05, 0.1, 0.3, 0.5, 1.0])
def test_the_attack_on_shuffled_batches_matches_its_definition(sigma: float) -> None:
    """The chance that the largest sum of an epoch is above a threshold, with the record and without it."""
    thresholds = np.linspace(0, 2 * (1 + 6 * sigma), 2001)
    epsilon = shuffled_epsilon_at_least(sigma, 100, 1e-5)
    others = 99 * stats.norm.logcdf(thresholds / sigma)
    with_it, without = (-np.expm1(stats.norm.logcdf((thresholds - mean) / sigma) + others) for mean in (2, 1))
    assert (with_it - np.exp(epsilon) * without).max() == pytest.approx(1e-5, rel=1e-3)
