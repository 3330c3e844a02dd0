"""The printed plan: what decides a run is on the screen; and a run whose gradients are clipped away says so."""

from __future__ import annotations

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
    train(module, path, writers=["stdout"], report=False, **changes)
    table = capsys.readouterr().out.partition("epoch=1/")[0]
    assert len(table.splitlines()) <= 14
    return {line[:21].strip(): line[23:] for line in table.splitlines() if line[:21].strip()}


def test_the_plan_names_what_decides_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = plan_of(Classifier(numbers(16), validate=True), tmp_path, capsys)
    assert rows == {
        "backend": "sp on cpu",
        "stack": "sp: runs the module in this process, on one device",
        "global batch": "8 = 1 process x 1 micro-batch x 8",
        "samples an epoch": "16 (last step: 8)",
        "global steps an epoch": "2",
        "global steps in all": "2 in 1 epoch",
        "order": "shuffled with seed 0",
        "gradients": "clipped to norm 1.0 (clip_grads=False for none)",
        "optimizer": "SGD lr 0.1",
        "parameters": "83 train",
    }


class Odd(Classifier):
    """In data set order, with a frozen layer, one in no optimizer, a warm-up, and no data to validate on."""

    get_val_dataloaders = ts.ModuleInterface.get_val_dataloaders

    def __init__(self) -> None:
        super().__init__(numbers(16))
        self.frozen, self.alone = nn.Linear(2, 2).requires_grad_(False), nn.Linear(3, 3)

    def get_train_dataloader(self, sampler: Any, batch_size: int) -> Any:
        return DataLoader(self.dataset, batch_size)

    def get_optimizers_schedulers(self, *_: Any) -> Any:
        groups: list[Any] = [{"params": [self.net[0].weight], "lr": 1e-4}, {"params": [self.net[0].bias]}]
        optimizers = [torch.optim.SGD(groups, lr=1.0), torch.optim.AdamW(self.net[3].parameters(), lr=0.01)]
        return optimizers, [torch.optim.lr_scheduler.LambdaLR(one, lambda step: step / 8) for one in optimizers]


@pytest.mark.parametrize(
    ("changes", "gradients"),
    [
        ({"clip_grads": False}, "not clipped"),
        ({"clip_grad_value": 0.5}, "each value clipped to [-0.5, 0.5] (clip_grads=False for none)"),
        ({"max_grad_norm": 5.0}, "clipped to norm 5.0 (clip_grads=False for none)"),
    ],
)
def test_the_plan_names_what_is_unusual(
    changes: Any, gradients: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = plan_of(Odd(), tmp_path, capsys, **changes)
    assert rows["order"] == "in data set order (sampler=sampler(dataset) to shuffle)"
    assert rows["optimizer"] == "SGD lr 0.0001 to 1"
    assert rows["parameters"] == "83 train, 6 are frozen, 12 are in no optimizer"
    assert rows["validation"] == "none: get_val_dataloaders is not defined"
    assert rows["gradients"] == gradients


@pytest.mark.parametrize("backend", stacks_that_run_here())
def test_the_plan_of_every_stack_has_the_rows(backend: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = plan_of(Classifier(numbers(16)), tmp_path, capsys, backend=backend)
    assert {"order", "gradients", "optimizer", "parameters"} <= rows.keys()
    if "dp" in backend.split("-"):
        assert (rows["order"], rows["gradients"]) == (
            "each step draws its samples at random",
            "limited by the layer dp",
        )
    else:
        assert rows["parameters"] == "83 train"


def test_one_sample_an_update_is_worth_a_word_in_a_long_epoch(tmp_path: Path, caplog: Logs) -> None:
    for count, told in ((1001, True), (1000, False)):
        caplog.clear()
        train(Classifier(numbers(count)), tmp_path, train_batch_size=1, max_steps=1)
        assert ("train_batch_size=1: each update uses one sample, which makes 1001 global steps" in caplog.text) is told


# --- gradients that are clipped away (N-7)


def regression(scale: float, samples: int = 160) -> ts.SupervisedModule:
    inputs = torch.randn(samples, 3)
    data = TensorDataset(inputs, scale * inputs.sum(1, keepdim=True) + scale)
    return ts.SupervisedModule(nn.Linear(3, 1), nn.MSELoss(), "sgd", data, optimizer_kwargs={"lr": 0.01})


def test_a_run_whose_gradients_are_clipped_away_says_so_once(tmp_path: Path, caplog: Logs) -> None:
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
        (100.0, {"log_every": 1, "max_steps": 9}),  # too few to tell
    ],
)
def test_other_runs_do_not(scale: float, changes: Any, tmp_path: Path, caplog: Logs) -> None:
    train(regression(scale), tmp_path, epochs=2, **changes)
    assert "clipped to norm" not in caplog.text


@pytest.mark.parametrize("changes", [{"log_every": 1}, {"log_every": 1000}, {"log_every": 4, "backend": "sp-amp"}])
def test_a_short_or_a_long_log_window_tells_as_well(changes: Any, tmp_path: Path, caplog: Logs) -> None:
    train(regression(100.0), tmp_path, epochs=2, **changes)
    assert "clipped to norm 1, and" in caplog.text


def test_a_resumed_run_does_not_say_it_again(tmp_path: Path, caplog: Logs) -> None:
    saves = {"checkpointer_args": ts.DefaultCheckpointerArguments(checkpoint=True)}
    train(regression(100.0), tmp_path, epochs=1, **saves)
    assert "clipped to norm" in caplog.text
    caplog.clear()
    train(regression(100.0), tmp_path, epochs=2, resume=True, **saves)
    assert "clipped to norm" not in caplog.text


# --- the rate of a log point (L-M6)


class Changes(ts.Callback):
    """Halves the rate after each step, as a hook may, and notes the rate of each step."""

    def __init__(self, by_hand: bool) -> None:
        self.used, self.by_hand = list[float](), by_hand

    def on_before_optimizer_step(self, trainer: Any, optimizers: Any) -> None:
        self.used.append(optimizers[0].param_groups[0]["lr"])

    def on_train_step_end(self, trainer: Any) -> None:
        if self.by_hand:
            trainer.optimizers[0].param_groups[0]["lr"] *= 0.5


@pytest.mark.parametrize("log_every", [1, 2, 5])
@pytest.mark.parametrize("by_hand", [False, True])
def test_the_recorded_rate_is_the_one_that_the_step_used(log_every: int, by_hand: bool, tmp_path: Path) -> None:
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


def test_a_private_run_says_how_samples_are_drawn_and_that_each_counts_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: Logs
) -> None:
    promise = ts.DifferentialPrivacyArguments(delta=1e-3, noise_multiplier=1.0)
    train(
        Tokens(numbers(29)), tmp_path, writers=["stdout"], backend="sp-dp", differential_privacy_args=promise, epochs=2
    )
    table = " ".join(capsys.readouterr().out.split())
    assert "global batch 8 on average, a new random sample each step" in table
    assert "last step" not in table
    said = [record.message for record in caplog.records if "batch_weight is not used" in record.message]
    assert said == [one for one in said[:1] if "each sample counts once" in one] != []
