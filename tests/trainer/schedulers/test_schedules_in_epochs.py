"""Schedules with a length in epochs that step after each update, and schedulers without a state."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler

import trainstack as ts
from tests.helpers.modules import Classifier, numbers, train
from trainstack import schedulers

STEPS = 5  # an epoch


class Scheduled(Classifier):
    """Forty samples; `make` gets the optimizer and the module, which has the plan."""

    def __init__(self, make: Callable[[Any, Any], Any]) -> None:
        super().__init__(numbers(8 * STEPS))
        self.make = make

    def get_optimizers_schedulers(self, *_: Any) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        return [optimizer], [self.make(optimizer, self)]


def warning_of(make: Callable[[Any, Any], Any], path: Path, caplog: pytest.LogCaptureFixture, epochs: int) -> str:
    with suppress(ts.ModuleContractError):  # OneCycleLR ends
        train(Scheduled(make), path, epochs=epochs)
    return " ".join(record.message for record in caplog.records if "it steps once after" in record.message)


def sequence(optimizer: Any, length: int) -> Any:
    warm_up = lr_scheduler.LinearLR(optimizer, 0.1, 1.0, total_iters=1)
    rest = lr_scheduler.CosineAnnealingLR(optimizer, length - 1)
    return lr_scheduler.SequentialLR(optimizer, [warm_up, rest], milestones=[1])


def falling(step: int, *, num_training_steps: int) -> float:
    return max(0.1, 1 - step / num_training_steps)


IN_EPOCHS = {
    "cosine": lambda o, length: lr_scheduler.CosineAnnealingLR(o, T_max=length),
    "restarts": lambda o, length: lr_scheduler.CosineAnnealingWarmRestarts(o, T_0=length),
    "linear": lambda o, length: lr_scheduler.LinearLR(o, 1.0, 0.1, total_iters=length),
    "polynomial": lambda o, length: lr_scheduler.PolynomialLR(o, total_iters=length),
    "milestones": lambda o, length: lr_scheduler.MultiStepLR(o, milestones=[1, length]),
    "one cycle": lambda o, length: lr_scheduler.OneCycleLR(o, 0.1, total_steps=length),
    "sequence": sequence,
    "chain": lambda o, length: lr_scheduler.ChainedScheduler([lr_scheduler.CosineAnnealingLR(o, length)], optimizer=o),
    "factory": lambda o, length: partial(lr_scheduler.CosineAnnealingLR, T_max=length),
    "warmup_cosine": lambda o, length: schedulers.warmup_cosine(o, length),
    "transformers": lambda o, length: lr_scheduler.LambdaLR(o, partial(falling, num_training_steps=length)),
}


@pytest.mark.parametrize("name", IN_EPOCHS)
def test_a_length_in_epochs_causes_a_warning(name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    make = IN_EPOCHS[name]
    said = warning_of(lambda optimizer, module: make(optimizer, 2), tmp_path, caplog, epochs=2)
    assert "was made for 2 steps; it steps once after each of 10 updates. Use self.plan.total_steps, or Sched" in said


@pytest.mark.parametrize("name", IN_EPOCHS)
@pytest.mark.parametrize("epochs", [1, 2])
def test_a_length_in_updates_causes_no_warning(
    name: str, epochs: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    make = IN_EPOCHS[name]
    said = warning_of(lambda optimizer, module: make(optimizer, module.plan.total_steps), tmp_path, caplog, epochs)
    assert not said


def test_a_step_size_in_epochs_causes_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    said = warning_of(lambda o, module: lr_scheduler.StepLR(o, 1, 0.5), tmp_path, caplog, epochs=2)
    assert said.startswith("StepLR was made for 1 step; it steps once after each of 10 updates.")


@pytest.mark.parametrize(
    "make",
    [
        lambda o: lr_scheduler.StepLR(o, 1, 0.99),
        lambda o: lr_scheduler.LinearLR(o, 0.1, 1.0, total_iters=2),
        lambda o: lr_scheduler.ConstantLR(o, 0.5, total_iters=2),
        lambda o: lr_scheduler.LambdaLR(o, lambda step: 0.9**step),
        lambda o: ts.SchedulerConfig(lr_scheduler.CosineAnnealingLR(o, 2), interval="epoch"),
        lambda o: ts.SchedulerConfig(lr_scheduler.StepLR(o, 1, 0.1), frequency=STEPS),
    ],
)
def test_intended_schedules_cause_no_warning(make: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert not warning_of(lambda optimizer, module: make(optimizer), tmp_path, caplog, epochs=2)


class Stateless:
    def __init__(self, optimizer: Any) -> None:
        self.optimizer, self.steps = optimizer, 0

    def step(self) -> None:
        self.steps += 1


def test_a_stateless_scheduler_is_refused_before_the_first_step(tmp_path: Path) -> None:
    module = Scheduled(lambda optimizer, module: Stateless(optimizer))
    saves = ts.DefaultCheckpointerArguments(checkpoint=True)
    with pytest.raises(ts.ModuleContractError, match="Stateless has no state_dict and no load_state_dict"):
        train(module, tmp_path, checkpointer_args=saves)


def test_a_stateless_scheduler_works_without_checkpoints(tmp_path: Path) -> None:
    made = list[Stateless]()

    def make(optimizer: Any, module: Any) -> Stateless:
        made.append(Stateless(optimizer))
        return made[0]

    train(Scheduled(make), tmp_path)
    assert made[0].steps == STEPS
