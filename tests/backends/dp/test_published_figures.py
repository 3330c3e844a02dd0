"""Figures from the tests of TF-Privacy, Opacus and dp_accounting, to all published digits."""

from __future__ import annotations

import math
from typing import NamedTuple

import pytest

from trainstack.backends.dp import calibrate_noise, delta_of, epsilon_of
from trainstack.backends.dp.epsilon import import_opacus


class Figure(NamedTuple):
    sigma: float
    q: float
    steps: int
    delta: float
    rdp: float
    prv: float
    pld: float  # dp_accounting's privacy loss distributions, pessimistic, grid 1e-4

    @property
    def history(self) -> list[tuple[float, float, int]]:
        return [(self.sigma, self.q, self.steps)]


FIGURES = {
    "TF-Privacy compute_dp_sgd_privacy 0": Figure(1.3, 150 / 60000, 6000, 1e-5, 0.7242, 0.6501, 0.6401),
    "TF-Privacy compute_dp_sgd_privacy 1": Figure(1.0, 0.001, 30000, 1e-7, 1.4155, 1.1077, 1.0982),
    "TF-Privacy compute_dp_sgd_privacy pld": Figure(0.7, 0.01, 120, 1e-5, 3.2392, 2.4715, 2.4612),
    "Opacus accountants rdp": Figure(1.5, 0.04, 2250, 1e-5, 7.3291, 6.7791, 6.7688),
    "Opacus accountants prv, small delta": Figure(1.5, 0.05, 1000, 1e-6, 6.6678, 6.2100, 6.1997),
}
each_figure = pytest.mark.parametrize("figure", FIGURES.values(), ids=FIGURES)


@each_figure
def test_renyi_accounting_gives_the_published_figure(figure: Figure) -> None:
    assert epsilon_of(figure.history, figure.delta, "rdp") == pytest.approx(figure.rdp, abs=5.1e-5)


@each_figure
def test_privacy_loss_accounting_gives_the_published_figure(figure: Figure) -> None:
    assert epsilon_of(figure.history, figure.delta, "prv") == pytest.approx(figure.prv, abs=5.1e-5)


@each_figure
def test_prv_exceeds_dp_accounting_by_its_stated_error(figure: Figure) -> None:
    prv = epsilon_of(figure.history, figure.delta, "prv")
    assert prv - figure.pld == pytest.approx(0.01, abs=6e-4)  # both figures are rounded to four digits
    assert figure.pld < prv < epsilon_of(figure.history, figure.delta, "rdp")


@pytest.mark.parametrize(
    ("figure", "published"),
    [("TF-Privacy compute_dp_sgd_privacy 0", 0.7242234), ("TF-Privacy compute_dp_sgd_privacy 1", 1.4154988)],
)
def test_tf_privacys_figures_hold_to_all_their_digits(figure: str, published: float) -> None:
    found = FIGURES[figure]
    assert epsilon_of(found.history, found.delta, "rdp") == pytest.approx(published, abs=5.1e-8)


def test_opacus_figures_hold_to_all_their_digits() -> None:
    assert epsilon_of([(1.5, 0.04, 2250)], 1e-5, "rdp") == pytest.approx(7.32911117, abs=5e-9)
    assert epsilon_of([(1.5, 0.04, 2249)], 1e-5, "prv") == pytest.approx(6.77739571, abs=5e-9)
    assert epsilon_of([(1.5, 0.05, 1000)], 1e-6, "prv") == pytest.approx(6.2099692, abs=1e-6)


@pytest.mark.parametrize(
    ("figure", "published"),
    [("TF-Privacy compute_dp_sgd_privacy 0", 0.9419), ("TF-Privacy compute_dp_sgd_privacy 1", 1.7093)],
)
def test_figures_before_2021_follow_from_the_conversion_of_their_time(figure: str, published: float) -> None:
    """`rdp + log(1/delta) / (order - 1)` (Mironov 2017), over opacus' divergences; ours is smaller."""
    found = FIGURES[figure]
    orders = [1 + tenth / 10 for tenth in range(1, 100)] + [float(order) for order in range(12, 64)]
    rdp = import_opacus("opacus.accountants.analysis.rdp").compute_rdp(
        q=found.q, noise_multiplier=found.sigma, steps=found.steps, orders=orders
    )
    old = min(
        value + math.log(1 / found.delta) / (order - 1) for value, order in zip(rdp.tolist(), orders, strict=True)
    )
    assert old == pytest.approx(published, abs=5.1e-5)
    assert epsilon_of(found.history, found.delta, "rdp") < old


@pytest.mark.slow
def test_three_poisson_samples_have_the_delta_of_the_published_figure() -> None:
    """dp_accounting: Poisson(0.2) of a Gaussian of 0.5, three times, delta at epsilon 1: 0.15594 published."""
    history = [(0.5, 0.2, 3)]
    assert epsilon_of(history, 0.15594) == pytest.approx(1.0115, abs=5e-5)
    assert 0.155933 <= delta_of(1.0, history, eps_error=1e-3) <= 0.155933 * 1.003


@pytest.mark.parametrize(
    ("accountant", "steps", "published"),
    [
        ("rdp", 2250, 1.416016),
        ("rdp", 2000, 1.356201),
        pytest.param("prv", 2250, 1.34765625, marks=pytest.mark.slow),
        pytest.param("prv", 2000, 1.29150391, marks=pytest.mark.slow),
    ],
)
def test_calibration_gives_opacus_noise(accountant: str, steps: int, published: float) -> None:
    assert calibrate_noise(8.0, 1e-5, 0.04, steps, accountant) == pytest.approx(published, abs=5.1e-7)
