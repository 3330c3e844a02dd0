"""A run that is killed at any step and resumed has the bits of an uninterrupted one."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, SubsetRandomSampler

import trainstack as ts
from tests.helpers.modules import Classifier, arguments, train, weights
from tests.helpers.patience import patience

ROOT = Path(__file__).resolve().parents[3]


def in_a_fresh_process(*args: object) -> Any:
    """Run tests/helpers/resume_run.py; returns its last line of output, from JSON."""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-m", "tests.helpers.resume_run", *map(str, args)],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=patience(60),
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.processes
@pytest.mark.spec("FN-32", "F204", "F403", "F404", "HZ-06", "PMT-12", "PMT-14")
@pytest.mark.parametrize(
    ("workers", "backend"),
    [
        (2, "sp"),
        (0, "sp-amp"),
        pytest.param(0, "sp", marks=pytest.mark.long),
        pytest.param(2, "sp-amp", marks=pytest.mark.long),
    ],
)
def test_resume_at_every_step_boundary_in_a_fresh_process(backend: str, workers: int, tmp_path: Path) -> None:
    """20 steps in 4 epochs with shuffling, dropout, augmentation, AdamW, a scheduler and validation."""
    unbroken = in_a_fresh_process("unbroken", tmp_path, backend, workers)
    resumed = in_a_fresh_process("resumed", tmp_path, backend, workers)

    assert len(unbroken) == 1
    assert len(resumed) >= 20
    assert set(resumed.values()) == {*unbroken.values()}


def test_saving_changes_nothing(tmp_path: Path) -> None:
    saving = ts.DefaultCheckpointerArguments(every_n_steps=1, keep_last=None)
    one, other = Classifier(dropout=0.2), Classifier(dropout=0.2)
    torch.manual_seed(1)
    train(one, tmp_path / "one", epochs=2)
    torch.manual_seed(1)
    train(other, tmp_path / "other", epochs=2, checkpointer_args=saving)

    assert torch.equal(weights(one), weights(other))


@pytest.mark.spec("F403")
def test_two_interruptions_within_one_epoch(tmp_path: Path) -> None:
    torch.manual_seed(1)
    unbroken = train(Classifier(dropout=0.2), tmp_path / "unbroken")
    saving = ts.DefaultCheckpointerArguments(every_n_steps=1, keep_last=None)
    torch.manual_seed(1)
    for stop_at in (2, 4):
        with pytest.raises(KeyboardInterrupt):
            train(Interrupted(stop_at), tmp_path / "cut", checkpointer_args=saving, resume="auto")
        torch.manual_seed(stop_at)
    resumed = train(Classifier(dropout=0.2), tmp_path / "cut", checkpointer_args=saving, resume=True)

    assert torch.equal(weights(resumed.module), weights(unbroken.module))
    assert resumed.global_steps_finished == unbroken.global_steps_finished == 6


def test_a_run_never_resumes_another_run_in_its_folder(tmp_path: Path) -> None:
    saving = ts.DefaultCheckpointerArguments(keep_last=None)
    earlier = train(Classifier(seed=1), tmp_path, checkpointer_args=saving)
    named = train(
        Classifier(seed=2),
        tmp_path / "other",
        checkpointer_args=saving,
        resume=str(tmp_path / "checkpoints" / "checkpoint-000000006"),
    )
    assert torch.equal(weights(named.module), weights(earlier.module))
    with pytest.raises(ts.ConfigurationError, match="holds a run already"):
        train(Interrupted(3, seed=2), tmp_path, checkpointer_args=saving)
    with pytest.raises(KeyboardInterrupt):
        train(Interrupted(3, seed=2), tmp_path, checkpointer_args=saving, overwrite=True)

    with pytest.raises(ts.CheckpointNotFoundError, match="no checkpoint in"):
        train(Classifier(seed=2), tmp_path, checkpointer_args=saving, resume=True)
    with pytest.raises(ts.ConfigurationError, match="holds a run already"):  # another class
        train(Classifier(seed=2), tmp_path, checkpointer_args=saving, resume="auto")
    with pytest.raises(KeyboardInterrupt):
        train(Interrupted(3, seed=2), tmp_path, checkpointer_args=saving, resume="auto")
    fresh = train(Classifier(seed=2), tmp_path, checkpointer_args=saving, overwrite=True)
    assert not torch.equal(weights(fresh.module), weights(earlier.module))
    again = train(Classifier(), tmp_path, checkpointer_args=saving, resume=True)
    assert torch.equal(weights(again.module), weights(fresh.module))


def test_evaluating_a_run_does_not_begin_a_new_one(tmp_path: Path) -> None:
    saving = ts.DefaultCheckpointerArguments(keep_last=None)
    trained = train(Classifier(), tmp_path, checkpointer_args=saving)
    ts.Trainer(Classifier(validate=True), arguments(tmp_path, checkpointer_args=saving)).validate()
    resumed = train(Classifier(seed=5), tmp_path, checkpointer_args=saving, resume=True)

    assert torch.equal(weights(resumed.module), weights(trained.module))


@pytest.mark.spec("T7", "PMT-10", "FN-34")
def test_a_finished_run_continues_to_more_epochs(tmp_path: Path) -> None:
    saving = ts.DefaultCheckpointerArguments(keep_last=None)
    first = train(Classifier(), tmp_path, epochs=3, checkpointer_args=saving)
    checkpoints = tmp_path / "checkpoints"
    assert len(ts.list_checkpoints(checkpoints)) == 3 + 1

    longer = train(Classifier(), tmp_path, epochs=5, checkpointer_args=saving, resume=True)
    assert longer.global_steps_finished - first.global_steps_finished == 2 * 6
    assert sum(info.kind == "checkpoint" for info in ts.list_checkpoints(checkpoints)) == 5

    fewer = train(Classifier(), tmp_path, epochs=2, checkpointer_args=saving, resume=True)
    assert fewer.global_steps_finished == longer.global_steps_finished


@pytest.mark.spec("F104", "HZ-09")
def test_a_resumed_run_keeps_the_seed_it_began_with(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    saving = ts.DefaultCheckpointerArguments(every_n_steps=3, keep_last=None)
    unbroken = train(Classifier(), tmp_path / "unbroken", seed=4)
    with pytest.raises(KeyboardInterrupt):
        train(Interrupted(3, dropout=0.0), tmp_path / "cut", seed=4, checkpointer_args=saving)
    resumed = train(Classifier(), tmp_path / "cut", seed=9, checkpointer_args=saving, resume=True)

    assert torch.equal(weights(resumed.module), weights(unbroken.module))
    assert re.search(r"arguments\.seed +4 +9 +none: the saved value is used", caplog.text)


@pytest.mark.parametrize(("lr", "seed", "said"), [(0.5, 0, "made with lr=0.5"), (0.1, 9, "seed=9 was given")])
def test_auto_refuses_a_run_with_other_settings(lr: float, seed: int, said: str, tmp_path: Path) -> None:
    saving = ts.DefaultCheckpointerArguments()
    train(Classifier(), tmp_path, checkpointer_args=saving)

    with pytest.raises(ts.CheckpointMismatchError, match=rf"{said}.*Write resume=True .* another output_dir"):
        train(Classifier(lr=lr), tmp_path, checkpointer_args=saving, resume="auto", seed=seed, epochs=2)


@pytest.mark.spec("PMT-16")
def test_optimizers_and_schedulers_can_start_from_the_beginning(tmp_path: Path) -> None:
    saving = ts.DefaultCheckpointerArguments(keep_last=None)
    train(Classifier(scheduler=True), tmp_path, checkpointer_args=saving)
    module = Classifier(scheduler=True, optimizer=torch.optim.AdamW)
    trainer = ts.Trainer(
        module,
        arguments(tmp_path, epochs=2, checkpointer_args=saving, resume=True, reset_optimizers_schedulers=True),
    )
    state = trainer.plan and trainer.get_state()

    assert state["optimizers"][0]["state"] == {}
    assert state["schedulers"][0]["state"]["last_epoch"] == 0
    assert trainer.global_steps_finished == 6


class Interrupted(Classifier):
    """Ctrl-C in the middle of the step after `step`."""

    def __init__(self, step: int, **changes: Any) -> None:
        super().__init__(**{"dropout": 0.2, **changes})
        self.step = step

    def train_step(self, global_step: int, batch: Any, device: Any) -> Any:
        if global_step > self.step:
            raise KeyboardInterrupt
        return super().train_step(global_step, batch, device)


ORDERS = {"shuffled": "shuffled", "sequential": "in data set order", "foreign": "in the loader's own order"}


class InOrder(Interrupted):
    """41 samples in one of `ORDERS`."""

    def __init__(self, order: str, step: int = 99) -> None:
        super().__init__(step)
        self.order = order

    def get_train_dataloader(self, sampler: Any, batch_size: int) -> Any:
        foreign = SubsetRandomSampler(range(41)) if self.order == "foreign" else None
        return DataLoader(self.dataset, batch_size, shuffle=self.order == "shuffled", sampler=foreign)


class TestMismatches:
    """Another model, backend, optimizer or data set than in the checkpoint: each has a message."""

    saving = ts.DefaultCheckpointerArguments(every_n_steps=2, keep_last=None)

    def resume(self, module: Classifier, directory: Path, **changes: Any) -> None:
        with pytest.raises(KeyboardInterrupt):
            train(Interrupted(3), directory, checkpointer_args=self.saving)
        train(module, directory, checkpointer_args=self.saving, resume=True, **changes)

    def test_another_model_is_refused(self, tmp_path: Path) -> None:
        module = Classifier()
        module.net.append(torch.nn.Linear(3, 3))
        with pytest.raises(ts.CheckpointMismatchError, match=r"does not fit Classifier: .*net\.4"):
            self.resume(module, tmp_path)

    @pytest.mark.spec("PMB-12")
    def test_another_backend_is_refused(self, tmp_path: Path) -> None:
        with pytest.raises(
            ts.CheckpointMismatchError,
            match=r"backend 'sp-amp': it has no state for \['amp'\].*Resume with the backend string",
        ):
            self.resume(Classifier(), tmp_path, backend="sp-amp")

    def test_another_number_of_optimizers_is_refused(self, tmp_path: Path) -> None:
        class Two(Classifier):
            def get_optimizers_schedulers(self, *_: Any) -> Any:
                return [torch.optim.SGD(self.net[i].parameters(), lr=0.1) for i in (0, 3)], []

        with pytest.raises(ts.CheckpointMismatchError, match=r"2 optimizers, the checkpoint has 1.*reset_optimizers"):
            self.resume(Two(), tmp_path)

    def test_another_class_of_optimizer_is_refused(self, tmp_path: Path) -> None:
        with pytest.raises(ts.CheckpointMismatchError, match=r"0 is a AdamW; the checkpoint's is a SGD"):
            self.resume(Classifier(optimizer=torch.optim.AdamW), tmp_path)

    def test_other_settings_are_logged(self, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
        self.resume(Classifier(lr=0.5), tmp_path, train_batch_size=4)

        assert re.search(r"optimizers\.0\.lr +0\.1 +0\.5 +none: the saved value is used", caplog.text)
        assert re.search(r"data\.global batch +8 +4 +another run", caplog.text)

    def test_data_of_another_length_is_refused(self, tmp_path: Path) -> None:
        from tests.helpers.modules import numbers

        with pytest.raises(ts.CheckpointMismatchError, match=r"within epoch 0 of a data set of 41 samples.*now has 30"):
            self.resume(Classifier(numbers(30)), tmp_path)

    @pytest.mark.parametrize("before", ORDERS)
    @pytest.mark.parametrize("after", ORDERS)
    def test_another_order_within_an_epoch_is_refused(self, before: str, after: str, tmp_path: Path) -> None:
        with pytest.raises(KeyboardInterrupt):
            train(InOrder(before, 3), tmp_path, checkpointer_args=self.saving)
        resumed = ts.Trainer(InOrder(after), arguments(tmp_path, checkpointer_args=self.saving, resume=True))
        if before == after:
            resumed.train()
            return
        said = f"{ORDERS[before]} until global step 2, and would now come {ORDERS[after]}"
        with pytest.raises(ts.CheckpointMismatchError, match=said):
            resumed.train()
        assert resumed.global_steps_finished == 2

    def test_another_order_is_accepted_between_epochs(self, tmp_path: Path) -> None:
        train(InOrder("shuffled"), tmp_path, checkpointer_args=self.saving)
        resumed = train(InOrder("foreign"), tmp_path, checkpointer_args=self.saving, resume=True, epochs=2)
        assert resumed.global_steps_finished == 12

    def test_a_run_continues_from_a_checkpoint_without_an_order(self, tmp_path: Path) -> None:
        with pytest.raises(KeyboardInterrupt):
            train(InOrder("shuffled", 3), tmp_path, checkpointer_args=self.saving)
        checkpoint = ts.read_checkpoint(ts.list_checkpoints(tmp_path / "checkpoints")[-1].path)
        assert checkpoint.trainer_state is not None
        del checkpoint.trainer_state["order"]
        ts.write_checkpoint(checkpoint, tmp_path / "old", "checkpoint-000000002")

        resumed = train(InOrder("sequential"), tmp_path, resume=tmp_path / "old" / "checkpoint-000000002")
        assert resumed.global_steps_finished == 6

    def test_another_number_of_processes_is_logged(self, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
        with pytest.raises(KeyboardInterrupt):
            train(Interrupted(3), tmp_path, checkpointer_args=self.saving)
        newest = ts.list_checkpoints(tmp_path / "checkpoints")[-1].path
        checkpoint = ts.read_checkpoint(newest)
        assert checkpoint.rng_state is not None
        checkpoint.rng_state["ranks"] *= 2
        ts.write_checkpoint(checkpoint, tmp_path / "of two", "checkpoint-000000002")
        train(Classifier(), tmp_path / "resumed", checkpointer_args=self.saving, resume=str(tmp_path / "of two"))

        assert re.search(r"environment\.world size +2 +1 +same samples, other bits", caplog.text)
        assert "start as many processes: 2" in caplog.text
