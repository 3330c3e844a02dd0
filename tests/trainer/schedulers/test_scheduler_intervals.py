"""The steps of schedulers, their arguments and factories, and equal intervals after a resume."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler as lrs

import trainstack as ts
from tests.helpers.modules import Classifier, arguments, numbers, train, weights
from trainstack import SchedulerConfig, placeholders

HALVES = functools.partial(lrs.StepLR, step_size=1, gamma=0.5)
PLATEAU = functools.partial(lrs.ReduceLROnPlateau, factor=0.5, patience=1, threshold=0.0)


class LikeTimm:
    """A scheduler with timm's methods: it does not count steps, and has separate calls for updates and epochs."""

    def __init__(self, optimizer: torch.optim.Optimizer, *, in_epochs: bool, warmup: int = 3) -> None:
        self.optimizer, self.in_epochs, self.warmup = optimizer, in_epochs, warmup
        self.base = [group["lr"] for group in optimizer.param_groups]
        self._set(0)

    def step(self, epoch: int, metric: float | None = None) -> None:
        if self.in_epochs:
            self._set(epoch)

    def step_update(self, num_updates: int, metric: float | None = None) -> None:
        if not self.in_epochs:
            self._set(num_updates)

    def _set(self, count: int) -> None:
        for group, base in zip(self.optimizer.param_groups, self.base, strict=True):
            group["lr"] = base * (1 + count) / self.warmup if count < self.warmup else base * 0.9**count

    def state_dict(self) -> dict[str, Any]:
        return {key: value for key, value in vars(self).items() if key != "optimizer"}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        vars(self).update(state)


class Scheduled(Classifier):
    """Six steps an epoch; records the learning rate of each step, and logs "val/score" for each epoch."""

    scores = (3.0, 2.0, 2.0, 2.0, 1.0, 1.0)

    def __init__(self, *schedulers: Any, stop_at: int | None = None) -> None:
        super().__init__(numbers(41), validate=True)
        self.schedulers, self.stop_at, self.rates, self.epoch = schedulers, stop_at, list[float](), 0

    def get_optimizers_schedulers(self, *_: Any) -> Any:
        self.made = torch.optim.SGD(self.parameters(), lr=1.0)
        return self.made, self.schedulers

    def on_begin_train_epoch(self, global_step: int, epoch: int) -> None:
        self.epoch = epoch

    def train_step(self, global_step: int, batch: Any, device: Any) -> Any:
        if global_step == self.stop_at:
            raise KeyboardInterrupt
        self.rates.append(self.made.param_groups[0]["lr"])
        return super().train_step(global_step, batch, device)

    def on_end_val_epoch(self, global_step: int, *outputs: Any, key: str = "default") -> None:
        self.log("val/score", self.scores[self.epoch])


INTERVALS: dict[str, tuple[Any, Callable[[int, int], float]]] = {
    "bare": (HALVES, lambda step, epoch: 0.5**step),
    "every step": (SchedulerConfig(HALVES, interval="step"), lambda step, epoch: 0.5**step),
    "every fourth step": (SchedulerConfig(HALVES, frequency=4), lambda step, epoch: 0.5 ** (step // 4)),
    "every epoch": (SchedulerConfig(HALVES, interval="epoch"), lambda step, epoch: 0.5**epoch),
    "every second epoch": (
        SchedulerConfig(HALVES, interval="epoch", frequency=2),
        lambda step, epoch: 0.5 ** (epoch // 2),
    ),
    # scores 3 2 2 2 1 1: the second bad epoch in a row is the fourth
    "plateau": (SchedulerConfig(PLATEAU, monitor="val/score"), lambda step, epoch: 0.5 if epoch >= 4 else 1.0),
    # 2, 2, 1: never two bad ones in a row
    "plateau every second epoch": (
        SchedulerConfig(PLATEAU, monitor="val/score", frequency=2),
        lambda step, epoch: 1.0,
    ),
    "timm by epoch": (
        functools.partial(LikeTimm, in_epochs=True),
        lambda step, epoch: (1 + epoch) / 3 if epoch < 3 else 0.9**epoch,
    ),
    "timm by update": (
        functools.partial(LikeTimm, in_epochs=False),
        lambda step, epoch: (1 + step) / 3 if step < 3 else 0.9**step,
    ),
}


@pytest.mark.spec("PA-10", "PA-11", "PA-18", "HZ-12", "F215", "F407")
@pytest.mark.parametrize("interval", INTERVALS)
def test_a_scheduler_keeps_its_intervals_over_resumes(interval: str, tmp_path: Path) -> None:
    scheduler, expected = INTERVALS[interval]
    unbroken = Scheduled(scheduler)
    whole = train(unbroken, tmp_path / "unbroken", epochs=6)
    assert unbroken.rates == pytest.approx([expected(step, step // 6) for step in range(36)])

    saving: dict[str, Any] = {"checkpointer_args": ts.DefaultCheckpointerArguments(every_n_steps=5), "epochs": 6}
    for stop_at in (6, 13, 21):
        with pytest.raises(KeyboardInterrupt):
            train(Scheduled(scheduler, stop_at=stop_at), tmp_path / "cut", **saving, resume="auto")
    resumed = Scheduled(scheduler)
    end = train(resumed, tmp_path / "cut", **saving, resume=True)

    assert resumed.rates == unbroken.rates[20:]
    assert torch.equal(weights(resumed), weights(unbroken))
    assert end.get_state()["schedulers"] == whole.get_state()["schedulers"]


def test_updates_that_moved_nothing_are_not_counted(tmp_path: Path) -> None:
    class Overflowing(Scheduled):
        def train_step(self, global_step: int, batch: Any, device: Any) -> Any:
            return super().train_step(global_step, batch, device) * (float("nan") if global_step in (2, 3) else 1.0)

    intervals = (SchedulerConfig(HALVES, frequency=2), SchedulerConfig(lambda o: LikeTimm(o, in_epochs=False)))
    for scheduler, expected in zip(
        intervals, ([1, 1, 1, 1, 0.5, 0.5], [1 / 3, 2 / 3, 2 / 3, 2 / 3, 1, 0.9**3]), strict=True
    ):
        module = Overflowing(scheduler)
        train(module, tmp_path, nonfinite="skip")
        assert module.rates == pytest.approx(expected)


@pytest.mark.spec("HZ-12")
def test_epochs_without_a_new_value_are_not_counted(tmp_path: Path) -> None:
    class Sometimes(Scheduled):
        def on_end_val_epoch(self, global_step: int, *outputs: Any, key: str = "default") -> None:
            if self.epoch % 2 == 0:
                self.log("val/score", 1.0)

    module = Sometimes(SchedulerConfig(PLATEAU, monitor="val/score"))
    train(module, tmp_path, epochs=6)

    assert module.rates == [1.0] * 30 + [0.5] * 6


@pytest.mark.spec("PA-11", "HZ-12")
@pytest.mark.parametrize("name", ["val/loss", "train/loss_epoch"])
def test_the_losses_of_the_epoch_that_ends_can_be_monitored(name: str, tmp_path: Path) -> None:
    class Watching:
        """A custom scheduler: any object with `step(value)`, `state_dict` and `load_state_dict`."""

        def __init__(self, optimizer: Any) -> None:
            self.values: list[float] = []

        def step(self, value: float) -> None:
            self.values.append(value)

        def state_dict(self) -> dict[str, Any]:
            return {"values": self.values}

        def load_state_dict(self, state: Mapping[str, Any]) -> None:
            self.values = state["values"]

    trainer = train(Scheduled(SchedulerConfig(Watching, monitor=name)), tmp_path, epochs=3)

    assert trainer.get_state()["schedulers"][0]["state"]["values"] == trainer.history.get_metric_values(name)


@pytest.mark.spec("PA-10", "PA-15")
def test_a_factory_gets_the_optimizer_and_resolved_placeholders(tmp_path: Path) -> None:
    seen = []

    def make(optimizer: Any, steps: int, options: Mapping[str, Any]) -> Any:
        seen.append((optimizer, steps, options))
        return lrs.OneCycleLR(optimizer, max_lr=1.0, total_steps=steps)

    options = {"warm": [placeholders.NUM_EPOCHS * 2]}
    module = Scheduled(functools.partial(make, steps=placeholders.TOTAL_STEPS + 1, options=options))
    train(module, tmp_path, epochs=3)

    assert seen == [(module.made, 19, {"warm": [6]})]


@pytest.mark.spec("PA-10")
def test_each_factory_gets_the_optimizer_at_its_position(tmp_path: Path) -> None:
    class Two(Scheduled):
        def get_optimizers_schedulers(self, *_: Any) -> Any:
            self.both = [torch.optim.SGD(self.net[i].parameters(), lr=1.0) for i in (0, 3)]
            self.made = self.both[0]
            return self.both, self.schedulers

    module = Two(HALVES, SchedulerConfig(HALVES, interval="epoch"))
    train(module, tmp_path)
    assert [optimizer.param_groups[0]["lr"] for optimizer in module.both] == [0.5**6, 0.5]

    with pytest.raises(ts.ModuleContractError, match="scheduler 2 is a factory, and there are 2 optimizers"):
        train(Two(HALVES, HALVES, HALVES), tmp_path)


FITTING = {
    "epochs under max_steps": SchedulerConfig(
        functools.partial(lrs.OneCycleLR, max_lr=1.0, total_steps=4), interval="epoch"
    ),
    "every second step": SchedulerConfig(functools.partial(lrs.OneCycleLR, max_lr=1.0, total_steps=10), frequency=2),
}


@pytest.mark.parametrize("kind", FITTING)
def test_a_resume_accepts_a_schedule_that_just_fits(kind: str, tmp_path: Path) -> None:
    """Nine steps of three an epoch, resumed after four: the remaining steps are counted in its interval."""
    unbroken = Scheduled(FITTING[kind])
    options: dict[str, Any] = {"max_steps": 9, "train_batch_size": 14}
    train(unbroken, tmp_path / "unbroken", **options)

    saving = {"checkpointer_args": ts.DefaultCheckpointerArguments(every_n_steps=1), **options}
    with pytest.raises(KeyboardInterrupt):
        train(Scheduled(FITTING[kind], stop_at=5), tmp_path / "cut", **saving)
    resumed = Scheduled(FITTING[kind])
    trainer = train(resumed, tmp_path / "cut", resume=True, **saving)

    assert trainer.global_steps_finished == 9
    assert resumed.rates == unbroken.rates[4:]
    assert torch.equal(weights(resumed), weights(unbroken))


@pytest.mark.spec("PMT-16", "PA-15")
def test_schedulers_that_start_again_are_planned_for_the_remaining_epochs(tmp_path: Path) -> None:
    saving = ts.DefaultCheckpointerArguments()
    train(Scheduled(ts.build_scheduler("warmup_linear")), tmp_path, epochs=2, checkpointer_args=saving)
    module = Scheduled(ts.build_scheduler("warmup_linear"))
    train(module, tmp_path, epochs=3, checkpointer_args=saving, resume=True, reset_optimizers_schedulers=True)

    assert module.rates == pytest.approx([1 - step / 6 for step in range(6)])


def test_a_schedule_for_fewer_epochs_is_kept_and_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    saving = ts.DefaultCheckpointerArguments()
    train(Scheduled(ts.build_scheduler("warmup_linear")), tmp_path, epochs=2, checkpointer_args=saving)
    module = Scheduled(ts.build_scheduler("warmup_linear"))
    train(module, tmp_path, epochs=3, checkpointer_args=saving, resume=True)

    assert module.rates == [0.0] * 6
    row = r"schedulers\.0\.lr_lambdas +\[{'total_steps': 12.*\[{'total_steps': 18.*none: the saved value is used"
    assert re.search(row, caplog.text)


def timm_plateau(optimizer: Any) -> Any:
    scheduler = LikeTimm(optimizer, in_epochs=True)
    scheduler.lr_scheduler = lrs.ReduceLROnPlateau(optimizer)  # type: ignore[attr-defined]
    return scheduler


MISTAKES: dict[str, tuple[Any, str]] = {
    "a bare plateau": (
        PLATEAU,
        r"ReduceLROnPlateau steps on a value.*SchedulerConfig\(scheduler, monitor='val/loss'\)",
    ),
    "a monitor for one that takes no value": (
        SchedulerConfig(HALVES, monitor="val/loss"),
        "StepLR takes no value when it steps. Remove monitor",
    ),
    "a interval for timm's": (
        SchedulerConfig(functools.partial(LikeTimm, in_epochs=True), interval="epoch"),
        "LikeTimm is one of timm's schedulers.*Return it without interval",
    ),
    "timm's plateau": (timm_plateau, "timm's LikeTimm does not save its whole state.*ReduceLROnPlateau"),
    "a factory of nothing": (lambda optimizer: None, "returned a NoneType, not a scheduler of that optimizer"),
    "a factory for another optimizer": (
        lambda optimizer: HALVES(torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)),
        "returned a StepLR, not a scheduler of that optimizer",
    ),
    "a string": ("cosine", "get_optimizers_schedulers returned a str among the schedulers"),
    "a string in a config": (SchedulerConfig("cosine"), "returned a str among the schedulers"),
    "a placeholder alone": (placeholders.TOTAL_STEPS, "returned a Placeholder among the schedulers"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_objects_that_cannot_be_stepped_are_refused_before_anything_runs(mistake: str, tmp_path: Path) -> None:
    scheduler, message = MISTAKES[mistake]
    with pytest.raises((ts.ModuleContractError, ts.ConfigurationError), match=message):
        _ = ts.Trainer(Scheduled(scheduler), arguments(tmp_path)).plan


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"interval": "batch"}, "interval='batch': write 'step' or 'epoch'"),
        ({"frequency": 0}, "frequency=0: write a whole number"),
        ({"frequency": True}, "frequency=True: write a whole number"),
        ({"monitor": ""}, "monitor='': write the name of a metric"),
        ({"monitor": "val/loss", "interval": "step"}, "interval='step' with monitor='val/loss'.*Remove interval"),
    ],
)
def test_impossible_intervals_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ts.ConfigurationError, match=message):
        SchedulerConfig(HALVES, **options)


def test_an_unrecorded_monitor_is_named_after_the_first_epoch(tmp_path: Path) -> None:
    with pytest.raises(ts.ConfigurationError, match=r"a scheduler monitors 'val/los'.*Did you mean 'val/loss'"):
        train(Scheduled(SchedulerConfig(PLATEAU, monitor="val/los")), tmp_path)


def test_an_error_in_a_factory_names_the_scheduler(tmp_path: Path) -> None:
    with pytest.raises(TypeError) as caught:
        train(Scheduled(functools.partial(lrs.StepLR, size=3)), tmp_path)

    assert "raised when StepLR was called with the optimizer to make scheduler 0" in caught.value.__notes__


class Rate:
    """A rate that depends on the number of its calls."""

    def __init__(self, scale: float) -> None:
        self.scale, self.asked = scale, torch.zeros(2)

    def __call__(self, step: int) -> float:
        self.asked += 1
        return self.scale / (1 + float(self.asked[0]))


class Asked(Classifier):
    scale = 1.0

    def get_optimizers_schedulers(self, estimated_global_steps_per_epoch: int, epochs: int) -> tuple[Any, Any]:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, Rate(self.scale))


def test_a_rate_that_counts_calls_is_the_same_schedule(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    saving = ts.DefaultCheckpointerArguments()
    for epochs in (1, 2, 3):
        train(Asked(), tmp_path, epochs=epochs, checkpointer_args=saving, resume="auto")
    assert "lr_lambdas" not in caplog.text

    other = Asked()
    other.scale = 2.0
    train(other, tmp_path, epochs=4, checkpointer_args=saving, resume="auto")
    assert re.search(r"schedulers\.0\.lr_lambdas .*\[{'scale': 2\.0", caplog.text)
