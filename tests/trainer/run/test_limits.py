"""A run ends after a number of global steps, and later if `train` is called again."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler as lrs

import trainstack as ts
from tests.helpers.modules import Classifier, Noisy, arguments, train, weights
from trainstack.trainer.core.plan import TrainingPlan


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
def test_a_run_ends_after_the_given_number_of_steps(
    limits: dict[str, Any], steps: int, ended: list[int], validated: list[int], tmp_path: Path
) -> None:
    module = Hooked()
    trainer = train(module, tmp_path, **limits)

    assert trainer.global_steps_finished == trainer.plan.total_steps == steps
    assert module.ended == ended
    assert val_steps(trainer) == validated
    if "backend" not in limits:  # a private run records no loss
        assert [record.step for record in trainer.history.records("train/loss")] == [steps]
    trainer.train()
    assert trainer.global_steps_finished == steps


def test_a_loader_without_a_length_is_read_repeatedly(tmp_path: Path) -> None:
    class Stream(Hooked):
        def get_train_dataloader(self, sampler: Any, batch_size: int) -> Any:
            return iter([*super().get_train_dataloader(sampler, batch_size)])

    assert train(Stream(), tmp_path, max_steps=14).global_steps_finished == 14
    capped = train(module := Stream(), tmp_path, max_steps=6, max_train_steps_per_epoch=3)
    assert (module.ended, val_steps(capped)) == ([3, 6], [3, 6])  # the cap ends an epoch here, too
    with pytest.raises(ts.ConfigurationError, match=r"max_steps=0.5 is a fraction.*no length"):
        train(Stream(), tmp_path, max_steps=0.5)


@pytest.mark.parametrize("wrong", [0, -3, 1.5, True, "10"])
def test_a_value_other_than_a_number_of_steps_is_refused(wrong: Any) -> None:
    with pytest.raises(ts.ConfigurationError, match=r"max_steps=.*whole number of global steps"):
        ts.TrainerArguments(max_steps=wrong)


@pytest.mark.parametrize("max_steps", [4, 6, 9])
def test_a_limited_run_resumes_exactly_from_any_step(max_steps: int, tmp_path: Path) -> None:
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
def test_train_called_again_equals_one_longer_training(
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


def test_arguments_of_the_first_train_call_extend_the_run(tmp_path: Path) -> None:
    trainer = ts.Trainer(Hooked(), arguments(tmp_path))
    trainer.train(epochs=2)
    assert trainer.global_steps_finished == 12
    with pytest.raises(ts.ConfigurationError, match="epochs=-1"):
        trainer.train(epochs=-1)


class Scheduled(Classifier):
    """Six global steps an epoch, and a schedule for a number of steps."""

    def __init__(self, make: Callable[[torch.optim.Optimizer, int], Any]) -> None:
        super().__init__()
        self.make = make

    def get_optimizers_schedulers(self, *_: Any) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        return optimizer, self.make(optimizer, self.plan.total_steps)  # type: ignore[union-attr, arg-type]


ENDS = "it ends before, and the rate of the last update would be 0"
TOO_SHORT: dict[str, tuple[Callable[[torch.optim.Optimizer, int], Any], str]] = {
    "a cycle": (lambda o, n: lrs.OneCycleLR(o, 0.1, n), "it ends after 6 of its steps, and torch refuses to make more"),
    "a cycle by epochs": (lambda o, n: ts.SchedulerConfig(lrs.OneCycleLR(o, 0.1, 1), interval="epoch"), "after 1 of"),
    "a cosine": (lambda o, n: lrs.CosineAnnealingLR(o, n), "after T_max=6 of its steps the rate would rise again"),
    "the library's cosine": (lambda o, n: ts.schedulers.warmup_cosine(o, n, warmup=2), ENDS),
    "the library's line": (lambda o, n: ts.schedulers.warmup_linear(o, n), ENDS),
    "a function of the step": (lambda o, n: lrs.LambdaLR(o, lambda step: max(0.0, 1 - step / n)), ENDS),
    "a polynomial": (lambda o, n: lrs.PolynomialLR(o, n, power=2), ENDS),
    "a line to zero": (lambda o, n: lrs.LinearLR(o, 1.0, 0.0, n), ENDS),
    "a warm-up, then a polynomial": (
        lambda o, n: lrs.SequentialLR(o, [lrs.LinearLR(o, 0.1, total_iters=2), lrs.PolynomialLR(o, n - 2)], [2]),
        ENDS,
    ),
    "a warm-up on top of a line": (
        lambda o, n: lrs.ChainedScheduler([lrs.ConstantLR(o, 0.5, 2), lrs.LinearLR(o, 1.0, 0.0, n)]),
        ENDS,
    ),
}
LONG_ENOUGH: dict[str, Callable[[torch.optim.Optimizer, int], Any]] = {
    "a warm-up": lambda o, n: lrs.LinearLR(o, 0.1, total_iters=3),
    "a constant": lambda o, n: lrs.ConstantLR(o, 0.5, 3),
    "a line to a tenth": lambda o, n: lrs.LinearLR(o, 1.0, 0.1, n),
    "a cosine to a tenth": lambda o, n: ts.schedulers.warmup_cosine(o, n, final_ratio=0.1),
    "a root": lambda o, n: ts.schedulers.inverse_sqrt(o, warmup=2),
    "a cosine that swings": lambda o, n: lrs.CosineAnnealingLR(o, 3),
    "a polynomial over more": lambda o, n: lrs.PolynomialLR(o, 3 * n),
    "a cycle by epochs over more": lambda o, n: ts.SchedulerConfig(lrs.OneCycleLR(o, 0.1, 3), interval="epoch"),
    "one that is not torch's": lambda o, n: Halving(o),
    "a warm-up, then a polynomial over more": lambda o, n: lrs.SequentialLR(
        o, [lrs.ConstantLR(o, 0.5, 30), lrs.PolynomialLR(o, 2)], [30]
    ),
}


class Halving:
    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer

    def step(self) -> None:
        self.optimizer.param_groups[0]["lr"] /= 2

    def state_dict(self) -> dict[str, Any]:
        return {}


@pytest.mark.parametrize("longer", [{"epochs": 3}, {"max_steps": 15}], ids=str)
@pytest.mark.parametrize("kind", TOO_SHORT)
def test_a_schedule_shorter_than_the_extended_run_is_refused(kind: str, longer: dict[str, Any], tmp_path: Path) -> None:
    make, words = TOO_SHORT[kind]
    trainer = train(Scheduled(make), tmp_path)
    written = "=".join(map(str, *longer.items()))
    with pytest.raises(ts.ConfigurationError, match=rf"train\({written}\) .*{words}.*Write {written} in TrainerArg"):
        trainer.train(**longer)

    assert (trainer.args.epochs, trainer.args.max_steps, trainer.plan.total_steps) == (1, None, 6)
    trainer.train()
    assert trainer.global_steps_finished == 6


@pytest.mark.parametrize("kind", LONG_ENOUGH)
def test_a_schedule_that_leaves_a_rate_continues(kind: str, tmp_path: Path) -> None:
    make = LONG_ENOUGH[kind]
    trainer, planned = train(Scheduled(make), tmp_path), Scheduled(lambda o, n: make(o, 6))
    trainer.train(epochs=3)
    train(planned, tmp_path, epochs=3)

    assert trainer.global_steps_finished == 18
    assert torch.equal(weights(trainer.module), weights(planned))


def test_the_plan_shows_the_length_of_the_run() -> None:
    plan = TrainingPlan.make(train_batch_size=8, gpu_batch_size_limit=8, dataset_length=41, max_steps=15)
    assert (plan.epochs, plan.total_steps, plan.estimated_global_steps_per_epoch) == (3, 15, 7)
    assert plan.rest(2, 12).total_steps == 3
    assert ("steps", "6 per epoch (1 sample in the last), 15 in 3 epochs") in plan.rows()
