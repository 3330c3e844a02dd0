"""Features of the library under `fsdp` and `sp`, for `run_world`; each returns numbers that must not depend on it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torchmetrics
from torch import nn

import trainstack as ts
from tests.helpers.modules import arguments, weights
from tests.helpers.workers.sharded import DATA, model

SAVES = ts.DefaultCheckpointerArguments(every_n_steps=2)


def module(**given: Any) -> ts.SupervisedModule:
    return ts.SupervisedModule(model(), nn.MSELoss(), "adamw", DATA, val_dataset=DATA, **given)


def options(backend: str, **given: Any) -> dict[str, Any]:
    return {"backend": backend, "epochs": 2, "train_batch_size": 6, "gpu_batch_size_limit": 2, "log_every": 1, **given}


def finds_rate(backend: str, directory: str) -> Any:
    """`find_lr` between two trainings, which it leaves as they would have been."""
    made = module()
    trainer = ts.Trainer(made, arguments(directory, **options(backend)))
    found = ts.find_lr(trainer, start=1e-3, end=1.0, steps=5)
    trainer.train()
    return [list(found.rates), list(found.losses), weights(made).tolist()]


def predicts(backend: str, directory: str) -> Any:
    """Predictions of an uneven number of samples, before training and after it."""
    made = module()
    trainer = ts.Trainer(made, arguments(directory, **options(backend)))
    found = [trainer.predict(torch.utils.data.DataLoader(DATA, batch_size=2))]
    trainer.train()
    found.append(trainer.predict(torch.utils.data.DataLoader(DATA, batch_size=2)))
    return [[row.tolist() for row in one] for one in found]


def measures(backend: str, directory: str) -> Any:
    """Metrics with states, and the best checkpoint by one of them."""
    made = module()
    args = arguments(
        directory, **options(backend, checkpointer_args=SAVES, monitor="val/error", val_batch_size=2, epochs=3)
    )
    trainer = ts.Trainer(made, args, metrics={"error": torchmetrics.MeanAbsoluteError()})
    trainer.train()
    return trainer.history.get_metric_values("val/error")


def starts_warm(backend: str, directory: str) -> Any:
    """From the weights of a checkpoint and of an export that a run under `sp` or `fsdp` has written."""
    first = ts.Trainer(module(), arguments(directory, **options(backend, checkpointer_args=SAVES)))
    first.train()
    first.export(Path(directory).with_suffix(".export"))
    found = []
    last = str(Path(directory) / "checkpoints")
    starts: list[dict[str, Any]] = [
        {"resume": last, "resume_mode": "weights"},
        {"resume": last, "resume_mode": "weights_and_optimizer"},
        {"init_weights_from": str(Path(directory).with_suffix(".export"))},
    ]
    for number, given in enumerate(starts):
        made = module()
        ts.Trainer(made, arguments(f"{directory}-{number}", **options(backend), **given)).train()
        found.append(weights(made).tolist())
    return found


def averages(backend: str, directory: str) -> Any:
    """EMA in evaluations and at the end, a part that is frozen for an epoch, and clipping by value."""
    made = module()
    callbacks = [ts.callbacks.EMA(0.8), ts.callbacks.Freezer("model.0", until_epoch=1)]
    args = arguments(directory, **options(backend, epochs=3, clip_grad_value=0.01))
    trainer = ts.Trainer(made, args, callbacks=callbacks)
    trainer.train()
    return [weights(made).tolist(), trainer.history.get_metric_values("val/loss")]


def writes(backend: str, directory: str) -> Any:
    """The rows of the csv writer."""
    trainer = ts.Trainer(module(), arguments(directory, **{**options(backend), "writers": ["csv"]}))
    trainer.train()
    trainer.close()
    return [len(path.read_text().splitlines()) for path in sorted(Path(directory).rglob("*.csv"))]


def takes_best(backend: str, directory: str) -> Any:
    """The best weights, which a callback exports and loads at the end, and which another trainer loads and trains."""
    best = ts.callbacks.BestCheckpoint("val/loss", mode="max")
    first = ts.Trainer(module(), arguments(directory, **options(backend)), callbacks=[best])
    first.train()
    second = ts.Trainer(module(), arguments(f"{directory}-2", **options(backend, epochs=1)))
    second.load_export(best.path_of(first))
    found = [weights(first.module).tolist(), weights(second.module).tolist()]
    second.train()
    return [*found, weights(second.module).tolist()]


EQUAL = (finds_rate, predicts, measures, starts_warm, averages, takes_best, writes)


def run(names: list[str], backend: str, directory: str) -> dict[str, Any]:
    """The results of some of these, or the errors that they end with."""
    found = {}
    for name in names:
        try:
            found[name] = globals()[name](backend, f"{directory}/{name}")
        except Exception as error:
            found[name] = f"{type(error).__name__}: {error}"
    return found


class _Yields(ts.SupervisedModule):
    """Two updates a step."""

    def train_step(self, global_step: int, batch: Any, device: Any) -> Iterator[Any]:
        for _ in range(2):
            yield super().train_step(global_step, batch, device), self.trainer_optimizer


def yields(backend: str, directory: str) -> None:
    made = _Yields(model(), nn.MSELoss(), "adamw", DATA)
    ts.Trainer(made, arguments(directory, **options(backend))).train()


def fits(backend: str, directory: str) -> None:
    ts.Trainer(module(), arguments(directory, **options(backend, fit_micro_batch=True))).train()


def synchronises_norms(backend: str, directory: str) -> None:
    ts.Trainer(module(), arguments(directory, **options(backend)), callbacks=[ts.callbacks.SyncBatchNorm()]).train()


def minimises(backend: str, directory: str) -> None:
    """An optimizer that evaluates a closure."""
    made = ts.SupervisedModule(model(), nn.MSELoss(), lambda p: torch.optim.LBFGS(p), DATA)
    ts.Trainer(made, arguments(directory, **options(backend))).train()


def replicates(backend: str, directory: str) -> None:
    chosen = {"fsdp": {"replicate": 3}}
    ts.Trainer(module(), arguments(directory, **options(backend, backend_options=chosen))).train()


def offloads(backend: str, directory: str) -> None:
    chosen = {"fsdp": {"cpu_offload": True}}
    ts.Trainer(module(), arguments(directory, **options(backend, backend_options=chosen))).train()


def gathers_low(backend: str, directory: str) -> None:
    chosen = {"fsdp": {"low_precision_gather": True}}
    ts.Trainer(module(), arguments(directory, **options(backend, backend_options=chosen))).train()


OPTIMIZERS: dict[str, dict[str, Any]] = {
    **{name: {} for name in ("Adagrad", "Adadelta", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "ASGD")},
    "SGD": {"momentum": 0.9, "nesterov": True},
    "Adafactor": {},
    "Muon": {},
    "Rprop": {},
}


def optimizes(backend: str, directory: str, names: list[str]) -> Any:
    """The weights after a training with each of torch's optimizers, or its error."""
    found: dict[str, Any] = {}
    for name in names:
        made = ts.SupervisedModule(model(), nn.MSELoss(), "sgd", DATA)
        if name == "Muon":  # for matrices alone
            made.model[0].bias.requires_grad_(False), made.model[2].bias.requires_grad_(False)
            made.model[4].bias.requires_grad_(False)
        kwargs = {"lr": 0.05, **OPTIMIZERS[name]}
        kind = getattr(torch.optim, name)
        made.optimizer = lambda parameters, kind=kind, kwargs=kwargs: kind(
            [p for p in parameters if p.requires_grad], **kwargs
        )
        try:
            ts.Trainer(made, arguments(directory, **options(backend, epochs=1))).train()
            found[name] = weights(made).tolist()
        except Exception as error:
            found[name] = f"{type(error).__name__}: {error}"
    return found
