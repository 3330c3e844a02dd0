"""The private example stays within its budgets, draws its picture and prints a true statement."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.helpers.scripts import run_python
from trainstack.backends.dp import PrivacyStatement

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
SCRIPT = EXAMPLES / "private.py"


@pytest.mark.processes
@pytest.mark.long
@pytest.mark.spec("PMB-13")
def test_a_short_run_keeps_its_budget_and_learns_on_both_data_sets(tmp_path: Path) -> None:
    done = run_python(str(SCRIPT), "--epsilons", "3", "--epochs", "4", "--runs", "1", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    said = {
        (name, spent): float(quality)
        for name, quality, spent in re.findall(r"^(\w+): \w+ ([\d.]+) (without|at epsilon)", done.stdout, re.M)
    }
    assert said["insurance", "without"] > 0.6
    assert said["insurance", "at epsilon"] > 0.6, "AUC on real data, of which guessing has 0.5"
    assert said["digits", "at epsilon"] > 0.3
    assert done.stdout.count("differentially private for one item") == 2

    assert re.findall(r"^audit of (\w+)", done.stdout, re.M) == ["Insurance", "Digits", "sp"]
    assert done.stdout.count("nothing found\n") == 3

    runs = tmp_path / "runs" / "private"
    assert (runs / "cost-of-privacy.png").read_bytes().startswith(b"\x89PNG")
    for name, steps in (("insurance", 4 * 16), ("digits", 4 * 6)):
        written = (runs / name / "epsilon-3" / "run-1" / "privacy_statement.json").read_text()
        statement = PrivacyStatement.from_json(written)
        assert statement.steps == steps
        assert 2.9 < statement.epsilon <= 3.0
        assert not (runs / name / "not-private" / "privacy_statement.json").exists()


@pytest.mark.processes
def test_few_records_suffice_for_a_good_accuracy_at_epsilon_3(tmp_path: Path) -> None:
    done = run_python(str(EXAMPLES / "private_digits.py"), "--runs", "1", "--device", "cpu", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert float(re.findall(r"^accuracy ([\d.]+) ", done.stdout, re.M)[0]) > 0.93
    assert re.search(r"^signal to noise +3\.3 = batch 512", done.stdout, re.M)
    assert float(re.findall(r"epsilon ([\d.]+), delta", done.stdout)[0]) <= 3
