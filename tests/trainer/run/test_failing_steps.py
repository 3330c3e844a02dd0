"""An error in a step names its place and the samples of the micro-batch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import Dataset

import trainstack as ts
from tests.helpers.modules import Classifier, arguments, numbers, train


class Numbered(Dataset[tuple[Tensor, Tensor]]):
    """Samples whose first feature is their index."""

    def __init__(self, broken: int | None = None) -> None:
        self.base, self.broken = numbers(41), broken

    def __len__(self) -> int:
        return len(self.base)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if index == self.broken:
            raise OSError("cannot be read")
        return torch.cat([torch.tensor([float(index)]), self.base[index][0][1:]]), self.base[index][1]


class Failing(Classifier):
    """Fails at the micro-batch with `sample` in epoch `epoch`, and keeps its samples."""

    def __init__(self, sample: int, epoch: int = 1, **changes: Any) -> None:
        super().__init__(**{"dataset": Numbered(), **changes})
        self.sample, self.epoch, self.now, self.held = sample, epoch, -1, [0]

    def on_begin_train_epoch(self, global_step: int, epoch: int) -> None:
        self.now = epoch

    def train_step(self, global_step: int, batch: Any, device: Any) -> Any:
        self.held = batch[0][:, 0].int().tolist()
        if self.now == self.epoch and self.sample in self.held:
            raise ValueError("no")
        return super().train_step(global_step, batch, device)


def notes(error: BaseException) -> str:
    return "\n".join(error.__notes__)


@pytest.mark.spec("FN-42")
@pytest.mark.parametrize("limit", [8, 4, 3])
@pytest.mark.parametrize("sample", [0, 17])
def test_the_samples_of_a_micro_batch_that_fails_are_named(limit: int, sample: int, tmp_path: Path) -> None:
    module = Failing(sample)
    with pytest.raises(ValueError, match="no") as caught:
        train(module, tmp_path, epochs=2, gpu_batch_size_limit=limit)

    assert len(module.held) in (limit, 2, 1)
    assert f"with the samples {', '.join(map(str, module.held))} of the training data set" in notes(caught.value)
    assert "in epoch 1, global step " in notes(caught.value)
    assert (", micro-batch " in notes(caught.value)) == (limit < 8)


def test_a_long_list_of_samples_is_shortened(tmp_path: Path) -> None:
    module = Failing(0, epoch=0, dataset=numbers(300))
    module.sample = int(module.dataset.tensors[0][0, 0])
    module.train_step = lambda **_: 1 / 0  # type: ignore[method-assign, assignment]
    with pytest.raises(ZeroDivisionError) as caught:
        train(module, tmp_path, train_batch_size=200)
    assert ", ... (200 in all) of the training data set" in notes(caught.value)


def test_samples_of_a_loader_with_custom_order_are_not_named(tmp_path: Path) -> None:
    class Lists(Failing):
        def get_train_dataloader(self, sampler: Any, batch_size: int) -> Any:
            return [*super().get_train_dataloader(sampler, batch_size)]

    with pytest.raises(ValueError, match="no") as caught:
        train(Lists(3, epoch=0), tmp_path, gpu_batch_size_limit=4)
    assert ", micro-batch " in notes(caught.value)
    assert "samples" not in notes(caught.value)


@pytest.mark.processes
@pytest.mark.parametrize("workers", [0, 1])
def test_a_sample_that_cannot_be_loaded_is_named(workers: int, tmp_path: Path) -> None:
    module = Classifier(dataset=Numbered(broken=11), num_workers=workers)
    with pytest.raises(OSError, match="cannot be read") as caught:
        train(module, tmp_path)
    said = str(caught.value) + notes(caught.value)
    if workers == 0 or hasattr(BaseException, "add_note"):  # an error of a worker arrives as text
        assert "raised by the data set for sample 11" in said


def test_errors_of_private_runs_name_no_samples(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no") as caught:
        train(Failing(3, epoch=0), tmp_path, epochs=2, backend="sp-dp")
    assert "samples" not in notes(caught.value)
    assert isinstance(caught.value, ValueError)
    assert not isinstance(caught.value, ts.TrainstackError)


def test_the_batch_of_an_evaluation_that_fails_is_named(tmp_path: Path) -> None:
    module, seen = Classifier(dataset=numbers(20), validate=True), list[Any]()

    def val_step(batch: Any, **_: Any) -> Any:
        seen.append(batch)
        return {}["absent"] if len(seen) == 3 else batch[0]

    module.val_step = val_step  # type: ignore[method-assign]
    with pytest.raises(KeyError) as caught:
        train(module, tmp_path, val_batch_size=4)
    assert "in batch 2 of val at global step " in notes(caught.value)


@pytest.mark.parametrize("where", ["train_step", "val_step", "get_train_dataloader", "batch_weight"])
def test_stop_training_outside_of_a_hook_is_refused(where: str, tmp_path: Path) -> None:
    def stop(*_: Any, **__: Any) -> Any:
        if module.armed:
            raise ts.StopTraining("enough")
        return getattr(Classifier, where)(module, *_, **__)

    module = type("Stops", (Classifier,), {"armed": False})(numbers(16), validate=True)
    setattr(module, where, stop)
    trainer = ts.Trainer(module, arguments(tmp_path, epochs=2))
    assert trainer.plan.steps_per_epoch == 2
    module.armed = True
    with pytest.raises(ts.ModuleContractError, match=r"StopTraining was raised in a step.*request_stop\(reason\)"):
        trainer.train()
    module.armed = False
    trainer.train()
    assert trainer.state.epoch == 2
