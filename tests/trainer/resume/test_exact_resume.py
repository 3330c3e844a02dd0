"""A checkpoint that is written in a hook, in a validation or at an equal step is resumed exactly."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import (
    DataLoader,
    RandomSampler,
    TensorDataset,
)

import trainstack as ts
from tests.helpers.modules import Classifier, Noisy, arguments, numbers, train, weights


def test_masks_of_minus_infinity_are_saved_and_nan_is_not(tmp_path: Path) -> None:
    class Masked(Classifier):
        def __init__(self, poison: bool) -> None:
            super().__init__(numbers(16))
            self.mask = nn.Parameter(torch.full((2,), -torch.inf), requires_grad=False)
            self.register_buffer("bias", torch.full((2,), -torch.inf))
            self.register_buffer("count", torch.zeros(1))
            self.poison = poison

        def get_optimizers_schedulers(self, *_: Any) -> Any:
            return torch.optim.SGD(self.net.parameters(), lr=0.1)

        def train_step(self, global_step: int, batch: Any, device: Any) -> Any:
            self.count += float("nan") if self.poison else 1.0
            return super().train_step(global_step, batch, device)

    saving = ts.DefaultCheckpointerArguments(keep_last=None)
    train(Masked(False), tmp_path / "fine", checkpointer_args=saving)
    with pytest.raises(ts.NonFiniteError, match="'count' holds inf or nan after global step 2"):
        train(Masked(True), tmp_path / "poisoned", checkpointer_args=saving)


SAVING_HOOKS = [
    "on_begin_train_epoch",
    "on_end_backward",
    "on_end_train_step",
    "on_end_train_epoch",
    "on_end_val_epoch",
]


@pytest.mark.parametrize("hook", SAVING_HOOKS)
def test_a_checkpoint_saved_in_any_hook_continues_exactly(hook: str, tmp_path: Path) -> None:
    class Saving(Classifier):
        trainer: Any = None
        calls = 0

        def save(self, *args: Any, **kwargs: Any) -> None:
            self.calls += 1
            torch.rand(2)
            if self.trainer is not None and self.calls == 2:
                self.trainer.save_checkpoint(force=True)

    made: dict[str, Any] = {
        "epochs": 3,
        "checkpointer_args": ts.DefaultCheckpointerArguments(period=100, keep_last=None),
    }

    def run(directory: Path, *, saves: bool, **changes: Any) -> Any:
        module = type("M", (Saving,), {hook: Saving.save})(Noisy(24), dropout=0.3, validate=True)
        torch.manual_seed(1 if not changes else 9)
        trainer = ts.Trainer(module, arguments(directory, **made, **changes))
        module.trainer = trainer if saves else None
        trainer.train()
        return trainer

    unbroken = run(tmp_path / "unbroken", saves=False)
    run(tmp_path / "saving", saves=True)
    saved = [info for info in ts.list_checkpoints(tmp_path / "saving" / "checkpoints") if info.kind == "checkpoint"]
    asked_for = [info for info in saved if info.global_step not in (3, 9)] or saved
    resumed = run(tmp_path / "resumed", saves=False, resume=str(asked_for[0].path))

    assert asked_for[0].global_step < 9
    assert torch.equal(weights(resumed.module), weights(unbroken.module))
    assert resumed.history.to_dict() == unbroken.history.to_dict()


@pytest.mark.parametrize("kind", ["hook", "data", "weighted sampler"])
def test_numbers_drawn_at_an_epochs_start_are_repeated_on_resume(kind: str, tmp_path: Path) -> None:
    class Draws(Classifier):
        stop_at: int | None = None

        def on_begin_train_epoch(self, global_step: int, epoch: int) -> None:
            self.shift = torch.rand(1).item() if kind == "hook" else 0.0

        def get_train_dataloader(self, sampler: Any, batch_size: int) -> Any:
            data: Any = self.dataset
            if kind == "data":
                data = TensorDataset(torch.randn(24, 6), data.tensors[1])
            if kind == "weighted sampler":
                sampler = lambda ds: RandomSampler(ds, replacement=True, num_samples=24)  # noqa: E731
            return DataLoader(data, batch_size=batch_size, sampler=sampler(data))

        def train_step(self, global_step: int, batch: Any, device: Any) -> Any:
            if global_step == self.stop_at:
                raise KeyboardInterrupt
            return super().train_step(global_step, (batch[0] + self.shift, batch[1]), device)

    saving = ts.DefaultCheckpointerArguments(every_n_steps=1, keep_last=None)
    torch.manual_seed(1)
    unbroken = train(Draws(numbers(24), dropout=0.2), tmp_path / "unbroken", epochs=2)
    cut = Draws(numbers(24), dropout=0.2)
    cut.stop_at = 5
    torch.manual_seed(1)
    with pytest.raises(KeyboardInterrupt):
        train(cut, tmp_path / "cut", epochs=2, checkpointer_args=saving)
    torch.manual_seed(77)
    resumed = train(Draws(numbers(24), dropout=0.2), tmp_path / "cut", epochs=2, checkpointer_args=saving, resume=True)

    assert torch.equal(weights(resumed.module), weights(unbroken.module))


def test_a_run_killed_during_validation_can_be_resumed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class NeedsLosses(Classifier):
        fails = True

        def on_end_train_epoch(self, global_step: int, losses: Any) -> None:
            assert len(losses) == 5

        def val_step(self, global_step: int, batch: Any, device: Any) -> Any:
            if self.fails:
                raise KeyboardInterrupt
            return super().val_step(global_step, batch, device)

    saving = ts.DefaultCheckpointerArguments(every_n_steps=5, keep_last=None)
    with pytest.raises(KeyboardInterrupt):
        train(NeedsLosses(numbers(40), validate=True), tmp_path, checkpointer_args=saving)
    module = NeedsLosses(numbers(40), validate=True)
    module.fails = False
    train(module, tmp_path, checkpointer_args=saving, resume=True, epochs=2)

    assert "on_end_train_epoch is not called" in caplog.text


@pytest.mark.parametrize("stop_at", [3, 6])
def test_lost_outputs_of_an_epoch_are_told(stop_at: int, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class NeedsLosses(Classifier):
        given, stop_at = 0, -1

        def train_step(self, global_step: int, batch: Any, device: Any) -> Any:
            if global_step == self.stop_at:
                raise KeyboardInterrupt
            return super().train_step(global_step, batch, device)

        def on_end_train_epoch(self, global_step: int, losses: Any) -> None:
            self.given = len(losses)

    saving = ts.DefaultCheckpointerArguments(every_n_steps=1)
    cut = NeedsLosses(numbers(40))
    cut.stop_at = stop_at
    with pytest.raises(KeyboardInterrupt):
        train(cut, tmp_path, epochs=2, checkpointer_args=saving)
    module = NeedsLosses(numbers(40))
    assert "resumed within epoch" not in caplog.text
    train(module, tmp_path, epochs=2, checkpointer_args=saving, resume=True)

    told = "gets the outputs of the remaining steps. The outputs before the interruption are lost" in caplog.text
    assert told == (stop_at == 3)
    assert module.given == 5


def test_a_resume_that_is_refused_stays_refused(tmp_path: Path) -> None:
    saving = ts.DefaultCheckpointerArguments(keep_last=None)
    train(Classifier(), tmp_path, checkpointer_args=saving)
    trainer = ts.Trainer(
        Classifier(optimizer=torch.optim.AdamW), arguments(tmp_path, checkpointer_args=saving, resume=True, epochs=2)
    )
    for _ in range(2):
        with pytest.raises(ts.CheckpointMismatchError):
            trainer.train()


def test_a_forced_save_replaces_one_of_the_same_step(tmp_path: Path) -> None:
    saving = ts.DefaultCheckpointerArguments(keep_last=None)
    trainer = train(Classifier(), tmp_path, checkpointer_args=saving)
    with torch.no_grad():
        trainer.module.net[0].weight.zero_()
    trainer.save_checkpoint(force=True)
    resumed = train(Classifier(), tmp_path, checkpointer_args=saving, resume=True)

    assert not resumed.module.net[0].weight.any()


def test_settings_that_are_tensors_survive_a_resume(tmp_path: Path) -> None:
    class Tensors(Classifier):
        def get_optimizers_schedulers(self, *_: Any) -> Any:
            made = torch.optim.SGD(self.parameters(), lr=torch.tensor(0.1))
            made.param_groups[0]["mine"] = torch.arange(3)
            return made

    saving = ts.DefaultCheckpointerArguments(keep_last=None)
    train(Tensors(), tmp_path, checkpointer_args=saving)
    resumed = train(Tensors(), tmp_path, checkpointer_args=saving, resume=True, epochs=2)

    (group,) = resumed.optimizers[0].param_groups
    assert resumed.global_steps_finished == 12
    assert torch.equal(group["lr"], torch.tensor(0.1))
    assert torch.equal(group["mine"], torch.arange(3))
