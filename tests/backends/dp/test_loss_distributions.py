"""`accountant="pld"`: dp_accounting's privacy loss distributions, where the others are loose."""

from __future__ import annotations

import sys
from functools import partial

import pytest

from tests.backends.dp.support import make_accountant
from trainstack.backends.dp import calibrate_noise, epsilon_of
from trainstack.backends.dp.loss_distributions import pld_epsilon
from trainstack.errors import MissingExtraError

epsilon = partial(epsilon_of, accountant="pld")


@pytest.mark.slow
def test_a_million_steps_at_a_tiny_delta_are_bounded_tightly() -> None:
    history = [(1.0, 1e-6, 10**6)]
    assert 0.0130 <= epsilon(history, 1e-9) < 0.0132  # dp_accounting on a grid of 1e-5: 0.0130
    assert epsilon_of(history, 1e-9) == pytest.approx(0.633, abs=1e-3)


def test_it_gives_a_published_figure() -> None:
    history = [(1.5, 0.05, 1000)]  # Opacus' test of prv; by dp_accounting 6.1997
    assert 6.1997 - 5e-5 <= epsilon(history, 1e-6) <= 6.1997 + 1e-3
    assert epsilon(history, 1e-6) < epsilon_of(history, 1e-6, "prv")


def test_kinds_of_noise_compose() -> None:
    parts = [(1.0, 0.01, 50), (2.0, 0.02, 70)]
    whole, prv = epsilon(parts, 1e-5), epsilon_of(parts, 1e-5, "prv")
    assert max(epsilon([part], 1e-5) for part in parts) < whole < sum(epsilon([part], 1e-5) for part in parts)
    assert prv - 0.0105 < whole < prv  # prv adds 0.01 for its error


def test_it_equals_other_accountants_at_the_ends_of_its_range() -> None:
    assert epsilon([], 1e-5) == 0.0
    assert epsilon([(0.0, 0.1, 1)], 1e-5) == float("inf")
    assert epsilon([(2.0, 1.0, 10)], 1e-5) == epsilon_of([(2.0, 1.0, 10)], 1e-5, "prv")
    beyond = [(0.3, 0.5, 100)]  # epsilon above 50
    assert epsilon(beyond, 1e-5) == epsilon_of(beyond, 1e-5, "rdp")
    assert pld_epsilon([(1.0, 0.1, 10**6)], 1e-10, 40.0) == float("inf")  # delta is below the rounding of the transform


@pytest.mark.slow
def test_noise_and_budgets_follow_the_chosen_accountant() -> None:
    sigma = calibrate_noise(0.5, 1e-5, 0.05, 5, "pld")
    assert 0.49 < epsilon([(sigma, 0.05, 5)], 1e-5) <= 0.5
    assert sigma < calibrate_noise(0.5, 1e-5, 0.05, 5)
    run = make_accountant(accountant="pld", noise_multiplier=sigma, max_epsilon=0.5, batch=10, steps=5)
    assert run.allows(5)
    assert not run.allows(6)


def test_without_the_package_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    class Missing:
        @staticmethod
        def find_spec(name: str, *_: object) -> None:
            if name == "dp_accounting":
                raise ModuleNotFoundError(f"No module named {name!r}", name=name)

    for name in [name for name in sys.modules if name.partition(".")[0] == "dp_accounting"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "meta_path", [Missing, *sys.meta_path])
    with pytest.raises(MissingExtraError, match=r"trainstack\[pld\]"):
        epsilon([(1.1, 0.01, 10)], 1e-5)
