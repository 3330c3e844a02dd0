"""`DifferentialPrivacyArguments` and `plan_privacy`: refused values with a correction, and derived values."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.backends.dp.support import make_plan
from trainstack.backends.dp import DifferentialPrivacyArguments, calibrate_noise, epsilon_of, plan_privacy
from trainstack.backends.dp.arguments import check_delta_for
from trainstack.backends.dp.clipping import AdaptiveClipper
from trainstack.backends.dp.telemetry import Telemetry
from trainstack.errors import ConfigurationError

MISTAKES: list[tuple[dict[str, Any], str]] = [
    ({"delta": math.nan}, r"delta is missing: .*Choose it smaller than 1 / \(number of records\)"),
    ({"delta": 0.0}, r"delta=0\.0: write a number between 0 and 1"),
    ({"delta": 1}, "delta=1: write a number between 0 and 1"),
    ({"delta": "1e-5"}, "delta='1e-5': write a number"),
    ({"noise_multiplier": None}, "noise_multiplier=None and target_epsilon=None: exactly one of the two"),
    ({"target_epsilon": 2.0}, r"noise_multiplier=1\.0 and target_epsilon=2\.0: exactly one of the two"),
    ({"noise_multiplier": -1.0}, r"noise_multiplier=-1\.0: write a number, 0 or more"),
    ({"noise_multiplier": math.inf}, "noise_multiplier=inf"),
    ({"noise_multiplier": True}, "noise_multiplier=True: write a number"),
    ({"noise_multiplier": None, "target_epsilon": 0.0}, r"target_epsilon=0\.0: write a number above 0"),
    ({"max_epsilon": -2.0}, r"max_epsilon=-2\.0: write a number above 0"),
    ({"noise_multiplier": 0.0, "max_epsilon": 2.0}, "without noise epsilon is infinite from the first step"),
    ({"sample_rate": 1.5}, r"sample_rate=1\.5: .*batch size / data set size"),
    ({"per_sample_max_grad_norm": 0.0}, r"per_sample_max_grad_norm=0\.0: write a number above 0"),
    ({"per_sample_max_grad_norm": 1e-20}, "at least 1e-09, because float32 loses the squares"),
    ({"per_sample_max_grad_norm": "1"}, "per_sample_max_grad_norm='1': write a number above 0"),
    ({"per_sample_max_grad_norm": [1.0, math.nan], "clipping": "per_layer"}, "write a number above 0"),
    ({"per_sample_max_grad_norm": [1.0, 2.0]}, "Write clipping='per_layer', or one number"),
    ({"per_sample_max_grad_norm": [], "clipping": "per_layer"}, "several norms are one for each layer"),
    ({"clipping": "global"}, "clipping='global': Write one of 'flat', 'per_layer', 'automatic', 'adaptive'"),
    ({"grad_mode": "functorch"}, "grad_mode='functorch': Write one of 'auto', 'bookkeeping', 'vmap'"),
    ({"accountant": "gdp"}, "accountant='gdp': it reports too little. Write one of 'prv', 'rdp'"),
    ({"on_unsafe": "ignore"}, "on_unsafe='ignore': Write one of 'error', 'report'"),
    ({"secure": 1}, "secure=1: write True or False"),
    ({"log_train_loss": None}, "log_train_loss=None: write True or False"),
    ({"allow_plan_change": "yes"}, "allow_plan_change='yes': write True or False"),
    ({"dataset_size": 0}, "dataset_size=0: write a whole number, 1 or more"),
    ({"debug_seed": 1.5}, r"debug_seed=1\.5: write a whole number"),
    ({"debug_seed": 1, "secure": True}, "secure=True and debug_seed=1: a seed makes the noise known"),
    ({"target_quantile": 1.0}, r"target_quantile=1\.0: write a number between 0 and 1"),
    ({"clip_learning_rate": 0.0}, r"clip_learning_rate=0\.0: write a number above 0"),
    ({"count_noise_multiplier": 3.0}, "only adaptive clipping counts"),
    ({"count_noise_multiplier": 0.5, "clipping": "adaptive"}, "write a number above half of the noise multiplier"),
    ({"count_noise_multiplier": math.nan, "clipping": "adaptive"}, "count_noise_multiplier=nan"),
]


@pytest.mark.parametrize(("given", "words"), MISTAKES, ids=[str(given) for given, _ in MISTAKES])
def test_a_mistake_is_answered_with_a_correction(given: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        DifferentialPrivacyArguments(**{"delta": 1e-5, "noise_multiplier": 1.0, **given})


def test_an_adaptive_limit_stays_above_the_smallest_one() -> None:
    plan, args = make_plan(noise_multiplier=1.0, clipping="adaptive")
    clipper = AdaptiveClipper(1.05e-9)
    Telemetry(args, plan, clipper, one_by_one=True).release(torch.tensor([1.0]))  # no record is clipped
    assert clipper.limit == 1e-9


def test_delta_is_asked_for_when_nothing_is_given() -> None:
    with pytest.raises(ConfigurationError, match="delta is missing"):
        DifferentialPrivacyArguments()


def test_the_arguments_are_frozen_and_by_keyword() -> None:
    args = DifferentialPrivacyArguments(delta=1e-5, noise_multiplier=1.0)
    with pytest.raises(dataclasses.FrozenInstanceError):
        args.delta = 1e-6  # type: ignore[misc]
    with pytest.raises(TypeError):
        DifferentialPrivacyArguments(1e-5)  # type: ignore[misc]


def test_the_budget_is_the_target_unless_said_otherwise() -> None:
    assert make_plan(noise_multiplier=1.0)[0].max_epsilon is None
    assert make_plan(target_epsilon=2.0)[0].max_epsilon == 2.0
    assert make_plan(target_epsilon=2.0, max_epsilon=1.5)[0].max_epsilon == 1.5


@pytest.mark.spec("O13")
@given(st.integers(1, 20_000), st.integers(1, 20_000))
def test_rate_and_denominator_follow_from_batch_and_data_set_size(batch: int, records: int) -> None:
    batch = min(batch, records)
    plan, _ = make_plan(noise_multiplier=1.0, delta=1e-9, batch=batch, records=records)
    assert plan.sample_rate == batch / records
    assert (plan.expected_batch_size, plan.dataset_size) == (batch, records)


def test_a_public_dataset_size_replaces_the_true_number_of_records() -> None:
    plan, _ = make_plan(noise_multiplier=1.0, batch=10, records=203, dataset_size=200)
    assert (plan.sample_rate, plan.dataset_size) == (0.05, 200)


def test_a_sample_rate_is_accepted_where_it_agrees() -> None:
    assert make_plan(noise_multiplier=1.0, sample_rate=0.02)[0].sample_rate == 0.02
    assert make_plan(noise_multiplier=1.0, sample_rate=0.333333333, batch=1, records=3)[0].sample_rate == 1 / 3
    with pytest.raises(ConfigurationError, match=r"sample_rate=0\.03 contradicts train_batch_size=4 over 200 records"):
        make_plan(noise_multiplier=1.0, sample_rate=0.03)


def test_a_batch_above_the_data_set_is_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"train_batch_size=201 with 200 records: .* Write at most 200"):
        make_plan(noise_multiplier=1.0, batch=201)


@pytest.mark.parametrize(("records", "instead"), [(200, "0.002"), (60_000, "8e-06"), (1, "0.5")])
def test_a_delta_that_lets_a_record_be_published_is_refused(records: int, instead: str) -> None:
    with pytest.raises(ConfigurationError, match=rf"less than 1/{records} = .*, for example {instead}\.$"):
        check_delta_for(1 / records, records)
    check_delta_for(float(instead), records)


@pytest.mark.slow
def test_noise_is_calibrated_for_all_planned_steps() -> None:
    plan, args = make_plan(target_epsilon=2.0, accountant="prv")
    assert plan.noise_multiplier == calibrate_noise(2.0, 1e-5, 0.02, 100)
    assert 1.98 < epsilon_of([(plan.noise_multiplier, 0.02, 100)], 1e-5) <= 2.0
    longer = plan_privacy(args, expected_batch_size=4, dataset_size=200, steps=400)
    assert longer.noise_multiplier > plan.noise_multiplier


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("max_grad_norm", "Write per_sample_max_grad_norm."),
        ("epsilon", "Write target_epsilon."),
        ("noise_multplier", "Write noise_multiplier."),
        ("max_physical_batch_size", "gpu_batch_size_limit"),
        ("zzz", "The arguments are accountant, allow_plan_change"),
    ],
)
def test_an_unknown_argument_is_answered_with_the_one_to_write(name: str, said: str) -> None:
    values: dict[str, Any] = {"delta": 1e-5, "noise_multiplier": 1.0, name: 1.0}
    with pytest.raises(ConfigurationError, match=f"no argument '{name}'.*{said}"):
        DifferentialPrivacyArguments(**values)
