"""Validation data without a step, and validations without a loss."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

import trainstack as ts
from tests.helpers.modules import Classifier, arguments, numbers, train


def broken(**methods: Any) -> Classifier:
    """A classifier with some methods replaced."""
    return type("Broken", (Classifier,), methods)(numbers(16))


class Validated(Classifier):
    """Without a `val_step`; counts the calls of its methods and its training steps."""

    val_step = ts.ModuleInterface.val_step

    def __init__(self, data: bool = True) -> None:
        super().__init__(numbers(16), validate=data)
        self.asked = self.trained = 0

    def get_val_dataloaders(self, sampler: Any, batch_size: int) -> Any:
        self.asked += 1
        return super().get_val_dataloaders(sampler, batch_size)

    def train_step(self, global_step: int, batch: Any, device: Any) -> Any:
        self.trained += 1
        return super().train_step(global_step, batch, device)


def step_of_ones_own(module: Any, global_step: int, batch: Any, device: Any) -> Any:
    return module.train_step(global_step, batch, device)


class TestValidationDataWithoutAStep:
    def test_it_is_refused_before_the_first_step(self, tmp_path: Path) -> None:
        module = Validated()
        with pytest.raises(ts.ModuleContractError, match="Validated has no val_step, but get_val_dataloaders returned"):
            train(module, tmp_path)
        assert module.trained == 0

    def test_none_means_no_data(self, tmp_path: Path) -> None:
        assert train(Validated(data=False), tmp_path).global_steps_finished == 2

    def test_validation_data_are_not_requested_without_a_validation(self, tmp_path: Path) -> None:
        module = Validated()
        assert train(module, tmp_path, validate_every=0).global_steps_finished == 2
        assert module.asked == 0

    def test_a_val_step_of_the_trainer_suffices(self, tmp_path: Path) -> None:
        module = Validated()
        trainer = ts.Trainer(module, arguments(tmp_path, epochs=2), val_step=step_of_ones_own)
        trainer.train()
        assert (trainer.global_steps_finished, module.asked) == (4, 2)

    def test_a_custom_forward_suffices(self, tmp_path: Path) -> None:
        class Forwards(Validated):
            def forward(self, stage: Any, global_step: int, batch: Any, device: Any) -> Any:
                return self.train_step(global_step, batch, device)

        module = Forwards()
        assert train(module, tmp_path).global_steps_finished == 2
        assert module.asked == 1


@dataclasses.dataclass
class Found:
    loss: Any


@pytest.mark.parametrize(
    "returned",
    [0.5, (0.5, torch.zeros(8)), {"loss": 1}, Found(numpy.float32(0.5))],
    ids=["alone", "tuple", "dict", "data"],
)
def test_a_number_as_validation_loss_is_logged_once(
    returned: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    module = broken(val_step=lambda self, **given: returned)
    module.validates = True
    trainer = train(module, tmp_path, epochs=2, sanity_val_steps=1)

    assert "val/loss" not in trainer.history.get_metric_names()
    said = [record.message for record in caplog.records if "as its loss, which must be a tensor" in record.message]
    kind = "int" if isinstance(returned, dict) else "float"
    assert len(said) == 1
    assert said[0].startswith(f"val_step returned a {kind}")
    assert said[0].endswith("no val/loss is recorded. Return the tensor itself, without .item() or float().")


@pytest.mark.parametrize(
    "returned", [None, {"preds": torch.zeros(8)}, (torch.zeros(8), 0.5), torch.tensor(0.5)], ids=str
)
def test_other_validation_outputs_are_not_logged(
    returned: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    module = broken(val_step=lambda self, **given: returned)
    module.validates = True
    train(module, tmp_path)

    assert "as its loss, which must be a tensor" not in caplog.text
