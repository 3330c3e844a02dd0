"""Budget, account and randomness of a private run over crashes and resumes."""

from __future__ import annotations

import contextlib
import copy
import json
import os
import pickle
import random
import re
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import trainstack as ts
from tests.helpers.modules import Classifier, arguments, numbers, weights
from tests.helpers.patience import patience
from tests.helpers.private_runs import BreaksOff, Recorded, Recording, private, promise
from trainstack.backends.dp import epsilon_of
from trainstack.backends.dp.randomness import SeededRandomness, SystemRandomness
from trainstack.checkpointing.decoding import StateDecoder
from trainstack.checkpointing.manifest import parse
from trainstack.errors import CheckpointMismatchError, PrivacyBudgetError, PrivacyError, PrivacyLedgerError

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("unprobed")]

SAVING = ts.DefaultCheckpointerArguments(every_n_steps=5)
NOISY = {"noise_multiplier": 1.0}


def saving(directory: Path, args: Any, **changes: Any) -> ts.TrainerArguments:
    return private(directory, args, **{"checkpointer_args": SAVING, **changes})


def trained(module: Any, directory: Path, args: Any, **changes: Any) -> ts.Trainer:
    trainer = ts.Trainer(module, saving(directory, args, **changes))
    trainer.train()
    return trainer


# --- the budget


def test_a_run_ends_within_its_budget_also_after_a_resume(tmp_path: Path) -> None:
    args = promise(noise_multiplier=0.7, max_epsilon=2.0)
    module = Recorded(numbers(200))
    trainer = trained(module, tmp_path, args, train_batch_size=4, epochs=9)

    statement, q = trainer.privacy_statement(), 4 / 200
    taken = statement.steps
    assert 0 < taken == trainer.global_steps_finished == len(module.released) < trainer.plan.total_steps
    assert statement.epsilon == epsilon_of([(0.7, q, taken)], 1e-4, "rdp")
    assert statement.epsilon <= 2.0 < epsilon_of([(0.7, q, taken + 1)], 1e-4, "rdp")
    assert statement.stopped_by_budget
    assert "which the next step would exceed" in statement.text

    again = Recorded(numbers(200))
    with pytest.raises(PrivacyBudgetError, match=r"budget is spent.*max_epsilon=2\.0"):
        trained(again, tmp_path, args, train_batch_size=4, epochs=9, resume=True)
    assert again.released == []
    assert torch.equal(weights(again), weights(module))


def test_all_planned_steps_together_meet_the_target_closely(tmp_path: Path) -> None:
    trainer = trained(Classifier(numbers(200)), tmp_path, promise(target_epsilon=2.0), train_batch_size=4)
    statement = trainer.privacy_statement()
    assert statement.steps == trainer.plan.total_steps == 50
    assert statement.epsilon is not None
    assert 1.9 < statement.epsilon <= 2.0


# --- the account over crashes and resumes


class Killed(Recording):
    """Notes each step, whose result may have been seen, in a file."""

    truth = -1

    def step(self, closure: Any = None) -> Any:
        os.write(Killed.truth, b".")
        return super().step(closure)


@pytest.mark.processes
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_killed_run_reports_at_least_the_released_steps(tmp_path: Path) -> None:
    truth, moments, args = tmp_path / "truth", random.Random(1), promise(**NOISY)
    truth.touch()

    def make(resume: Any = "auto") -> ts.Trainer:
        module = Classifier(numbers(200), optimizer=Killed)
        return ts.Trainer(module, saving(tmp_path, args, train_batch_size=4, epochs=10**4, resume=resume))

    for kill in range(1, 5):
        before = truth.stat().st_size
        child = os.fork()
        if child == 0:
            with contextlib.suppress(BaseException):
                Killed.truth = os.open(truth, os.O_WRONLY | os.O_APPEND)
                make().train()
            os._exit(1)
        deadline, enough = time.monotonic() + patience(30), before + 6 + moments.randrange(20)
        while truth.stat().st_size < enough and time.monotonic() < deadline:
            time.sleep(0.001)
        os.kill(child, signal.SIGKILL)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
        statement = make(resume=True).privacy_statement()
        released = truth.stat().st_size
        assert released >= enough
        assert released <= statement.steps <= released + 16 * kill
        assert statement.epsilon is not None
        assert statement.epsilon >= epsilon_of([(1.0, 4 / 200, released)], 1e-4, "rdp")


@pytest.mark.parametrize(
    ("promised", "changes", "words"),
    [
        ({"noise_multiplier": 0.9}, {}, "noise_multiplier was 1.0, is 0.9.*allow_plan_change=True"),
        ({"delta": 1e-5}, {}, "delta was 0.0001, is 1e-05"),
        ({}, {"train_batch_size": 10}, "sample_rate was 0.195"),
    ],
)
def test_a_resume_under_another_plan_is_refused(
    promised: dict[str, Any], changes: dict[str, Any], words: str, tmp_path: Path
) -> None:
    trained(Classifier(), tmp_path, promise(**NOISY))
    with pytest.raises(CheckpointMismatchError, match=words):
        trained(Classifier(), tmp_path, promise(**{**NOISY, **promised}), epochs=2, resume=True, **changes)


def test_both_parts_of_a_changed_plan_are_accounted_for(tmp_path: Path) -> None:
    trained(Classifier(), tmp_path, promise(**NOISY))
    args = promise(noise_multiplier=0.9, allow_plan_change=True)
    found = trained(Classifier(), tmp_path, args, epochs=2, resume=True).privacy_statement()
    assert found.history == ((1.0, 8 / 41, 6), (0.9, 8 / 41, 6))
    assert found.epsilon == epsilon_of(found.history, 1e-4, "rdp")


def test_a_resume_without_the_ledger_is_refused_or_guarantees_nothing(tmp_path: Path) -> None:
    trained(Classifier(), tmp_path, promise(**NOISY))
    (tmp_path / "privacy-ledger.jsonl").unlink()
    with pytest.raises(PrivacyLedgerError, match=r"lacks 6 of the 6 steps.*Copy the ledger file"):
        trained(Classifier(), tmp_path, promise(**NOISY), epochs=2, resume=True)

    found = trained(Classifier(), tmp_path, promise(**NOISY, on_unsafe="report"), epochs=2, resume=True)
    assert found.privacy_statement().epsilon is None
    assert found.privacy_statement().text.startswith("NOT PRIVATE: steps of this run that were lost in a crash")


@pytest.mark.parametrize(("first", "then"), [("sp-dp", "sp"), ("sp", "sp-dp")])
def test_an_account_is_neither_dropped_nor_begun_within_a_run(first: str, then: str, tmp_path: Path) -> None:
    def made(backend: str, **changes: Any) -> ts.TrainerArguments:
        return arguments(tmp_path, backend=backend, checkpointer_args=SAVING, **changes)

    ts.Trainer(Classifier(), made(first)).train()
    with pytest.raises(ts.CheckpointError, match="dp"):
        ts.Trainer(Classifier(), made(then, epochs=2, resume=True)).train()


# --- starts without a checkpoint


def broken_off(directory: Path, args: Any, *, after: int, **changes: Any) -> None:
    """A run that fails before its first checkpoint, and is closed."""
    trainer = ts.Trainer(BreaksOff(after, numbers(149)), private(directory, args, train_batch_size=20, **changes))
    with pytest.raises(ArithmeticError):
        trainer.train()
    trainer.close()


def test_starting_again_without_a_checkpoint_keeps_the_spent_budget(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(3):
        broken_off(tmp_path, promise(**NOISY), after=5, resume="auto")
    assert "has 10 steps of earlier starts" in caplog.text
    assert "resume=False" in caplog.text
    module = BreaksOff(10**9, numbers(149))
    trainer = trained(module, tmp_path, promise(**NOISY), train_batch_size=20, resume="auto")

    statement = trainer.privacy_statement()
    assert statement.steps == 5 + 5 + 5 + 8
    assert statement.epsilon == epsilon_of([(1.0, 20 / 149, 23)], 1e-4, "rdp")
    module = BreaksOff(10**9, numbers(149))
    again = trained(module, tmp_path, promise(**NOISY), train_batch_size=20, resume="auto", epochs=2)
    assert again.privacy_statement().steps == 23 + 8


def test_starting_again_does_not_renew_the_budget(tmp_path: Path) -> None:
    args = promise(target_epsilon=2.0)
    broken_off(tmp_path, args, after=5, resume="auto")
    trainer = trained(BreaksOff(10**9, numbers(149)), tmp_path, args, train_batch_size=20, resume="auto")
    assert (trainer.plan.total_steps, trainer.global_steps_finished) == (8, 3)
    assert trainer.privacy_statement().steps == 8
    assert trainer.privacy_statement().stopped_by_budget


def test_a_new_run_reports_the_steps_it_does_not_count(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for start, resume in enumerate((False, "auto", False)):
        caplog.clear()
        broken_off(tmp_path, promise(**NOISY), after=5, resume=resume, overwrite=start == 2)
        assert ("steps of other runs" in caplog.text) == (start == 2)
    assert "has 10 steps of other runs, which the privacy statement of this one does not include" in caplog.text
    trainer = trained(Classifier(numbers(149)), tmp_path, promise(**NOISY), train_batch_size=20, overwrite=True)
    assert trainer.privacy_statement().steps == 8


def test_a_resumed_run_counts_no_steps_of_other_runs(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    broken_off(tmp_path, promise(**NOISY), after=5)
    trained(Classifier(), tmp_path, promise(**NOISY), overwrite=True)
    caplog.clear()
    again = trained(Classifier(), tmp_path, promise(**NOISY), epochs=2, resume="auto")
    assert again.privacy_statement().steps == 12
    assert "steps of" not in caplog.text


# --- the statement


def states_in(directory: Path) -> list[dict[str, Any]]:
    """The privacy facts of every checkpoint under `directory`, oldest first."""
    found = [parse(path.read_bytes(), path) for path in sorted(directory.rglob("MANIFEST.json"))]
    facts = [StateDecoder({}).decode(content.metadata) for content in found]
    facts = [one["privacy"] for one in facts if one and "privacy" in one]
    assert len(facts) >= 2
    return facts


def test_every_checkpoint_holds_the_statement_of_its_moment(tmp_path: Path) -> None:
    trainer = trained(Classifier(), tmp_path, promise(**NOISY))
    found = {facts["history"][0][2]: facts for facts in states_in(tmp_path)}
    assert set(found) == {5, 6}
    for steps, facts in found.items():
        statement = ts.PrivacyStatement.from_json(json.dumps(facts))
        assert statement.epsilon == epsilon_of([(1.0, 8 / 41, steps)], 1e-4, "rdp")
        assert f"{steps} taken, 6 planned" in statement.text
    (text,), (written,) = (list(tmp_path.rglob(f"privacy_statement.{end}")) for end in ("txt", "json"))
    assert text.read_text() == trainer.privacy_statement().text + "\n"
    assert ts.PrivacyStatement.from_json(written.read_text()) == trainer.privacy_statement()


def test_an_override_stays_in_every_checkpoint_after_a_resume(tmp_path: Path) -> None:
    trained(Classifier(), tmp_path, promise(**NOISY, on_unsafe="report"), clip_grad_value=1.0)
    for facts in states_in(tmp_path):
        assert facts["epsilon"] is None
        text = ts.PrivacyStatement.from_json(json.dumps(facts)).text
        assert text.startswith("NOT PRIVATE: clip_grad_value=1.0: gradients are clipped once")
    after = trained(Classifier(), tmp_path, promise(**NOISY), epochs=2, resume=True)
    assert after.privacy_statement().epsilon is None
    assert "clip_grad_value=1.0" in after.privacy_statement().text


def test_a_secret_number_of_records_is_in_no_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    args = promise(**NOISY, dataset_size=2000)
    changes = {"train_batch_size": 100, "gpu_batch_size_limit": 100, "writers": ["stdout", "csv", "jsonl"]}
    trainer = trained(Classifier(numbers(1493)), tmp_path, args, **changes)

    plan, statement = trainer.plan, trainer.privacy_statement()
    assert (plan.samples_per_epoch, plan.last_step_samples, plan.total_steps) == (2000, 100, 20)
    assert (statement.dataset_size, statement.planned_steps) == (2000, 20)
    assert statement.history == ((1.0, 0.05, 20),)
    files = [path for path in tmp_path.rglob("*") if path.is_file() and path.suffix != ".safetensors"]
    assert {"MANIFEST.json", "README.md", "privacy_statement.txt"} <= {path.name for path in files}
    told = [capsys.readouterr().out, caplog.text, *(path.read_bytes().decode("latin-1") for path in files)]
    assert any("2000" in text for text in told)
    assert not any(re.search(r"(?<![\w.])1,?493(?![\w.])", text) for text in told)


# --- randomness


@pytest.mark.parametrize(("noise", "batch"), [(0.0, 4), (1.0, 16)], ids=["samples", "noise"])
def test_the_seed_determines_neither_samples_nor_noise(noise: float, batch: int, tmp_path: Path) -> None:
    """Without noise only the samples can differ; where each step takes all records, only the noise."""
    released = []
    for name in ("one", "other"):
        torch.manual_seed(0), np.random.seed(0), random.seed(0)
        module = Recorded(numbers(16), lr=0.0)
        trained(module, tmp_path / name, promise(noise_multiplier=noise), seed=0, train_batch_size=batch, epochs=4)
        released.append(module.released)
    assert any(float((a - b).norm()) > 1e-3 for a, b in zip(*released, strict=True))


@pytest.mark.parametrize("secure", [False, True])
def test_each_resume_from_a_checkpoint_has_new_noise(secure: bool, tmp_path: Path) -> None:
    args, released = promise(**NOISY, secure=secure), []
    trained(Recorded(numbers(20), lr=0.0), tmp_path / "run", args, train_batch_size=1)
    for name in ("one", "other"):
        shutil.copytree(tmp_path / "run", tmp_path / name)
        module = Recorded(numbers(20), lr=0.0)
        trained(module, tmp_path / name, args, train_batch_size=1, epochs=2, resume=True)
        released.append(module.released)
    assert len(released[0]) == len(released[1]) == 20
    assert all(float((a - b).norm()) > 0.1 for a, b in zip(*released, strict=True))


def test_a_budget_that_suffices_exactly_allows_all_planned_steps(tmp_path: Path) -> None:
    prv, rdp = (epsilon_of([(1.0, 4 / 200, 50)], 1e-4, accountant) for accountant in ("prv", "rdp"))
    args = promise(**NOISY, max_epsilon=(prv + rdp) / 2, accountant="prv")
    trainer = trained(Recorded(numbers(200)), tmp_path, args, train_batch_size=4, epochs=1)
    assert trainer.global_steps_finished == trainer.plan.total_steps == 50


@pytest.mark.parametrize("make", [lambda: SeededRandomness(1), SystemRandomness])
@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, pickle.dumps])
def test_random_states_cannot_be_copied(make: Any, copied: Any) -> None:
    with pytest.raises(PrivacyError, match="two runs with the same noise"):
        copied(make())


@pytest.mark.processes
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_forked_process_cannot_draw_its_parents_noise() -> None:
    randomness = SeededRandomness(1)
    child = os.fork()
    if child == 0:
        refused = 0
        for draw in (lambda: randomness.mask(1, 9, 0.5), lambda: randomness.normal(1, 9, torch.device("cpu"))):
            try:
                draw()
            except PrivacyError:
                refused += 1
        os._exit(refused)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 2
    assert len(randomness.normal(1, 9, torch.device("cpu"))) == 9
