"""Validation and metrics over several processes."""

from __future__ import annotations

import contextlib
import inspect
import logging
from collections.abc import Iterator
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler

import trainstack as ts
from tests.helpers.modules import Classifier, arguments, numbers
from tests.helpers.workers import RANK
from tests.helpers.workers.training import Uneven


def measured(directory: str, backend: str = "ddp") -> dict[str, Any]:
    """Metrics over 101 samples that do not add up to the same bits in another order or in other batches."""
    import torchmetrics
    from torchmetrics.classification import MulticlassAccuracy, MulticlassAUROC

    class Rounds:
        """Adds numbers one after the other, and collects texts."""

        def update(self, preds: torch.Tensor, text: list[str]) -> None:
            for value in preds[:, 0].float():
                self.total = self.total + value
            self.texts += text

        def compute(self) -> Any:
            return {"sum": self.total, "texts": float(sum(i * float(text) for i, text in enumerate(self.texts)))}

        def reset(self) -> None:
            self.total, self.texts = torch.tensor(1e3), []

    class Still(Uneven):
        def metric_inputs(self, outputs: Any, batch: Any) -> Any:
            preds = outputs["outputs"].float()
            return {"preds": preds, "target": batch[1], "value": preds.max(1).values, "text": outputs["text"]}

    metrics = {
        "all": torchmetrics.MetricCollection({"accuracy": MulticlassAccuracy(3), "auroc": MulticlassAUROC(3)}),
        "rounds": Rounds(),
        "mean": torchmetrics.MeanMetric(),
    }
    values: dict[str, Any] = {"train_batch_size": 12, "val_batch_size": 7, "epochs": 2}
    trainer = ts.Trainer(Still(lr=0.0), arguments(directory, backend=backend, **values), metrics=metrics)
    trainer.train()
    history = [[r.name, r.value, r.step] for name in sorted(trainer.history.get_metric_names())
               if name.startswith("val/") and name != "val/loss" for r in trainer.history.records(name)]  # fmt: skip
    return {"history": history, "alone": {k: v for k, v in trainer.validate().metrics.items() if k != "val/loss"}}


def statistics(directory: str, shared: bool) -> dict[str, Any]:
    """The running means that samples were evaluated with, in a run and in one whose first validation is interrupted."""

    class Normed(Classifier):
        def __init__(self, breaks: bool = False) -> None:
            super().__init__(numbers(16), validate=True)
            self.norm, self.breaks = torch.nn.BatchNorm1d(6), breaks
            self.used: list[list[float]] = []

        def train_step(self, global_step: int, batch: Any, device: Any) -> Any:
            return torch.nn.functional.cross_entropy(self.net(self.norm(batch[0])), batch[1])

        def val_step(self, global_step: int, batch: Any, device: Any) -> Any:
            if self.breaks:
                raise KeyboardInterrupt
            return {"means": self.norm.running_mean.expand(len(batch[0]), -1).clone()}

        def on_end_val_epoch(self, global_step: int, outputs: Any, key: str = "default") -> None:
            self.used = outputs["means"].tolist()

        predict_step = val_step

    switch = "forward_sync_buffers"  # older versions of torch have broadcast_buffers instead
    if switch not in inspect.signature(DistributedDataParallel).parameters:
        switch = "broadcast_buffers"
    options = {} if shared else {switch: False}

    def run(name: str, breaks: bool = False, **changes: Any) -> tuple[ts.Trainer, Normed]:
        saving = ts.DefaultCheckpointerArguments(every_n_steps=1)
        made: dict[str, Any] = {"backend": "ddp", "val_batch_size": 2, "backend_options": {"ddp": options}}
        args = arguments(f"{directory}/{name}", checkpointer_args=saving, **made, **changes)
        trainer = ts.Trainer(module := Normed(breaks), args)
        with contextlib.suppress(KeyboardInterrupt):
            trainer.train()
        return trainer, module

    trainer, module = run("whole")
    run("cut", breaks=True)
    newest = ts.list_checkpoints(f"{directory}/whole/checkpoints")[-1].path
    return {
        "used": module.used,
        "resumed": run("cut", resume=True)[1].used,
        "predicted": trainer.predict(DataLoader(module.dataset, 2))["means"].tolist(),
        "saved": ts.read_model(newest)["norm.running_mean"].tolist(),
    }


def own_sampler() -> list[str]:
    """The messages on loaders that divide the data themselves, in training and in evaluation."""
    data = numbers(8)

    class Groups(BatchSampler):
        num_replicas = 2

    def loader(kind: str, size: int) -> Any:
        if kind == "sampler":
            return DataLoader(data, size, sampler=DistributedSampler(data))
        if kind == "batches":
            return DataLoader(data, batch_sampler=BatchSampler(DistributedSampler(data), size, drop_last=False))
        return DataLoader(data, batch_sampler=Groups(range(RANK, 8, 2), size, drop_last=False))

    class Shares(Classifier):
        def get_train_dataloader(self, sampler: Any, batch_size: int) -> Any:
            return loader(kind, batch_size) if how == "train" else super().get_train_dataloader(sampler, batch_size)

        def get_val_dataloaders(self, sampler: Any, batch_size: int) -> Any:
            return loader(kind, batch_size)

        predict_step = Classifier.val_step

    refused = []
    for kind in ("sampler", "batches", "groups"):
        for how in ("train", "validate", "predict"):
            trainer = ts.Trainer(Shares(data), arguments("unused", backend="ddp"))
            try:
                trainer.predict(loader(kind, 4)) if how == "predict" else getattr(trainer, how)()
            except ts.ModuleContractError as error:
                refused.append(str(error))
    return refused


def own_order(count: int) -> list[str]:
    """The messages on a validation loader that gives a sample twice."""

    class Padded(Classifier):
        def get_val_dataloaders(self, sampler: Any, batch_size: int) -> Any:
            return DataLoader(numbers(count), batch_size, sampler=[*range(count), 0])

    trainer = ts.Trainer(Padded(numbers(8)), arguments("unused", backend="ddp"))
    with capture("trainstack") as said:
        trainer.validate()
        trainer.validate()
    return said


@contextlib.contextmanager
def capture(logger: str) -> Iterator[list[str]]:
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger(logger).addHandler(handler)
    try:
        yield said
    finally:
        logging.getLogger(logger).removeHandler(handler)


def logged_means(backend: str) -> dict[str, list[float]]:
    """The values that `val_step` logs of 101 samples in batches of 7, and of two where one process gets none."""

    class Logs(Classifier):
        def get_val_dataloaders(self, sampler: Any, batch_size: int) -> Any:
            parts = {"many": self.dataset, "few": torch.utils.data.Subset(self.dataset, [0, 1])}
            return {key: DataLoader(part, batch_size, sampler=sampler(part)) for key, part in parts.items()}

        def val_step(self, global_step: int, batch: Any, device: Any) -> Any:
            self.log("val/mean", batch[0].mean())
            if len(batch[0]) < batch_size:
                self.log("val/short", float(batch[0][0, 0]))
            return batch[0].mean(), None

    batch_size = 7
    module = Logs(numbers(101, dtype=torch.float64), dtype=torch.float64, lr=0.0)
    args = arguments("unused", backend=backend, val_batch_size=batch_size, train_batch_size=12, epochs=2)
    trainer = ts.Trainer(module, args)
    trainer.train()
    return {name: trainer.history.get_metric_values(name) for name in ("val/mean", "val/short", "val/many/loss")}
