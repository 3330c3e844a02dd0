"""Where a run ends: after a number of global steps, and further on when `train` is called again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import trainstack as ts
from tests.helpers.modules import Classifier, Noisy, arguments, train, weights
from trainstack.trainer.plan import TrainingPlan


class Hooked(Classifier):
    """Three classes, six global steps an epoch."""

    def __init__(self, **changes: Any) -> None:
        super().__init__(**{"dropout": 0.3, "validate": True, **changes})
        self.ended: list[int] = []

    def on_end_train_epoch(self, global_step: int) -> None:
        self.ended.append(global_step)


def val_steps(trainer: ts.Trainer) -> list[int]:
    history = trainer.history
    return [record.step for record in history.records("val/loss")] if "val/loss" in history.get_metric_names() else []


@pytest.mark.spec("PA-07", "HZ-07", "FN-06", "F401", "F211")
@pytest.mark.parametrize(
    ("limits", "steps", "ended", "validated"),
    [
        ({"max_steps": 15}, 15, [6, 12], [6, 12, 15]),
        ({"max_steps": 12}, 12, [6, 12], [6, 12]),
        ({"max_steps": 4}, 4, [], [4]),
        ({"max_steps": 5, "epochs": 9, "validate_every": 2}, 5, [], [2, 4]),
        ({"max_steps": 5, "validate_every": 0}, 5, [], []),
        ({"max_steps": 0.4, "epochs": 3}, 8, [6], [6, 8]),
        ({"max_steps": 7, "max_train_steps_per_epoch": 3}, 7, [3, 6], [3, 6, 7]),
        ({"max_steps": 7, "backend": "sp-dp"}, 7, [6], [6, 7]),
        ({"max_steps": 7, "gpu_batch_size_limit": 3}, 7, [6], [6, 7]),
    ],
    ids=str,
)
def test_a_run_over_epochs_of_six_steps_ends_after_so_many(
    limits: dict[str, Any], steps: int, ended: list[int], validated: list[int], tmp_path: Path
) -> None:
    module = Hooked()
    trainer = train(module, tmp_path, **limits)

    assert trainer.global_steps_finished == trainer.plan.total_steps == steps
    assert module.ended == ended
    assert val_steps(trainer) == validated
    if "backend" not in limits:  # a private run tells no loss
        assert [record.step for record in trainer.history.records("train/loss")] == [steps]
    trainer.train()
    assert trainer.global_steps_finished == steps


def test_a_loader_without_a_length_is_read_as_often_as_it_takes(tmp_path: Path) -> None:
    class Stream(Hooked):
        def get_train_dataloader(self, sampler: Any, batch_size: int) -> Any:
            return iter([*super().get_train_dataloader(sampler, batch_size)])

    assert train(Stream(), tmp_path, max_steps=14).global_steps_finished == 14
    with pytest.raises(ts.ConfigurationError, match=r"max_steps=0.5 is a fraction.*no length"):
        train(Stream(), tmp_path, max_steps=0.5)


@pytest.mark.parametrize("wrong", [0, -3, 1.5, True, "10"])
def test_what_is_no_number_of_steps_is_refused(wrong: Any) -> None:
    with pytest.raises(ts.ConfigurationError, match=r"max_steps=.*whole number of global steps"):
        ts.TrainerArguments(max_steps=wrong)


@pytest.mark.parametrize("max_steps", [4, 6, 9])
def test_a_limited_run_resumed_from_any_step_ends_as_if_unbroken(max_steps: int, tmp_path: Path) -> None:
    made: dict[str, Any] = {"max_steps": max_steps, "log_every": 2}
    saving = ts.DefaultCheckpointerArguments(every_n_steps=1)
    torch.manual_seed(1)
    unbroken = train(Hooked(scheduler=True), tmp_path, checkpointer_args=saving, **made)
    found = [i for i in ts.list_checkpoints(tmp_path / "checkpoints") if i.kind == "checkpoint"]
    assert found[-1].global_step == max_steps
    for info in found:
        resumed = train(Hooked(scheduler=True, seed=9), tmp_path / info.name, resume=str(info.path), **made)
        assert torch.equal(weights(resumed.module), weights(unbroken.module))
        assert resumed.history.to_dict() == unbroken.history.to_dict()


@pytest.mark.spec("FN-34")
@pytest.mark.parametrize("first", [{"epochs": 1}, {"epochs": 2}, {"max_steps": 4}, {"max_steps": 8}], ids=str)
@pytest.mark.parametrize("then", [{"epochs": 3}, {"max_steps": 15}], ids=str)
def test_train_called_again_goes_on_as_if_it_had_never_ended(
    first: dict[str, Any], then: dict[str, Any], tmp_path: Path
) -> None:
    torch.manual_seed(1)
    unbroken = train(Hooked(dataset=Noisy()), tmp_path / "unbroken", **then)
    torch.manual_seed(1)
    trainer = train(Hooked(dataset=Noisy()), tmp_path, **first)
    before = trainer.global_steps_finished
    trainer.train(**then)

    assert before < trainer.global_steps_finished == unbroken.global_steps_finished
    assert torch.equal(weights(trainer.module), weights(unbroken.module))
    assert trainer.module.plan.total_steps == unbroken.plan.total_steps  # type: ignore[union-attr]
    trainer.train(**first)
    assert trainer.global_steps_finished == unbroken.global_steps_finished


def test_a_longer_run_may_be_asked_for_before_the_first(tmp_path: Path) -> None:
    trainer = ts.Trainer(Hooked(), arguments(tmp_path))
    trainer.train(epochs=2)
    assert trainer.global_steps_finished == 12
    with pytest.raises(ts.ConfigurationError, match="epochs=-1"):
        trainer.train(epochs=-1)


def test_a_schedule_that_would_end_before_the_longer_run_is_refused(tmp_path: Path) -> None:
    class Cycle(Classifier):
        def get_optimizers_schedulers(self, *_: Any) -> Any:
            optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
            return optimizer, torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, self.plan.total_steps)  # type: ignore[union-attr]

    trainer = train(Cycle(), tmp_path, max_steps=4)
    with pytest.raises(ts.CheckpointMismatchError, match="OneCycleLR"):
        trainer.train(max_steps=9)


def test_the_plan_says_how_long_the_run_is() -> None:
    plan = TrainingPlan.make(train_batch_size=8, gpu_batch_size_limit=8, dataset_length=41, max_steps=15)
    assert (plan.epochs, plan.total_steps, plan.estimated_global_steps_per_epoch) == (3, 15, 7)
    assert plan.rest(2, 12).total_steps == 3
    assert ("global steps in all", "15 in 3 epochs") in plan.rows()
