"""`trainstack privacy` prints the values of the library with their assumptions, and refuses mistakes in one line."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import trainstack as ts
from tests.helpers.modules import Classifier
from tests.helpers.private_runs import private, promise
from tools.broken_privacy import broken
from trainstack.backends.dp import calibrate_noise, epsilon_of, fixed_order_epsilon, steps_within
from trainstack.cli import privacy
from trainstack.cli.main import main
from trainstack.errors import ConfigurationError
from trainstack.trainer.core.plan import TrainingPlan

RATE = ["--batch-size", "150", "--dataset-size", "60000", "--delta", "1e-5"]


def ask(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    parser = argparse.ArgumentParser(prog="trainstack")
    privacy.add(parser.add_subparsers(required=True))
    args = parser.parse_args(["privacy", *words])
    assert args.run(args) == 0
    shown = capsys.readouterr()
    assert shown.err == ""
    return shown.out


def ask_json(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    return dict(json.loads(ask(capsys, *words, "--json")))


def test_epsilon_of_a_plan(capsys: pytest.CaptureFixture[str]) -> None:
    shown = ask(capsys, "epsilon", "--noise-multiplier", "1.3", "--epochs", "15", *RATE)
    assert shown.splitlines() == [
        "epsilon 0.6501 at delta 1e-05",
        "by accountant: prv 0.6501 (the smaller of both), rdp 0.7243",
        "without Poisson samples: epsilon 16.53 with batches in a fixed order, at least 1.389 with shuffled ones",
        f"assumes: {privacy.ASSUMES}",
    ]


def test_epsilon_as_json_is_not_rounded(capsys: pytest.CaptureFixture[str]) -> None:
    found = ask_json(capsys, "epsilon", "--noise-multiplier", "1.3", "--steps", "6000", *RATE)
    history = [(1.3, 150 / 60000, 6000)]
    assert found["epsilon"] == found["prv"] == epsilon_of(history, 1e-5)
    assert found["rdp"] == epsilon_of(history, 1e-5, "rdp")
    assert found["fixed_order"] == fixed_order_epsilon(history, 1e-5)
    assert (found["steps"], found["sample_rate"], found["accountant"]) == (6000, 0.0025, "prv")


def test_epsilon_is_that_of_the_given_accountant(capsys: pytest.CaptureFixture[str]) -> None:
    found = ask_json(capsys, "epsilon", "--noise-multiplier", "1.3", "--steps", "60", *RATE, "--accountant", "rdp")
    assert found["epsilon"] == found["rdp"] > found["prv"]


@pytest.mark.spec("O14")
def test_an_epoch_has_all_its_steps(capsys: pytest.CaptureFixture[str]) -> None:
    """`int(1 / q)` loses a step for 1364 of these loader lengths."""
    lengths = range(1, 20_001)
    assert sum(int(1 / (1 / length)) != length for length in lengths) == 1364
    args = argparse.Namespace(batch_size=None, dataset_size=None)
    assert all(privacy._steps_per_epoch(args, 1 / length) == length for length in lengths)
    words = ["--noise-multiplier", "2", "--epochs", "1", "--delta", "1e-5"]
    assert ask_json(capsys, "epsilon", "--sample-rate", str(1 / 93), *words)["steps"] == 93


@pytest.mark.parametrize(("batch", "records"), [(100, 149), (100, 150), (7, 7), (3, 1000)])
def test_an_epoch_has_the_steps_that_a_trainer_makes(
    batch: int, records: int, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = TrainingPlan.make(train_batch_size=batch, gpu_batch_size_limit=1, dataset_length=records, epochs=10)
    sizes = ["--batch-size", str(batch), "--dataset-size", str(records), "--delta", "1e-5"]
    rate = ["--sample-rate", str(batch / records), "--delta", "1e-5"]
    for mechanism in (sizes, rate):
        found = ask_json(capsys, "epsilon", "--noise-multiplier", "5", "--epochs", "10", *mechanism)
        assert found["steps"] == plan.total_steps


def test_a_budget_lasts_for_as_many_epochs_as_a_trainer_makes(capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["--batch-size", "100", "--dataset-size", "149", "--delta", "1e-3", "--accountant", "rdp"]
    found = ask_json(capsys, "steps", "--max-epsilon", "17", "--noise-multiplier", "1", *sizes)
    assert found["epochs"] == found["steps"] / 2 == 10
    epochs = ask_json(capsys, "epsilon", "--epochs", "10", "--noise-multiplier", "1", *sizes)
    assert 16 < epochs["epsilon"] <= 17


def test_without_noise_epsilon_is_infinite(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["epsilon", "--noise-multiplier", "0", "--steps", "1", *RATE]
    assert ask(capsys, *words).startswith("epsilon infinite at delta 1e-05")
    assert ask_json(capsys, *words)["epsilon"] == "inf"


def test_with_hardly_any_noise_epsilon_is_large(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["epsilon", "--noise-multiplier", "0.02", "--sample-rate", "0.01", "--steps", "200", "--delta", "1e-5"]
    found = ask_json(capsys, *words)
    assert 1000 < found["shuffled_at_least"] < found["fixed_order"] < found["epsilon"] < 1e6


def test_noise_for_a_target(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["noise", "--target-epsilon", "8", "--sample-rate", "0.04", "--steps", "2250", "--delta", "1e-5"]
    assert ask(capsys, *words).splitlines()[0] == "noise multiplier 1.34765625 for epsilon 8 at delta 1e-05"
    found = ask_json(capsys, *words)
    assert found["noise_multiplier"] == calibrate_noise(8.0, 1e-5, 0.04, 2250)
    assert 7.98 < found["prv"] <= 8.0


@pytest.mark.slow
def test_steps_within_a_budget(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["steps", "--max-epsilon", "2", "--noise-multiplier", "1", "--sample-rate", "0.02", "--delta", "1e-3"]
    steps = steps_within(2.0, [], 1.0, 0.02, 1e-3)
    assert ask(capsys, *words).startswith(f"{steps} steps, {steps * 0.02:.4g} epochs, within epsilon 2 at delta 0.001")
    assert ask_json(capsys, *words)["steps"] == steps


MISTAKES = [
    (["epsilon", "--noise-multiplier", "1", "--steps", "5", "--delta", "1e-5"], "How many items are in a step"),
    (["epsilon", "--noise-multiplier", "1", "--steps", "5", *RATE, "--sample-rate", "0.1"], "Remove one"),
    (["epsilon", "--noise-multiplier", "1", "--steps", "5", *RATE[:-1], "0.1"], r"delta=0\.1 with 60000 records"),
    (["epsilon", "--noise-multiplier", "-1", "--steps", "5", *RATE], r"noise_multiplier=-1\.0"),
    (["epsilon", "--noise-multiplier", "1", "--epochs", "5", "--sample-rate", "0", "--delta", "0.1"], "write --steps"),
    (["noise", "--target-epsilon", "0", "--steps", "5", *RATE], r"target_epsilon=0\.0"),
    (["audit", "--delta", "1e-6"], "trainstack privacy audit RUN, or --delta and one of --noise-multiplier"),
    (["noise", "--target-epsilon", "1", "--steps", "0", *RATE], "nothing is spent"),
    (["steps", "--max-epsilon", "2", "--noise-multiplier", "0", *RATE], "no number of steps has a finite bound"),
    (["steps", "--max-epsilon", "2", "--noise-multiplier", "1", "--batch-size", "0", *RATE[2:]], "--batch-size 0"),
]


@pytest.mark.parametrize(("words", "reason"), MISTAKES)
def test_a_mistake_is_refused_in_one_line(words: list[str], reason: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ConfigurationError, match=reason) as raised:
        ask(capsys, *words)
    assert "\n" not in str(raised.value)


SMALL = ["--delta", "1e-6", "--noise-multiplier", "2", "--batch-size", "100", "--dataset-size", "400"]


@pytest.mark.slow
def test_an_audit_prints_its_measurements(capsys: pytest.CaptureFixture[str]) -> None:
    shown = ask(capsys, "audit", *SMALL).splitlines()
    assert shown[0] == "audit of sp-dp: noise multiplier 2, flat clipping, batches of 100 out of 400, 8 steps"
    assert shown[-2] == "nothing found"
    assert "not that it holds" in shown[-1]


@pytest.mark.slow
@pytest.mark.usefixtures("unprobed")
def test_an_audit_that_finds_a_fault_exits_with_1(capsys: pytest.CaptureFixture[str]) -> None:
    with broken("no noise"):
        assert main(["privacy", "audit", *SMALL, "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["verdict"].startswith("BROKEN: not so: its standard deviation is as stated (noise: 0.0000 times that)")


def test_an_audit_refuses_a_backend_that_is_not_private(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["privacy", "audit", *SMALL, "--backend", "sp"]) == 2
    assert "backend 'sp' is not private" in capsys.readouterr().err


def test_options_of_an_audit_override_the_settings_of_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    args = promise(noise_multiplier=1.5, clipping="automatic")
    ts.Trainer(Classifier(), private(tmp_path, args, epochs=2)).train()
    given: list[Any] = []

    def audit(settings: Any, backend: str, **numbers: Any) -> Any:
        given.append((settings, numbers))
        return SimpleNamespace(text="", broken=False)

    monkeypatch.setattr("trainstack.auditing.audit", audit)
    assert main(["privacy", "audit", str(tmp_path)]) == 0
    assert main(["privacy", "audit", str(tmp_path), "--epochs", "1", "--target-epsilon", "3"]) == 0
    expected = (1e-4, 1.5, "automatic", "rdp")
    (settings, numbers), (changed, fewer) = given
    assert (settings.delta, settings.noise_multiplier, settings.clipping, settings.accountant) == expected
    assert numbers == {"train_batch_size": 8, "dataset_size": 41, "epochs": 2, "level": "quick"}
    assert (changed.noise_multiplier, changed.target_epsilon, fewer["epochs"]) == (None, 3.0, 1)
