"""Schedulers of each kind step once after each global step that moved the weights."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler as lrs

import trainstack as ts
from tests.helpers.modules import Classifier, numbers, train, weights


class HalfLife:
    """A callable object with state, as `LambdaLR` stores it."""

    def __init__(self) -> None:
        self.life = 5.0

    def __call__(self, step: int) -> float:
        return 0.5 ** (step / self.life)


KINDS: dict[str, Callable[[Any], Any]] = {
    "lambda": lambda o: lrs.LambdaLR(o, lambda step: 1 / (1 + step)),
    "callable object": lambda o: lrs.LambdaLR(o, HalfLife()),
    "one cycle": lambda o: lrs.OneCycleLR(o, 0.5, total_steps=13),
    "warm restarts": lambda o: lrs.CosineAnnealingWarmRestarts(o, 3, 2),
    "multi step": lambda o: lrs.MultiStepLR(o, [2, 5, 5]),
    "sequential": lambda o: lrs.SequentialLR(o, [lrs.LinearLR(o, 0.1, 1.0, 3), lrs.ExponentialLR(o, 0.9)], [3]),
    "chained": lambda o: lrs.ChainedScheduler([lrs.ConstantLR(o, 0.5, 4), lrs.ExponentialLR(o, 0.9)]),
    "cyclic": lambda o: lrs.CyclicLR(o, 0.01, 0.1, step_size_up=4, cycle_momentum=False),
}


class Scheduled(Classifier):
    def __init__(self, kind: str, stop_at: int | None = None) -> None:
        super().__init__(numbers(41))
        self.kind, self.stop_at, self.rates = kind, stop_at, list[float]()

    def get_optimizers_schedulers(self, *_: Any) -> Any:
        self.made = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
        return [self.made], [KINDS[self.kind](self.made)]

    def train_step(self, global_step: int, batch: Any, device: Any) -> Any:
        if global_step == self.stop_at:
            raise KeyboardInterrupt
        self.rates.append(self.made.param_groups[0]["lr"])
        return super().train_step(global_step, batch, device)


@pytest.mark.spec("PA-11", "F211", "F407")
@pytest.mark.parametrize("kind", KINDS)
def test_a_scheduler_steps_once_an_update_over_resumes(kind: str, tmp_path: Path) -> None:
    by_hand = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1, momentum=0.9)
    scheduler, expected = KINDS[kind](by_hand), []
    for _ in range(12):
        expected.append(by_hand.param_groups[0]["lr"])
        by_hand.step()
        scheduler.step()

    unbroken = Scheduled(kind)
    train(unbroken, tmp_path / "unbroken", epochs=2)
    saving: dict[str, Any] = {"checkpointer_args": ts.DefaultCheckpointerArguments(every_n_steps=1), "epochs": 2}
    with pytest.raises(KeyboardInterrupt):
        train(Scheduled(kind, stop_at=8), tmp_path / "cut", **saving)
    resumed = Scheduled(kind)
    train(resumed, tmp_path / "cut", resume=True, **saving)

    assert unbroken.rates == pytest.approx(expected, abs=1e-15)
    assert resumed.rates == unbroken.rates[7:]
    assert torch.equal(weights(resumed), weights(unbroken))


@pytest.mark.spec("PA-11")
def test_a_scheduler_steps_once_for_accumulated_micro_batches(tmp_path: Path) -> None:
    module = Scheduled("lambda")
    train(module, tmp_path, gpu_batch_size_limit=2)

    assert len(module.rates) == 21
    assert len(set(module.rates)) == 6
