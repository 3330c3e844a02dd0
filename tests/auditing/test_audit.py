"""The privacy audit finds every planted fault, without false alarms."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, default_collate

import trainstack as ts
from tests.helpers.modules import Classifier, Noisy, arguments, numbers
from tests.helpers.processes import run_world
from tests.helpers.workers.private import audited
from tools.broken_privacy import BROKEN, SETTINGS, broken
from trainstack.auditing import AuditReport, Finding, audit, audit_module
from trainstack.auditing.canaries import AuditedRun
from trainstack.auditing.canary_bounds import (
    EPSILONS,
    canary_audit,
    epsilon_at_least,
    guess_p_value,
    judge_guesses,
    privacy_profile,
)
from trainstack.auditing.mechanism_probes import (
    count_probe,
    displaced,
    judge_masks,
    judge_noise,
    noise_probe,
    sampling_probe,
)
from trainstack.auditing.report import IMPLAUSIBLE
from trainstack.backends.dp import DifferentialPrivacyArguments, epsilon_of
from trainstack.backends.dp.epsilon import gaussian_delta
from trainstack.errors import ConfigurationError

pytestmark = pytest.mark.slow
RUNS = 2

PROBES: dict[str, Any] = {
    "noise": lambda subject: [*noise_probe(subject), *count_probe(subject)],
    "account": noise_probe,
    "sampling": sampling_probe,
    "canaries": lambda subject: canary_audit(subject, RUNS).findings,
}


def private(**given: Any) -> DifferentialPrivacyArguments:
    return DifferentialPrivacyArguments(**{"delta": 1e-6, "noise_multiplier": 2.0, **given})


def blamed(findings: Any) -> list[str]:
    return [f"{finding.claim}: {finding.seen} (p = {finding.p_value})" for finding in findings if not finding.holds]


# --- planted faults


@pytest.mark.usefixtures("unprobed")
@pytest.mark.parametrize(
    ("how", "probe"), [(how, probe) for how, (_, must) in BROKEN.items() for probe in sorted(must)]
)
def test_each_probe_finds_its_faults(how: str, probe: str) -> None:
    with broken(how):
        findings = PROBES[probe](AuditedRun(args=private(**SETTINGS.get(how, {}))))
    assert blamed([finding for finding in findings if finding.probe == probe])


def test_the_faults_are_sixteen() -> None:
    assert len(BROKEN) == 16


@pytest.mark.usefixtures("unprobed")
def test_a_correct_mechanism_passes() -> None:
    """Nothing is seeded: one audit in some 70,000 may fail here. `make bench ARGS=audit` makes forty."""
    report = audit(private())
    assert blamed(report.findings) == []
    assert report.verdict == "nothing found"
    assert report.epsilon_claimed == pytest.approx(epsilon_of([(2.0, 0.25, 8)], 1e-6))
    assert report.epsilon_at_least is not None
    assert report.epsilon_at_least_tradeoff is not None
    assert 0.1 < report.epsilon_at_least < report.epsilon_at_least_tradeoff < report.epsilon_claimed


@pytest.mark.usefixtures("unprobed")
@pytest.mark.parametrize(
    "given",
    [
        {"clipping": "automatic"},
        {"clipping": "adaptive", "per_sample_max_grad_norm": 0.1},
        {"clipping": "per_layer", "per_sample_max_grad_norm": (0.5, 2.0)},
        {"secure": True},
        pytest.param({"grad_mode": "vmap", "per_sample_max_grad_norm": 30.0}, marks=pytest.mark.long),
        pytest.param({"grad_mode": "loop"}, marks=pytest.mark.long),
        pytest.param({"noise_multiplier": None, "target_epsilon": 3.0, "accountant": "rdp"}, marks=pytest.mark.long),
    ],
    ids=lambda given: "-".join(map(str, given.values())),
)
def test_other_correct_settings_pass(given: dict[str, Any]) -> None:
    subject = AuditedRun(args=private(**given), dataset_size=200, train_batch_size=20, epochs=1)
    assert blamed(noise_probe(subject)) == []
    assert blamed(sampling_probe(subject)) == []


@pytest.mark.usefixtures("unprobed")
def test_the_least_likely_pair_is_shown() -> None:
    subject = AuditedRun(args=private(), dataset_size=200, train_batch_size=20, epochs=1)
    seen = {finding.claim: finding.seen for finding in sampling_probe(subject)}
    assert re.search(r"expected, the (most|fewest) of 45 pairs$", seen["each step is drawn separately"])
    assert re.search(r"expected, the (most|fewest) of 100 pairs$", seen["each run is drawn separately"])
    assert seen["each record is drawn alone"].endswith("are expected")


@pytest.mark.usefixtures("unprobed")
def test_half_precision_passes() -> None:
    subject = AuditedRun(args=private(), backend="sp-dp-bf16", dataset_size=200, train_batch_size=20, epochs=1)
    assert blamed(noise_probe(subject)) + blamed(sampling_probe(subject)) == []


@pytest.mark.usefixtures("unprobed")
def test_a_debug_seed_is_found() -> None:
    findings = noise_probe(AuditedRun(args=private(debug_seed=1)))
    assert [finding.claim for finding in findings if not finding.holds] == ["it is new in every run"]


@pytest.mark.distributed
def test_processes_are_audited_together() -> None:
    one, other = run_world(2, audited)
    assert one == other
    assert one["report"]["verdict"] == "nothing found"
    assert one["report"]["subject"].startswith("ddp-dp")


# --- p-values


@pytest.mark.parametrize(("records", "rate", "steps"), [(100, 0.01, 60), (100, 0.5, 3), (400, 0.25, 8)])
def test_p_values_of_masks_are_not_too_small(records: int, rate: float, steps: int) -> None:
    rng, tries = np.random.default_rng(7), 40
    small: dict[str, int] = {}
    for _ in range(tries):
        first, second = (torch.from_numpy(rng.random((steps, records)) < rate) for _ in range(2))
        for finding in judge_masks(first, second, rate):
            small[finding.claim] = small.get(finding.claim, 0) + (finding.p_value <= 0.1)
    assert len(small) == 6
    assert max(small.values()) <= 0.1 * tries + 3 * math.sqrt(0.09 * tries), small


@pytest.mark.parametrize(("weights", "steps"), [(100, 2), (401, 8)])
def test_p_values_of_noise_are_not_too_small(weights: int, steps: int) -> None:
    rng, tries = np.random.default_rng(7), 40
    small: dict[str, int] = {}
    for _ in range(tries):
        first, second = (torch.from_numpy(rng.standard_normal((steps, weights))) for _ in range(2))
        for finding in judge_noise(first.split([60, weights - 60], 1), second.split([60, weights - 60], 1)):
            small[finding.claim] = small.get(finding.claim, 0) + (finding.p_value <= 0.1)
    assert len(small) == 7
    assert max(small.values()) <= 0.1 * tries + 3 * math.sqrt(0.09 * tries), small


def test_a_displaced_vector_is_found() -> None:
    rng = np.random.default_rng(3)
    left, right = rng.standard_normal((2, 40)), rng.standard_normal((2, 100))
    z = displaced(left, right)
    assert np.abs(z).max() < 5
    direct = (left[0] * right[0, 7:47]).sum() / np.linalg.norm(right[0, 7:47])
    assert np.isclose(z, direct).any()
    right[:, 30:70] = left
    assert displaced(left, right).max() > 5
    assert displaced(right, left).max() > 5


# --- from guesses to epsilon


def test_the_bound_for_all_right_guesses_is_the_closed_form() -> None:
    """100 of 100 guesses are right with probability p^100, p = e^epsilon / (1 + e^epsilon). The bound is at 0.05."""
    p = 0.05 ** (1 / 100)
    found = epsilon_at_least(0.0, canaries=100, guesses=100, right=100)
    assert found == pytest.approx(math.log(p / (1 - p)), abs=1e-6)
    assert found == pytest.approx(3.49, abs=0.005)


def test_a_larger_delta_weakens_the_bound() -> None:
    exact = guess_p_value(1.0, 0.0, canaries=1000, guesses=100, right=90)
    assert guess_p_value(1.0, 1e-5, canaries=1000, guesses=100, right=90) > exact
    assert epsilon_at_least(1e-3, canaries=1000, guesses=100, right=95) < epsilon_at_least(
        1e-6, canaries=1000, guesses=100, right=95
    )


def test_more_right_guesses_raise_the_bound() -> None:
    bounds = [epsilon_at_least(1e-6, canaries=1000, guesses=200, right=right) for right in range(100, 201, 10)]
    assert bounds == sorted(bounds)
    assert bounds[0] == 0.0
    assert bounds[-1] > 3


@pytest.mark.parametrize(("sigma", "steps"), [(2.0, 1), (1.0, 1), (4.0, 16)])
def test_the_privacy_profile_without_sampling_equals_its_closed_form(sigma: float, steps: int) -> None:
    exact = np.array([gaussian_delta(math.sqrt(steps) / sigma, epsilon) for epsilon in EPSILONS])
    found = privacy_profile(sigma, 1.0, steps)
    assert (found >= exact).all()
    np.testing.assert_allclose(found, exact, rtol=0.05, atol=1e-9)


@pytest.mark.parametrize(("sigma", "rate", "steps"), [(2.0, 0.25, 8), (1.0, 0.1, 20)])
def test_the_privacy_profile_agrees_with_the_accountant(sigma: float, rate: float, steps: int) -> None:
    epsilon = epsilon_of([(sigma, rate, steps)], 1e-6)  # at most 0.01 above the truth
    found = np.interp(-math.log(1e-6), -np.log(privacy_profile(sigma, rate, steps)), EPSILONS)
    assert epsilon - 0.03 <= found <= epsilon + 0.01


@pytest.mark.parametrize("rate", [0.01, 0.25, 1.0])
@pytest.mark.parametrize(("sigma", "most"), [(0.03, 1.01), (1e-3, 100.0), (1e-9, 100.0)])
def test_the_privacy_profile_without_noise_is_the_sampling_probability(sigma: float, most: float, rate: float) -> None:
    found, drawn = privacy_profile(sigma, rate, 8)[-1], 1 - (1 - rate) ** 8
    assert 0.999 * drawn <= found <= min(most * drawn, 1 + 1e-9)


@pytest.mark.usefixtures("unprobed")
def test_an_audit_with_little_noise_passes() -> None:
    report = audit(private(noise_multiplier=0.03), dataset_size=400, train_batch_size=100, epochs=1)
    assert blamed(report.findings) == []


def guessed(noise: float, stated: float, canaries: int = 10_000, seed: int = 0) -> Any:
    """A single step with all records, whose noise differs from the stated one."""
    rng = np.random.default_rng(seed)
    coins = rng.random(canaries) < 0.5
    scores = coins + noise * rng.standard_normal(canaries)
    return judge_guesses(torch.from_numpy(scores), torch.from_numpy(coins), (stated, 1.0, 1), 1e-6, "prv")


def test_the_trade_off_proves_half_the_noise() -> None:
    bounds = guessed(noise=1.0, stated=2.0)
    assert bounds.claimed == pytest.approx(2.264, abs=0.02)
    assert bounds.one_run == pytest.approx(1.86, abs=0.4)
    assert bounds.tradeoff == pytest.approx(2.87, abs=0.4)
    assert bounds.one_run < bounds.claimed < bounds.tradeoff
    assert bounds.findings[1].p_value < 0.05 < bounds.findings[0].p_value


def test_bounds_of_a_correct_mechanism_stay_below_the_stated_epsilon() -> None:
    for seed in range(2):
        bounds = guessed(noise=2.0, stated=2.0, seed=seed)
        assert 0.3 < bounds.one_run < bounds.tradeoff < bounds.claimed
        assert all(finding.p_value > IMPLAUSIBLE for finding in bounds.findings)


# --- custom modules


class Centred(Classifier):
    """Subtracts the mean of the batch from every record in the collate function, before any gradient mode."""

    def get_train_dataloader(self, sampler: Any, batch_size: int) -> Any:
        def collate(batch: Any) -> Any:
            inputs, labels = default_collate(batch)
            return inputs - inputs.mean(0), labels

        data = self.dataset
        return DataLoader(data, sampler=sampler(data), batch_size=batch_size, collate_fn=collate)


def private_run(folder: Path, **changes: Any) -> ts.TrainerArguments:
    values = {"backend": "sp-dp", "train_batch_size": 8, "differential_privacy_args": private(delta=1e-3), **changes}
    return arguments(folder, **values)


def test_a_module_without_coupled_records_passes_unchanged(tmp_path: Path) -> None:
    module = Classifier(numbers(64))
    before = {name: value.clone() for name, value in module.state_dict().items()}
    args = private_run(tmp_path, differential_privacy_args=private(delta=1e-3, ledger=tmp_path / "data.ledger"))
    report = audit_module(module, args, rounds=1, records=20)
    assert report.verdict == "nothing found"
    probes = [finding.probe for finding in report.findings]
    assert probes == ["neighbours", *["own records"] * 3, *["noise"] * 7, "account"]
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())
    assert list(tmp_path.iterdir()) == []  # no charge in the ledger of the dataset
    run = ts.Trainer(module, args)
    run.train()
    assert run.privacy_statement().steps == run.global_steps_finished  # the steps of the audit do not count
    assert audit_module(module, args, rounds=1, records=2).verdict == "nothing found"


class Unrepeatable(Classifier):
    """Draws noise from a generator without a seed."""

    def train_step(self, global_step: int, batch: Any, device: Any) -> Any:
        noise = torch.from_numpy(np.random.default_rng().standard_normal(batch[0].shape)).float()
        return super().train_step(global_step, (batch[0] + noise, batch[1]), device)


def test_random_numbers_that_cannot_be_repeated_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ts.PrivacyError, match="changes in a forward pass"):
        audit_module(Unrepeatable(numbers(64)), private_run(tmp_path), rounds=1, records=10)


def test_a_module_with_dropout_and_augmentation_passes(tmp_path: Path) -> None:
    """The random numbers of a record do not depend on the other records of the batch."""
    report = audit_module(Classifier(Noisy(64), dropout=0.5), private_run(tmp_path), rounds=1, records=20)
    assert blamed(report.findings) == []


@pytest.mark.usefixtures("unprobed")
@pytest.mark.parametrize(
    ("how", "claim"),
    [
        ("clipped to 10 C", "each of 20 records left out moves the sum by C at most"),
        ("0.8 of the noise", "its standard deviation is as stated"),
        ("one vector for all layers", "it is new for every parameter"),
        ("half the steps charged", "every update is in the statement"),
    ],
)
def test_faults_are_found_with_a_custom_module(how: str, claim: str, tmp_path: Path) -> None:
    with broken(how):
        report = audit_module(Wide(numbers(64)), private_run(tmp_path), rounds=1, records=20)
    assert claim in [finding.claim for finding in report.broken]


class Wide(Classifier):
    """Has enough weights for a test of noise to detect 0.8 of it."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.net = torch.nn.Sequential(torch.nn.Linear(6, 300), torch.nn.Tanh(), torch.nn.Linear(300, 3))


def test_a_module_that_couples_records_fails(tmp_path: Path) -> None:
    report = audit_module(Centred(numbers(64)), private_run(tmp_path), rounds=1, records=2)
    assert report.verdict.startswith("BROKEN")
    assert "the gradients of other records change" in report.verdict


# --- arguments and reports


def test_a_training_that_cannot_be_audited_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="'sp' is not private"):
        audit(private(), "sp")
    with pytest.raises(ConfigurationError, match="'sp' is not private"):
        audit_module(Classifier(numbers(64)), private_run(tmp_path, backend="sp", differential_privacy_args=None))
    with pytest.raises(ConfigurationError, match="at least 1 round and 2 records"):
        audit_module(Classifier(numbers(64)), private_run(tmp_path), records=1)
    with pytest.raises(ConfigurationError, match="write 'quick' or 'full'"):
        audit(private(), level="quik")
    with pytest.raises(ConfigurationError, match="noise_multiplier=0 promises nothing"):
        audit(private(noise_multiplier=0.0))
    with pytest.raises(ConfigurationError, match="at least 100 records"):
        audit(private(), dataset_size=50, train_batch_size=10)


def test_a_bound_above_the_stated_epsilon_suggests_another_audit() -> None:
    bounds = {"epsilon_at_least": 1.9, "epsilon_at_least_tradeoff": 2.8}
    report = AuditReport(subject="sp-dp", findings=(), epsilon_claimed=2.0, delta=1e-6, **bounds)
    assert report.verdict == "nothing found"
    assert "audit again, and believe it if it happens again" in report.text
    assert "again" not in replace(report, epsilon_at_least_tradeoff=1.95).text


def test_a_report_has_measurements_and_conclusions() -> None:
    good = Finding(probe="noise", claim="it is new in every run", seen="correlation 0.01", p_value=0.3)
    bad = Finding(probe="noise", claim="it is new in every step", seen="correlation 1", p_value=1e-9)
    report = AuditReport(
        subject="sp-dp",
        findings=(good, bad),
        epsilon_claimed=2.0,
        delta=1e-6,
        epsilon_at_least=0.5,
        epsilon_at_least_tradeoff=1.0,
    )
    assert report.broken == (bad,)
    assert report.verdict == "BROKEN: not so: it is new in every step (noise: correlation 1)"
    lines = report.text.splitlines()
    assert lines[0] == "audit of sp-dp"
    assert not lines[2].endswith("BROKEN")
    assert lines[3].endswith("BROKEN")
    assert "at least 0.5, or 1 if" in lines[4]
    told = json.loads(report.to_json())
    assert told["epsilon_claimed"] == 2.0
    assert told["findings"][1]["p_value"] == 1e-9
