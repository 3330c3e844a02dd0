"""Advice on batches that are too small for their noise."""

from __future__ import annotations

import math
import re
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import trainstack as ts
from tests.backends.dp.support import make_plan
from tests.helpers.modules import Classifier
from tests.helpers.private_runs import private, promise
from trainstack.backends.dp import PrivacyPlan, epsilon_of
from trainstack.backends.dp.batch_advice import LEAST_RATIO, advice_rows, larger_batch, signal_to_noise
from trainstack.backends.dp.epsilon import _renyi
from trainstack.cli.main import main

FAR_TOO_FEW = "all 41 records in each step"


def plan_of(epochs: int = 30, **given: Any) -> PrivacyPlan:
    steps = epochs * math.ceil(given["records"] / given["batch"])
    return make_plan(**{"delta": 1e-7, **given}, steps=steps)[0]


def test_the_ratio_is_the_limit_over_the_norm_of_noise() -> None:
    batch, sigma, parameters, limit = 64, 1.7, 40_000, 0.3
    noise = torch.randn(parameters, generator=torch.Generator().manual_seed(0)) * sigma * limit / batch
    assert signal_to_noise(batch, sigma, parameters) == pytest.approx(limit / float(noise.norm()), rel=0.02)


@pytest.mark.parametrize(
    ("records", "batch", "sigma", "parameters"),
    [(1437, 64, 1.7, 4810), (60_000, 240, 0.97, 10**6), (10**6, 1000, 0.6, 10**7), (5000, 50, 3.0, 30_000)],
)
def test_the_larger_batch_suffices_at_the_same_epsilon_and_epochs(
    records: int, batch: int, sigma: float, parameters: int
) -> None:
    plan = plan_of(records=records, batch=batch, noise_multiplier=sigma)
    larger, noise = larger_batch(plan, parameters)
    assert batch < larger <= records
    steps = math.ceil(plan.planned_steps * batch / larger)
    spent = epsilon_of([(sigma, batch / records, plan.planned_steps)], plan.delta, "rdp")
    assert 0.8 * spent < epsilon_of([(noise, larger / records, steps)], plan.delta, "rdp") <= spent
    assert 0.98 * LEAST_RATIO <= signal_to_noise(larger, noise, parameters) < 1.15 * LEAST_RATIO


def test_the_advice_does_not_delay_the_start() -> None:
    plan = plan_of(records=10**6, batch=1000, noise_multiplier=0.6)
    larger_batch(plan, 10**7)  # imports the accountant, which a private run needs in any case
    _renyi.cache_clear()
    began = time.process_time()
    larger_batch(plan, 10**7)
    assert time.process_time() - began < 0.3


def test_advice_has_a_larger_batch_or_says_that_none_suffices() -> None:
    plan = plan_of(records=1437, batch=64, noise_multiplier=1.7)
    ((label, text),) = advice_rows(plan, 4810)
    assert label == "signal to noise"
    assert text.startswith("0.54 = batch 64 / (noise multiplier 1.7 * sqrt(4,810 trained parameters))")
    assert int(re.findall(r"train_batch_size=(\d+) gives 1 ", text)[0]) == larger_batch(plan, 4810)[0]

    ((_, enough),) = advice_rows(plan, 100)
    assert "\n" not in enough
    ((_, hopeless),) = advice_rows(plan, 10**6)
    assert "all 1437 records in each step would give" in hopeless
    ((_, whole),) = advice_rows(plan_of(records=1437, batch=1437, noise_multiplier=5.0), 10**6)
    assert "longer than the gradient: the batch has all records already. Train fewer parameters" in whole
    assert advice_rows(plan_of(records=1437, batch=64, noise_multiplier=0.0), 4810) == []
    assert "\n" not in advice_rows(plan_of(records=1437, batch=64, noise_multiplier=0.01), 10**12)[0][1]


def test_the_printed_plan_has_the_ratio(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    args = private(tmp_path, promise(noise_multiplier=2.0), max_steps=1, writers=["stdout"])
    ts.Trainer(Classifier(), args).train()
    printed = " ".join(capsys.readouterr().out.split())
    assert "8 on average, a new random sample each step" in printed
    assert "signal to noise" in printed
    assert FAR_TOO_FEW in printed


def test_the_command_prints_the_ratio_for_a_number_of_parameters(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["plan", "--samples", "1437", "--processes", "3", "--train_batch_size", "64", "--backend", "ddp-dp"]
    words += ["--differential_privacy_args.delta", "1e-4", "--differential_privacy_args.noise_multiplier", "1.7"]
    assert main(words) == 0
    assert "--parameters P, of the model" in capsys.readouterr().out
    assert main([*words, "--parameters", "4810"]) == 0
    printed = capsys.readouterr().out
    assert "0.54 = batch 64 /" in printed
    assert "3 processes, micro-batches of at most 22" in printed
    assert main(["plan", "--samples", "10", "--parameters", "0"]) != 0
