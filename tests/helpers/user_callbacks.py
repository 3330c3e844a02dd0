"""Callbacks as a user writes them, with public names only; each behaves like a ready-made one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader

import trainstack as ts
from tests.helpers.modules import Classifier, arguments, numbers, weights
from trainstack import callbacks as cb
from trainstack.trainer import AbstractTrainer


def note(trainer: AbstractTrainer, name: str, value: float | torch.Tensor) -> None:
    trainer.history.update_metric(name, value, step=trainer.state.global_step, epoch=trainer.state.epoch)


class Rates(ts.Callback):
    """As `LRMonitor`."""

    def on_before_optimizer_step(self, trainer: AbstractTrainer) -> None:
        self.used = [group["lr"] for group in trainer.optimizers[0].param_groups]

    def on_train_step_end(self, trainer: AbstractTrainer) -> None:
        for number, rate in enumerate(self.used):
            note(trainer, f"schedule/lr/{number}", rate)


class Norms(ts.Callback):
    """As `GradNormMonitor`."""

    def __init__(self) -> None:
        self.norms: dict[str, torch.Tensor] = {}
        self.computed = 0

    def on_before_optimizer_step(self, trainer: AbstractTrainer) -> None:
        if trainer.state.global_step + 1 == trainer.next_log_step:
            self.computed += 1
            gradients = [p.grad for p in trainer.module.parameters() if p.grad is not None]
            self.norms = {"net": torch.nn.utils.get_total_norm(gradients)}

    def on_log(self, trainer: AbstractTrainer) -> None:
        for name, norm in self.norms.items():
            note(trainer, f"grad_norm/{name}", norm)


class FrozenStart(ts.Callback):
    """As `Freezer("net.0", until_epoch=1)`."""

    def on_train_epoch_begin(self, trainer: AbstractTrainer, epoch: int) -> None:
        parameters = trainer.module.get_submodule("net.0").parameters()
        if epoch < 1:
            trainer.freeze(parameters)
        else:
            trainer.unfreeze(parameters)


class MoreData(ts.Callback):
    """As `ExtraValidation`."""

    def __init__(self, loaders: dict[str, Any]) -> None:
        self.loaders = loaders

    def on_epoch_end(self, trainer: AbstractTrainer) -> None:
        trainer.validate(self.loaders, log=True, keep_outputs=False)


class Short(ts.Callback):
    """As `LimitBatches(train=4, val=2)`."""

    def on_init(self, trainer: AbstractTrainer) -> None:
        trainer.limit_steps_per_epoch(train=4, val=2)


class Best(ts.Callback):
    """As `BestCheckpoint`."""

    best = float("inf")

    def on_validation_end(self, trainer: AbstractTrainer, results: dict[str, float]) -> None:
        if trainer.is_training and results.get("val/loss", self.best) < self.best:
            self.best = results["val/loss"]
            with trainer.evaluation_context():
                trainer.export(Path(trainer.args.output_dir) / "best", overwrite=True)

    def on_train_end(self, trainer: AbstractTrainer, status: str) -> None:
        if status == "finished":
            trainer.keep_trained_weights()
            trainer.load_export(Path(trainer.args.output_dir) / "best")


PAIRS = {
    "rates": (cb.LRMonitor, Rates),
    "norms": (cb.GradNormMonitor, Norms),
    "freezer": (lambda: cb.Freezer("net.0", until_epoch=1), FrozenStart),
    "validation": (lambda: cb.ExtraValidation(more_data()), lambda: MoreData(more_data())),
    "limits": (lambda: cb.LimitBatches(train=4, val=2), Short),
    "best": (cb.BestCheckpoint, Best),
}
"""By name: how to make the ready-made callback, and how to make the user's."""


def more_data() -> dict[str, Any]:
    return {"shifted": DataLoader(numbers(10, seed=2), batch_size=5)}


def behaviour_of(callback: Any, directory: str, backend: str = "sp") -> dict[str, Any]:
    """Weights and history of a run with `callback`; the last step of an epoch has one sample."""
    module = Classifier(numbers(49), validate=True, optimizer=torch.optim.AdamW, lr=0.02, scheduler=True)
    args = arguments(directory, backend=backend, epochs=3, log_every=2, gpu_batch_size_limit=4)
    trainer = ts.Trainer(module, args, callbacks=[callback, cb.EMA(0.5, use_at_end=False)])
    trained = list[float]()
    trainer.on(ts.Event.TRAIN_END, priority=1)(lambda trainer: trained.extend(weights(module).tolist()))
    trainer.train()
    history = trainer.history
    values = {name: history.get_metric_values(name) for name in sorted(history.get_metric_names())}
    return {"trained": trained, "at_end": weights(module).tolist(), "history": values}


def user_callbacks(directory: str) -> dict[str, Any]:
    """In each process of a world: the effects of each ready-made callback, and of the user's."""
    found: dict[str, Any] = {}
    for name, made in PAIRS.items():
        found[name] = [behaviour_of(make(), f"{directory}/{name}{n}", "ddp") for n, make in enumerate(made)]
    return found


def calls_over_processes(directory: str) -> dict[str, Any]:
    """Request calls at steps, which validate and save, on several ranks."""
    called: list[int] = []

    def look(trainer: ts.Trainer) -> None:
        called.append(trainer.state.global_step)
        trainer.validate(more_data(), log=True)
        trainer.save_checkpoint(path=f"{directory}/asked")

    trainer = ts.Trainer(Classifier(numbers(49)), arguments(directory, backend="ddp", log_every=100))
    trainer.call_at_step(3, look)
    trainer.call_at_step(5, look)
    trainer.train()
    return {"called": called, "measured": trainer.history.get_metric_values("val/shifted/loss")}
