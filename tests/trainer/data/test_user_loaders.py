"""Samplers and loaders with a custom order."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    SequentialSampler,
    SubsetRandomSampler,
)

import trainstack as ts
from tests.helpers.modules import Classifier, arguments, numbers, train


@pytest.mark.parametrize("kind", ["batch sampler", "subset", "range"])
def test_a_sampler_may_omit_samples(kind: str, tmp_path: Path) -> None:
    class Restricted(Classifier):
        def loader(self, batch_size: int) -> Any:  # type: ignore[override]
            if kind == "batch sampler":
                return DataLoader(self.dataset, batch_sampler=BatchSampler(SubsetRandomSampler(range(10)), 5, False))
            sampler: Any = SubsetRandomSampler(range(10)) if kind == "subset" else SequentialSampler(range(10))
            return DataLoader(self.dataset, batch_size=batch_size, sampler=sampler)

        def get_train_dataloader(self, sampler: Any, batch_size: int) -> Any:
            return Restricted.loader(self, batch_size)

        def get_val_dataloaders(self, sampler: Any, batch_size: int) -> Any:
            return Restricted.loader(self, batch_size)

    trainer = ts.Trainer(Restricted(numbers(40)), arguments(tmp_path, train_batch_size=5, val_batch_size=5))
    trainer.train()

    assert trainer.global_steps_finished == 2
    assert trainer.validate()["default"][1].shape == (10,)


def test_each_epoch_reads_the_data_that_a_hook_sets(tmp_path: Path) -> None:
    class Changing(Classifier):
        def __init__(self) -> None:
            super().__init__(numbers(16))
            self.seen: list[float] = []

        def on_begin_train_epoch(self, global_step: int, epoch: int) -> None:
            self.dataset.tensors = (torch.full((16, 6), float(epoch)), self.dataset.tensors[1])

        def train_step(self, global_step: int, batch: Any, device: Any) -> Any:
            self.seen.append(batch[0][0, 0].item())
            return super().train_step(global_step, batch, device)

    module = Changing()
    train(module, tmp_path, epochs=2)

    assert module.seen == [0.0, 0.0, 1.0, 1.0]


def test_a_custom_loader_resumes_only_with_the_same_batches(tmp_path: Path) -> None:
    class Listed(Classifier):
        stop_at: int | None = None

        def get_train_dataloader(self, sampler: Any, batch_size: int) -> Any:
            return iter(list(DataLoader(self.dataset, batch_size=batch_size)))

        def train_step(self, global_step: int, batch: Any, device: Any) -> Any:
            if global_step == self.stop_at:
                raise KeyboardInterrupt
            return super().train_step(global_step, batch, device)

    saving = ts.DefaultCheckpointerArguments(every_n_steps=1)
    module = Listed(numbers(40))
    module.stop_at = 3
    with pytest.raises(KeyboardInterrupt):
        train(module, tmp_path, checkpointer_args=saving)

    with pytest.raises(ts.CheckpointMismatchError, match="micro_batch was 8 and is now 2"):
        train(Listed(numbers(40)), tmp_path, checkpointer_args=saving, resume=True, gpu_batch_size_limit=2)

    checkpoint = ts.read_checkpoint(ts.list_checkpoints(tmp_path / "checkpoints")[-1].path)
    assert checkpoint.plan is not None
    checkpoint.plan |= {"world_size": 2, "global_batch": 16}
    ts.write_checkpoint(checkpoint, tmp_path / "of two", "checkpoint-000000002")
    with pytest.raises(ts.CheckpointMismatchError, match="world_size was 2 and is now 1"):
        train(Listed(numbers(40)), tmp_path, resume=tmp_path / "of two" / "checkpoint-000000002")


def test_predicting_uses_the_loaders_own_batches(tmp_path: Path) -> None:
    class Sizes(Classifier):
        def predict_step(self, global_step: int, batch: Any, device: Any) -> Any:
            return torch.tensor(len(batch[0]))

    predicted = ts.Trainer(Sizes(), arguments(tmp_path)).predict(DataLoader(numbers(10), batch_size=4))

    assert predicted.tolist() == [4, 4, 2]


class OwnLoader(DataLoader[Any]):
    """Has a custom `__iter__`, so that it draws its order from the generators of the process."""

    def __iter__(self) -> Any:
        return super().__iter__()


@pytest.mark.parametrize("limit", [8, 4])
def test_a_resume_reads_the_rest_of_a_shuffled_loader(limit: int, tmp_path: Path) -> None:
    class Shuffled(Classifier):
        def __init__(self, last: int) -> None:
            super().__init__(numbers(48), dropout=0.5)
            self.last, self.seen = last, list[float]()

        def get_train_dataloader(self, sampler: Any, batch_size: int) -> Any:
            return OwnLoader(self.dataset, batch_size=batch_size, shuffle=True)

        def train_step(self, global_step: int, batch: Any, device: Any) -> Any:
            if global_step > self.last:
                raise KeyboardInterrupt
            self.seen += batch[0][:, 0].tolist()
            return super().train_step(global_step, batch, device)

    options = {"gpu_batch_size_limit": limit, "checkpointer_args": ts.DefaultCheckpointerArguments(every_n_steps=1)}
    whole, first, rest = Shuffled(6), Shuffled(3), Shuffled(6)
    ts.seed_everything(5)
    train(whole, tmp_path / "whole", **options)
    ts.seed_everything(5)
    with pytest.raises(KeyboardInterrupt):
        train(first, tmp_path / "stopped", **options)
    train(rest, tmp_path / "stopped", resume=True, **options)

    assert first.seen + rest.seen == whole.seen
