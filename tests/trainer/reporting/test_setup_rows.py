"""The printed plan, and the warning about gradients that are mostly clipped."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import trainstack as ts
from tests.helpers.modules import Classifier, arguments, numbers, train
from tests.helpers.specs import stacks_that_run_here

Logs = pytest.LogCaptureFixture


def plan_of(
    module: ts.ModuleInterface, path: Path, capsys: pytest.CaptureFixture[str], **changes: Any
) -> dict[str, str]:
    """The rows of the printed plan; a row of several lines has them in its value."""
    train(module, path, **{"writers": ["stdout"], "report": False, **changes})
    table = re.split(r"^(?:epoch|step)=", capsys.readouterr().out, maxsplit=1, flags=re.MULTILINE)[0].splitlines()
    assert len(table) <= 14
    width = max(len(line) - len(line.partition("  ")[2].lstrip()) for line in table if line[0] != " ")
    rows, label = dict[str, str](), ""
    for line in table:
        label = line[:width].strip() or label
        rows[label] = f"{rows[label]}\n{line[width:]}" if label in rows else line[width:]
    return rows


PLAIN = {
    "model": "Classifier, 83 parameters, all trainable",
    "data": "16 samples per epoch, shuffled with seed 0",
    "validation": "after each epoch",
    "batch": "8 samples = 1 process x 1 micro-batch x 8",
    "steps": "2 per epoch, 2 in 1 epoch",
    "optimizer": "SGD lr 0.1",
    "gradients": "clipped to norm 1.0 (clip_grads=False for none)",
    "backend": "sp on cpu",
}


def test_the_plan_has_the_decisive_settings(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert plan_of(Classifier(numbers(16), validate=True), tmp_path, capsys) == PLAIN


class Sequential(Classifier):
    def get_train_dataloader(self, sampler: Any, batch_size: int) -> Any:
        return DataLoader(self.dataset, batch_size)


class NoValidationData(Classifier):
    get_val_dataloaders = ts.ModuleInterface.get_val_dataloaders


MISTAKES: list[tuple[str, type[Classifier], dict[str, Any], dict[str, str]]] = [
    (
        "no sampler",
        Sequential,
        {},
        {"data": "16 samples per epoch, in data set order (sampler=sampler(dataset) to shuffle)"},
    ),
    (
        "the default batch size",
        Classifier,
        {"train_batch_size": 1},
        {"batch": "1 sample = 1 process x 1 micro-batch x 1", "steps": "16 per epoch, 16 in 1 epoch"},
    ),
    (
        "val_step without data",
        NoValidationData,
        {},
        {
            "model": "NoValidationData, 83 parameters, all trainable",
            "validation": "none: get_val_dataloaders is not defined",
        },
    ),
    (
        "a prime batch size",
        Classifier,
        {"train_batch_size": 13, "gpu_batch_size_limit": 4},
        {
            "batch": "13 samples = 1 process x 4 micro-batches x 4, the last of 1",
            "steps": "2 per epoch (3 samples in the last), 2 in 1 epoch",
        },
    ),
    ("another folder", Classifier, {"writers": ["stdout", "csv"]}, {"output": "rnus/one"}),
]


@pytest.mark.parametrize(
    ("made", "changes", "expected"), [case[1:] for case in MISTAKES], ids=[case[0] for case in MISTAKES]
)
def test_the_plan_shows_a_mistake(
    made: Any,
    changes: Any,
    expected: dict[str, str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    own = {"model": f"{made.__name__}, 83 parameters, all trainable"}
    rows = plan_of(made(numbers(16), validate=True), Path("rnus/one"), capsys, **changes)
    assert rows == {**PLAIN, **own, **expected}


class Odd(NoValidationData):
    """In data set order, with a frozen layer, one in no optimizer, and a warm-up."""

    get_train_dataloader = Sequential.get_train_dataloader

    def __init__(self) -> None:
        super().__init__(numbers(16))
        self.frozen, self.alone = nn.Linear(2, 2).requires_grad_(False), nn.Linear(3, 3)

    def get_optimizers_schedulers(self, *_: Any) -> Any:
        groups: list[Any] = [{"params": [self.net[0].weight], "lr": 1e-4}, {"params": [self.net[0].bias]}]
        optimizers = [torch.optim.SGD(groups, lr=1.0), torch.optim.AdamW(self.net[3].parameters(), lr=0.01)]
        first, second = [torch.optim.lr_scheduler.LambdaLR(one, lambda step: step / 8) for one in optimizers]
        return optimizers, [first, ts.SchedulerConfig(second, interval="epoch", frequency=2)]


@pytest.mark.parametrize(
    ("changes", "gradients"),
    [
        ({"clip_grads": False}, "not clipped"),
        ({"clip_grad_value": 0.5}, "each value clipped to [-0.5, 0.5] (clip_grads=False for none)"),
        ({"max_grad_norm": 5.0}, "clipped to norm 5.0 (clip_grads=False for none)"),
    ],
)
def test_the_plan_shows_unusual_settings(
    changes: Any, gradients: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = plan_of(Odd(), tmp_path, capsys, **changes)
    assert rows["data"] == "16 samples per epoch, in data set order (sampler=sampler(dataset) to shuffle)"
    assert rows["optimizer"] == (
        "SGD lr 0.0001 to 1, LambdaLR after each step\nAdamW lr 0.01, weight_decay 0.01, LambdaLR after each 2 epochs"
    )
    assert rows["model"] == "Odd, 101 parameters, 83 trainable, 6 frozen, 12 in no optimizer"
    assert rows["validation"] == "none: get_val_dataloaders is not defined"
    assert rows["gradients"] == gradients


class ManyOptimizers(Classifier):
    def get_optimizers_schedulers(self, *_: Any) -> Any:
        return [torch.optim.SGD([parameter], lr=0.1) for parameter in self.parameters()], None


def test_the_plan_has_at_most_three_lines_of_optimizers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = plan_of(ManyOptimizers(numbers(16)), tmp_path, capsys)
    assert rows["optimizer"] == "SGD lr 0.1\nSGD lr 0.1\nand 2 more"


def supervised(**changes: Any) -> ts.SupervisedModule:
    data = numbers(16)
    return ts.SupervisedModule(nn.Linear(6, 3), nn.CrossEntropyLoss(), "sgd", data, **changes)


@pytest.mark.parametrize(
    ("given", "changes", "expected"),
    [
        ({}, {}, "none: there is no val_dataset"),
        ({"val_dataset": numbers(12)}, {}, "12 samples, after each epoch"),
        (
            {"val_dataset": {"a": numbers(12), "b": numbers(1500)}},
            {"validate_every": -2},
            "1,512 samples, after each 2 epochs",
        ),
        ({"val_dataset": numbers(12)}, {"validate_every": 2}, "12 samples, after each 2 steps"),
        ({"val_dataset": numbers(12)}, {"validate_every": 0}, "none: validate_every=0"),
        (
            {"val_dataset": numbers(12)},
            {"validate_every": lambda trainer: False},
            "when validate_every(trainer) is true",
        ),
    ],
)
def test_the_plan_has_the_schedule_of_the_validation(
    given: Any, changes: Any, expected: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert plan_of(supervised(**given), tmp_path, capsys, **changes)["validation"] == expected


@pytest.mark.parametrize("backend", stacks_that_run_here())
def test_the_plan_of_every_stack_has_the_rows(backend: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = plan_of(Classifier(numbers(16)), tmp_path, capsys, backend=backend)
    assert rows["backend"] == f"{backend} on cpu"
    assert PLAIN.keys() <= rows.keys()
    if "dp" in backend.split("-"):
        assert (rows["data"], rows["gradients"]) == (
            "each step draws its samples at random",
            "limited by the layer dp",
        )
    else:
        assert rows["model"] == "Classifier, 83 parameters, all trainable"


def test_one_sample_per_update_is_logged_for_long_epochs(tmp_path: Path, caplog: Logs) -> None:
    for count, told in ((1001, True), (1000, False)):
        caplog.clear()
        train(Classifier(numbers(count)), tmp_path, train_batch_size=1, max_steps=1)
        assert ("train_batch_size=1: each update uses one sample, which makes 1001 global steps" in caplog.text) is told


# --- gradients that are mostly clipped


def regression(scale: float, samples: int = 160) -> ts.SupervisedModule:
    inputs = torch.randn(samples, 3)
    data = TensorDataset(inputs, scale * inputs.sum(1, keepdim=True) + scale)
    return ts.SupervisedModule(nn.Linear(3, 1), nn.MSELoss(), "sgd", data, optimizer_kwargs={"lr": 0.01})


def test_gradients_that_are_mostly_clipped_are_logged_once(tmp_path: Path, caplog: Logs) -> None:
    train(regression(100.0), tmp_path, epochs=3, log_every=15)
    (told,) = [record.message for record in caplog.records if "clipped" in record.message]
    assert told.startswith("the gradients are clipped to norm 1, and their median norm is ")
    assert "15 of the first 15 global steps kept less than a hundredth" in told


@pytest.mark.parametrize(
    ("scale", "changes"),
    [
        (1.0, {"log_every": 15}),
        (100.0, {"log_every": 15, "clip_grads": False}),
        (100.0, {"log_every": 15, "clip_grad_value": 1.0}),
        (100.0, {"log_every": 1, "max_steps": 9}),  # too few steps to judge
    ],
)
def test_other_gradients_are_not_logged_as_clipped(scale: float, changes: Any, tmp_path: Path, caplog: Logs) -> None:
    train(regression(scale), tmp_path, epochs=2, **changes)
    assert "clipped to norm" not in caplog.text


@pytest.mark.parametrize("changes", [{"log_every": 1}, {"log_every": 1000}, {"log_every": 4, "backend": "sp-amp"}])
def test_clipped_gradients_are_logged_with_any_log_interval(changes: Any, tmp_path: Path, caplog: Logs) -> None:
    train(regression(100.0), tmp_path, epochs=2, **changes)
    assert "clipped to norm 1, and" in caplog.text


def test_a_resumed_run_does_not_log_clipping_again(tmp_path: Path, caplog: Logs) -> None:
    saves = {"checkpointer_args": ts.DefaultCheckpointerArguments(checkpoint=True)}
    train(regression(100.0), tmp_path, epochs=1, **saves)
    assert "clipped to norm" in caplog.text
    caplog.clear()
    train(regression(100.0), tmp_path, epochs=2, resume=True, **saves)
    assert "clipped to norm" not in caplog.text


# --- the rate of a log point


class Changes(ts.Callback):
    """Records the rate of each step, and may halve the rate after it."""

    def __init__(self, by_hand: bool) -> None:
        self.used, self.by_hand = list[float](), by_hand

    def on_before_optimizer_step(self, trainer: Any, optimizers: Any) -> None:
        self.used.append(optimizers[0].param_groups[0]["lr"])

    def on_train_step_end(self, trainer: Any) -> None:
        if self.by_hand:
            trainer.optimizers[0].param_groups[0]["lr"] *= 0.5


@pytest.mark.parametrize("log_every", [1, 2, 5])
@pytest.mark.parametrize("by_hand", [False, True])
def test_the_recorded_rate_is_that_of_the_step(log_every: int, by_hand: bool, tmp_path: Path) -> None:
    used = Changes(by_hand)
    module = Classifier(numbers(40), scheduler=not by_hand)
    monitor = ts.callbacks.LRMonitor()
    trainer = ts.Trainer(module, arguments(tmp_path, log_every=log_every, max_steps=7), callbacks=[used, monitor])
    trainer.train()
    history = trainer.history
    assert history.get_metric_values("schedule/lr/0") == used.used
    steps = sorted({*range(log_every, 8, log_every), 7})
    assert [(r.step, r.value) for r in history.records("lr")] == [(step, used.used[step - 1]) for step in steps]


class Tokens(Classifier):
    def batch_weight(self, batch: Any) -> float:
        return 3.0 * len(batch[0])


def test_a_private_run_logs_how_its_samples_are_drawn(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: Logs
) -> None:
    promise = ts.DifferentialPrivacyArguments(delta=1e-3, noise_multiplier=1.0)
    train(
        Tokens(numbers(29)), tmp_path, writers=["stdout"], backend="sp-dp", differential_privacy_args=promise, epochs=2
    )
    table = " ".join(capsys.readouterr().out.split())
    assert "batch 8 on average, a new random sample each step" in table
    assert "in the last" not in table
    (said,) = [record.message for record in caplog.records if "batch_weight is not used" in record.message]
    assert "each sample counts once" in said
