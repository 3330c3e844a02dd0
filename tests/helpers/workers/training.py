"""Runs whose results must not depend on the number of processes."""

from __future__ import annotations

from typing import Any

import torch

import trainstack as ts
from tests.helpers.modules import Classifier, arguments, numbers, weights
from tests.helpers.workers import RANK


class Uneven(Classifier):
    """101 samples in float64, with everything recorded that must not depend on the number of processes."""

    def __init__(self, count: int = 101, stop_at: int | None = None, **changes: Any) -> None:
        super().__init__(numbers(count, dtype=torch.float64), dtype=torch.float64, validate=True, **changes)
        self.seen: list[list[float]] = []
        self.outputs: Any = None
        self.stop_at = stop_at

    def train_step(self, global_step: int, batch: Any, device: Any) -> Any:
        if global_step == self.stop_at:
            raise KeyboardInterrupt
        while len(self.seen) < global_step:
            self.seen.append([])
        if self.micro_batch.samples != ():  # else the micro-batch is borrowed
            self.seen[global_step - 1] += batch[0][:, 0].tolist()
        return super().train_step(global_step, batch, device)

    def val_step(self, global_step: int, batch: Any, device: Any) -> Any:
        outputs = self.net(batch[0])
        loss = torch.nn.functional.cross_entropy(outputs, batch[1])
        return {"loss": loss, "outputs": outputs, "text": [f"{x:.6f}" for x in batch[0][:, 0].tolist()]}

    def on_end_val_epoch(self, global_step: int, outputs: Any, key: str = "default") -> None:
        self.outputs = {
            "outputs": outputs["outputs"].tolist(),
            "text": [text for part in outputs["text"] for text in (part if isinstance(part, list) else [part])],
        }


def equality(directory: str, backend: str = "ddp", limit: int = 512, **changes: Any) -> dict[str, Any]:
    module = Uneven(**changes.pop("module", {}))
    saving = ts.DefaultCheckpointerArguments(checkpoint=False)
    if "every_n_steps" in changes:
        saving = ts.DefaultCheckpointerArguments(every_n_steps=changes.pop("every_n_steps"))
    values = {"train_batch_size": 12, "epochs": 2, "log_every": 4, "val_batch_size": 7, **changes}
    trainer = ts.Trainer(
        module, arguments(directory, backend=backend, gpu_batch_size_limit=limit, checkpointer_args=saving, **values)
    )
    stopped = False
    try:
        trainer.train()
    except KeyboardInterrupt:
        stopped = True
    history = {} if stopped else {name: trainer.history.get_metric_values(name) for name in ("train/loss", "val/loss")}
    return {
        "weights": weights(module).tolist(),
        "seen": module.seen,
        "outputs": module.outputs,
        "history": history,
        "steps": trainer.global_steps_finished,
    }


def few(count: int) -> dict[str, Any]:
    """So few samples that some processes have none."""

    class Mean(Classifier):
        def __init__(self) -> None:
            values = torch.arange(count, dtype=torch.float64)
            super().__init__(torch.utils.data.TensorDataset(values), dtype=torch.float64, validate=True)
            self.collected: list[float] = []

        def train_step(self, global_step: int, batch: Any, device: Any) -> Any:
            return (sum(p.sum() for p in self.parameters()) * 0 + batch[0]).mean()

        def val_step(self, global_step: int, batch: Any, device: Any) -> Any:
            return batch[0].mean(), batch[0]

        def on_end_val_epoch(self, global_step: int, *outputs: Any, key: str = "default") -> None:
            self.collected = outputs[1].tolist() if outputs else []

    module = Mean()
    trainer = ts.Trainer(module, arguments("unused", backend="ddp", train_batch_size=12, val_batch_size=3))
    trainer.train()
    return {
        "loss": trainer.history.get_latest_metric("train/loss_epoch"),
        "metric": trainer.history.get_latest_metric("val/loss"),
        "collected": module.collected,
    }


def tokens() -> list[float]:
    """A loss over tokens; the processes' batches hold very different numbers of them, one none at all."""
    from tests.trainer.run.test_loss_weighting import Tokens

    module = Tokens()
    ts.Trainer(module, arguments("unused", backend="ddp", train_batch_size=6, clip_grads=False)).train()
    return weights(module).tolist()


def picky(backend: str = "ddp", limit: int = 512, **options: Any) -> Any:
    """Trains on a few of the samples, of which a process may have none; a part of the module is never used."""

    class Picky(Classifier):
        def __init__(self) -> None:
            super().__init__(numbers(24, dtype=torch.float64), dtype=torch.float64)
            self.unused = torch.nn.Linear(2, 2).double()

        def get_optimizers_schedulers(self, *given: Any) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1, weight_decay=0.5), None

        def train_step(self, global_step: int, batch: Any, device: Any) -> Any:
            chosen = batch[0][:, 0] > 0
            return torch.nn.functional.cross_entropy(self.net(batch[0][chosen]), batch[1][chosen])  # nan for none

        def batch_weight(self, batch: Any) -> float:
            return float((batch[0][:, 0] > 0).sum())

    torch.manual_seed(0)
    made: dict[str, Any] = {"backend_options": {"ddp": options} if options else {}, "clip_grads": False}
    module = Picky()
    trainer = ts.Trainer(
        module, arguments("unused", backend=backend, train_batch_size=4, **made, epochs=2, gpu_batch_size_limit=limit)
    )
    try:
        trainer.train()
    except ts.TrainstackError as error:
        return str(error)
    return weights(module).tolist()


def ways_to_reduce() -> list[list[float]]:
    """The weights after runs with several options of `DistributedDataParallel`, without and with accumulation."""
    view, static = {"gradient_as_bucket_view": True}, {"static_graph": True}
    found = []
    for options, limit in (({}, 512), (static, 512), (view, 512), ({}, 2), (view, 2)):
        module, made = Uneven(), {"backend_options": {"ddp": options}, "gpu_batch_size_limit": limit}
        ts.Trainer(module, arguments("unused", backend="ddp", train_batch_size=12, **made)).train()
        found.append(weights(module).tolist())
    return found


def driven(shares: list[list[int]], accumulation: int = 1) -> dict[str, Any]:
    """`train_dl` with a loader of each process's own over its share of 12 samples: batches of so many."""
    data = numbers(12, dtype=torch.float64)
    module, stack = Classifier(data, dtype=torch.float64), ts.build_trainer_backend("ddp")
    optimizers = [torch.optim.SGD(module.parameters(), lr=0.1)]
    changes: dict[str, Any] = {"device": "cpu", "clip_grads": False, "gradient_accumulation": accumulation}
    stack.init(ts.TrainerBackendArguments(model=module, optimizers=optimizers, **changes))
    begin = sum(sum(share) for share in shares[:RANK])
    mine = [tensor[begin : begin + sum(shares[RANK])].split(shares[RANK]) for tensor in data.tensors]
    outputs = stack.train_dl(list(zip(*mine, strict=True)), ts.CallbackInterface())
    stack.close()
    return {
        "weights": weights(module).tolist(),
        "steps": stack.get_global_steps_completed(),
        "losses": len(outputs[0]) if outputs else 0,
    }


def in_sequence(directory: str) -> list[list[float]]:
    """The weights of five runs in one process, of which all but the last two leave the group."""
    found = []
    for number in range(5):
        module = Classifier(numbers(16))
        trainer = ts.Trainer(module, arguments(directory, backend="ddp"))
        trainer.train()
        found.append(weights(module).tolist())
        if number < 3:
            trainer.close()
    return found


def plateau(directory: str) -> dict[str, Any]:
    """A plateau schedule over a metric that each process has measured differently."""

    class Watched(Uneven):
        def get_optimizers_schedulers(self, *_: Any) -> Any:
            made = torch.optim.SGD(self.parameters(), lr=0.1)
            schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(made, factor=0.5, patience=0, threshold=0.0)
            return made, ts.SchedulerConfig(schedule, monitor="score")

        def on_end_val_epoch(self, global_step: int, outputs: Any, key: str = "default") -> None:
            self.log("score", global_step * (1.0 - RANK))

    args = arguments(directory, backend="ddp", per_device_train_batch_size=6, train_batch_size=1, epochs=3)
    trainer = ts.Trainer(Watched(), args)
    trainer.train()
    state = trainer.get_state()
    return {
        "rate": state["optimizers"][0]["groups"][0]["lr"],
        "best": state["schedulers"][0]["state"]["best"],
        "batch": [trainer.plan.global_batch, trainer.pergpu_global_batch_size, trainer.train_step_batch_size],
    }


def bucket_views() -> list[bool]:
    """Whether gradients are views of buckets: by default, with an own `zero_grad` of an optimizer, and as asked for."""

    class Zeroes(torch.optim.SGD):
        def zero_grad(self, set_to_none: bool = True) -> None:
            super().zero_grad(set_to_none)

    asked: dict[str, Any] = {"backend_options": {"ddp": {"gradient_as_bucket_view": False}}}
    found = []
    for optimizer, options in ((torch.optim.SGD, {}), (Zeroes, {}), (torch.optim.SGD, asked)):
        trainer = ts.Trainer(Classifier(optimizer=optimizer), arguments("unused", backend="ddp", **options))
        trainer.train()
        found.append(bool(trainer._ready().loop.work.model._wrapper[0].gradient_as_bucket_view))
    return found
