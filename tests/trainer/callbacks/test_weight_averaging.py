"""`EMA(None)`: the mean of weights, compared with `torch.optim.swa_utils`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, update_bn
from torch.utils.data import DataLoader

import trainstack as ts
from tests.helpers.modules import Classifier, arguments, numbers
from tests.helpers.processes import run_world
from tests.helpers.workers.averages import START, Normalized, averaged, loader
from trainstack import callbacks as cb


def plain(epochs: int) -> tuple[dict[str, Any], list[float]]:
    """The state of an averaged model and the learning rates, from the loop in the documentation of torch."""
    module = Normalized()
    ts.Trainer(module, arguments("unused", epochs=epochs, train_batch_size=4)).train()
    rows, rates = iter(module.order), list[float]()  # the order of the run

    module = Normalized()
    optimizer, schedule = module.get_optimizers_schedulers()
    averages = AveragedModel(module.net)
    for epoch in range(epochs):
        for _ in range(len(module.dataset) // 4):
            inputs, labels = module.dataset[[next(rows) for _ in range(4)]]
            rates.append(optimizer.param_groups[0]["lr"])
            optimizer.zero_grad()
            nn.functional.cross_entropy(module.net(inputs), labels).backward()
            nn.utils.clip_grad_norm_(module.parameters(), 1.0)
            optimizer.step()
        schedule.scheduler.step()
        if epoch >= START:
            averages.update_parameters(module.net)
    update_bn(loader(), averages)
    return averages.module.state_dict(), rates


def test_the_mean_of_epochs_equals_swa_utils(tmp_path: Path) -> None:
    found = averaged(str(tmp_path), epochs=4)
    expected, rates = plain(4)
    assert found["rates"] == rates
    assert found["updates"] == 4 - START
    assert found["state"] == {name: value.tolist() for name, value in expected.items()}
    read = ts.read_model(next((tmp_path / "checkpoints").glob("*-model-*")))
    assert all(torch.equal(read[f"net.{name}"], value) for name, value in expected.items())


def test_an_interrupted_run_ends_with_the_same_mean(tmp_path: Path) -> None:
    whole = averaged(str(tmp_path / "whole"), epochs=4)
    for step in (6, 7, 12):
        with pytest.raises(RuntimeError, match="lost"):
            averaged(str(tmp_path / "cut"), epochs=4, stop_at=step)
    assert averaged(str(tmp_path / "cut"), epochs=4)["state"] == whole["state"]


def test_training_continues_from_the_trained_weights_and_statistics(tmp_path: Path) -> None:
    whole = averaged(str(tmp_path / "one"), epochs=4)
    averaged(str(tmp_path / "two"), epochs=3)
    assert averaged(str(tmp_path / "two"), epochs=4)["state"] == whole["state"]
    assert averaged(str(tmp_path / "three"), epochs=3, more=4)["state"] == whole["state"]


def test_a_mean_of_steps_begins_late(tmp_path: Path) -> None:
    module, means = (
        Classifier(numbers(24, dtype=torch.float64), dtype=torch.float64, lr=3.0),
        AveragedModel(nn.Linear(1, 1)),
    )
    ema = cb.EMA(None, start_step=2, every=3)
    trainer = ts.Trainer(module, arguments(tmp_path, train_batch_size=2, epochs=3), callbacks=[ema])

    @trainer.on(ts.Event.TRAIN_BEGIN)
    def begin(_: Any) -> None:
        nonlocal means
        means = AveragedModel(module.net)

    @trainer.on(ts.Event.TRAIN_STEP_END)
    def end(_: Any) -> None:
        if trainer.state.global_step % 3 == 0:
            means.update_parameters(module.net)

    trainer.train()
    assert ema.updates == 12
    assert all(torch.equal(a, b) for a, b in zip(module.net.parameters(), means.module.parameters(), strict=True))


@pytest.mark.distributed
def test_all_ranks_end_with_the_same_mean_and_statistics() -> None:
    ranks = run_world(2, averaged, directory="unused", epochs=4, backend="ddp")
    assert ranks[0]["state"] == ranks[1]["state"]
    assert ranks[0]["updates"] == 4 - START


def test_weights_that_cannot_be_averaged_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ts.ConfigurationError, match=r"EMA\(every='step'\): .* number, 1 or more, or 'epoch'"):
        cb.EMA(every="step")  # type: ignore[arg-type]
    with pytest.raises(ts.ConfigurationError, match=r"EMA\(start_epoch=-1\): write a whole number, 0 or more\."):
        cb.EMA(start_epoch=-1)
    with pytest.raises(ts.ConfigurationError, match=r"use_at_end=False.*and use_at_end=True"):
        cb.EMA(update_bn=list, use_at_end=False)
    with pytest.raises(ts.ConfigurationError, match="write a function without arguments"):
        cb.EMA(update_bn=DataLoader(numbers(4)))  # type: ignore[arg-type]
    private = arguments(tmp_path, backend="sp-dp", train_batch_size=8)
    with pytest.raises(ts.ConfigurationError, match="reads records of a private run"):
        ts.Trainer(Classifier(numbers(24)), private, callbacks=[cb.EMA(update_bn=list)]).train()
