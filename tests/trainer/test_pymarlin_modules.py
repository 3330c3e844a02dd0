"""A module written for PyMarlin runs after a change of its import lines only."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
import torch.optim as optim
from torch.utils.data import DataLoader, TensorDataset

from tests.helpers.specs import stacks_that_run_here
from trainstack import (
    DefaultCheckpointerArguments,
    ModuleInterface,
    Trainer,
    TrainerArguments,
    list_checkpoints,
)


class Pictures(ModuleInterface):
    """A module like PyMarlin's image example: a convolutional net, one optimizer, one scheduler, two val loaders."""

    def __init__(self) -> None:
        super().__init__()
        self.called: list[Any] = []
        generator = torch.Generator().manual_seed(0)
        self.train_ds = TensorDataset(
            torch.rand(48, 3, 8, 8, generator=generator), torch.randint(0, 4, (48,), generator=generator)
        )
        self.val_ds = TensorDataset(
            torch.rand(13, 3, 8, 8, generator=generator), torch.randint(0, 4, (13,), generator=generator)
        )
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.conv = nn.Conv2d(3, 4, 3)
            self.fc = nn.Linear(4 * 9, 4)

    def get_optimizers_schedulers(self, estimated_global_steps_per_epoch, epochs):  # type: ignore[no-untyped-def]
        self.called.append(("optimizers", estimated_global_steps_per_epoch, epochs))
        optimizer = optim.SGD(self.parameters(), lr=0.05, momentum=0.9)
        return [optimizer], [optim.lr_scheduler.StepLR(optimizer, estimated_global_steps_per_epoch)]

    def get_train_dataloader(self, sampler: type, batch_size: int):  # type: ignore[no-untyped-def]
        self.called.append(("train loader", batch_size))
        return DataLoader(self.train_ds, batch_size=batch_size, sampler=sampler(self.train_ds))

    def get_val_dataloaders(self, sampler: torch.utils.data.Sampler, batch_size: int):  # type: ignore[no-untyped-def, override]
        self.called.append(("val loaders", batch_size))
        return {
            key: DataLoader(self.val_ds, batch_size=batch_size, sampler=sampler(self.val_ds)) for key in ("one", "two")
        }

    def train_step(self, global_step, batch, device):  # type: ignore[no-untyped-def]
        inputs, labels = batch
        inputs, labels = inputs.to(device), labels.to(device)
        outputs = self.fc(F.max_pool2d(F.relu(self.conv(inputs)), 2).flatten(1))
        return F.cross_entropy(outputs, labels), outputs

    def val_step(self, global_step, batch, device):  # type: ignore[no-untyped-def]
        loss, outputs = self.train_step(global_step, batch, device)
        return loss, outputs, batch[1]

    def on_begin_train_epoch(self, global_step, epoch):  # type: ignore[no-untyped-def]
        self.called.append(("begin epoch", global_step, epoch))

    def on_end_train_step(self, global_step, *collated):  # type: ignore[no-untyped-def]
        self.called.append(("step", global_step, tuple(collated[0].shape), tuple(collated[1].shape)))

    def on_end_train_epoch(self, global_step, *collated):  # type: ignore[no-untyped-def]
        self.called.append(("end epoch", global_step, tuple(collated[1].shape)))

    def on_end_val_epoch(self, global_step, *collated, key="default"):  # type: ignore[no-untyped-def]
        _, outputs, labels = collated
        self.called.append(("val", key, tuple(outputs.shape)))
        assert torch.equal(labels, self.val_ds.tensors[1]), "outputs come in data set order"

    def on_end_train(self, global_step):  # type: ignore[no-untyped-def]
        self.called.append(("end", global_step))


@pytest.mark.spec("PMT-01", "PMT-02", "PMT-10", "PMT-11", "PMT-13", "PMT-22", "PMT-25", "PA-35", "FN-07", "T4", "T7")
@pytest.mark.parametrize(
    "backend",
    [
        stack
        if stack in ("sp", "sp-amp", "ddp") or not isinstance(stack, str)
        else pytest.param(stack, marks=pytest.mark.long)
        for stack in stacks_that_run_here(trainer=False)
    ],
)
def test_hooks_run_in_order_with_their_arguments(backend: str, tmp_path: Path) -> None:
    module = Pictures()
    args = TrainerArguments(
        epochs=3,
        use_gpu=False,
        train_batch_size=16,
        gpu_batch_size_limit=8,
        val_batch_size=5,
        disable_tqdm=True,
        backend=backend,
        output_dir=str(tmp_path),
        checkpointer_args=DefaultCheckpointerArguments(
            keep_last=None, save_dir=str(tmp_path / "saved"), model_state_save_dir=str(tmp_path / "models")
        ),
    )
    trainer = Trainer(module, args)
    trainer.train()

    epoch = [
        ("train loader", 8),
        *[("step", step, (2,), (16, 4)) for step in (1, 2, 3)],
        ("end epoch", 3, (48, 4)),
        ("val loaders", 5),
        ("val", "one", (13, 4)),
        ("val", "two", (13, 4)),
    ]
    assert module.called[:2] == [("train loader", 8), ("optimizers", 4, 3)]
    assert module.called[2:11] == [("begin epoch", 0, 0), *epoch]
    assert [call for call in module.called if call[0] == "begin epoch"] == [("begin epoch", 3 * e, e) for e in range(3)]
    assert module.called[-1] == ("end", 9)
    assert sum(call[0] == "train loader" for call in module.called) == 3 + 1
    assert len(list_checkpoints(tmp_path / "saved")) == 3
    assert len(list_checkpoints(tmp_path / "models")) == 1


@pytest.mark.spec("T5", "PMT-11")
def test_validate_needs_no_training_data(tmp_path: Path) -> None:
    module = Pictures()
    outputs = Trainer(module, TrainerArguments(val_batch_size=5, device="cpu", output_dir=str(tmp_path))).validate()

    assert [name for name, *_ in module.called] == ["val loaders", "val", "val"]  # no method of training is called
    assert {key: [t.shape[0] for t in values] for key, values in outputs.items()} == {
        "one": [3, 13, 13],
        "two": [3, 13, 13],
    }


@pytest.mark.spec("PMT-15", "PMT-16", "PMT-24")
def test_a_trainer_has_pymarlins_properties(tmp_path: Path) -> None:
    trainer = Trainer(Pictures(), TrainerArguments(train_batch_size=16, device="cpu", output_dir=str(tmp_path)))

    assert trainer.last_epoch == -1
    assert not trainer.is_distributed
    assert trainer.is_main_process
    assert trainer.device == torch.device("cpu")
    assert trainer.pergpu_global_batch_size == 16
    assert trainer.estimated_global_steps_per_epoch == 4
    assert {"last_epoch", "optimizers", "schedulers", "global_step"} <= set(trainer.get_state())
    assert (trainer.global_steps_finished, trainer.total_steps_finished) == (0, 0)
    assert trainer.train_sampler(trainer.module.train_ds) is not None
    assert list(trainer.val_sampler(trainer.module.val_ds)) == list(range(13))
