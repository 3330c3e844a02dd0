"""Functions of ranks on CUDA devices, one each."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

import trainstack as ts
from tests.helpers.modules import FEATURES, Classifier, arguments, numbers, weights
from tests.helpers.workers import RANK
from trainstack import callbacks

WIDE = 1 << 22


class Predicts(Classifier):
    """Its validation returns large predictions and no loss, so nothing but the metric reads the device."""

    def __init__(self) -> None:
        super().__init__(numbers(24), validate=True)

    def val_step(self, global_step: int, batch: Any, device: Any) -> Any:
        return batch[0].double().sum(1, keepdim=True).expand(-1, WIDE).float()

    def metric_inputs(self, outputs: Any, batch: Any) -> Any:
        return (outputs,)


class Total:
    """The sum of all inputs."""

    def update(self, values: Tensor) -> None:
        self.total += float(values.double().cpu().sum())

    def compute(self) -> float:
        return self.total

    def reset(self) -> None:
        self.total = 0.0


def metric_without_loss(backend: str = "ddp", device: str = "cuda") -> float:
    """The value of a metric over predictions."""
    args = arguments("unused", backend=backend, device=device, val_batch_size=4)
    trainer = ts.Trainer(Predicts(), args, metrics={"total": Total()})
    found = trainer.validate().metrics["val/total"]
    trainer.close()
    return float(found)


class Large(Classifier):
    """256 MiB of weights."""

    def __init__(self, mib: int = 256) -> None:
        super().__init__(numbers(8))
        self.large = nn.Linear(1 << 10, mib << 8, bias=False)

    def train_step(self, global_step: int, batch: Any, device: Any) -> Any:
        ones = torch.ones(len(batch[0]), 1 << 10, device=device)
        return super().train_step(global_step, batch, device) + self.large(ones).mean()


def peak_memory(views: bool) -> int:
    """The most bytes on the device in a training under `ddp`."""
    torch.cuda.reset_peak_memory_stats()
    options = {"ddp": {"gradient_as_bucket_view": views}}
    args = arguments("unused", backend="ddp", device="cuda", backend_options=options, clip_grads=False)
    trainer = ts.Trainer(Large(), args)
    trainer.train()
    trainer.close()
    return torch.cuda.max_memory_allocated()


def trained(device: str = "cuda", synchronized: bool = False) -> list[float]:
    """The weights after a training under `ddp`, with batch norm over all ranks where that is asked for."""
    module = Classifier(numbers(24))
    if synchronized:
        module.net.insert(1, nn.BatchNorm1d(8))
    used = [callbacks.SyncBatchNorm()] if synchronized else []
    trainer = ts.Trainer(module, arguments("unused", backend="ddp", device=device, epochs=2), callbacks=used)
    trainer.train()
    trainer.close()
    return [float(value) for value in weights(module).cpu()]


class FailsOnOne(Classifier):
    def __init__(self) -> None:
        super().__init__(numbers(80))
        self.kept: dict[int, Tensor] = {}

    def train_step(self, global_step: int, batch: Any, device: Any) -> Any:
        if global_step == 4 and RANK == 1:
            raise ValueError("on purpose")
        return super().train_step(global_step, batch, device)

    def on_end_train_step(self, global_step: int) -> None:
        self.kept[global_step] = weights(self).cpu()


def failure(device: str = "cuda") -> dict[str, Any]:
    """One rank fails in a step; whether the weights of this rank are still those before that step."""
    trainer = ts.Trainer(module := FailsOnOne(), arguments("unused", backend="ddp", device=device))
    try:
        trainer.train()
    except (ts.PeerError, ValueError) as error:
        return {"error": type(error).__name__, "same": torch.equal(weights(module).cpu(), module.kept[3])}
    return {"error": "none", "same": False}


def own_device(index: int) -> dict[str, Any]:
    """`sp` on one of two devices: the device of a step that names no index, and the memory taken of device 0."""
    seen: list[int] = []

    class Looks(Classifier):
        def train_step(self, global_step: int, batch: Any, device: Any) -> Any:
            seen.append(torch.empty(1, device="cuda").device.index)
            return super().train_step(global_step, batch, device)

    options = {"sp": {"environ": {}}}
    args = arguments("unused", backend="sp", device=f"cuda:{index}", backend_options=options)
    trainer = ts.Trainer(Looks(numbers(16)), args)
    trainer.train()
    trainer.close()
    return {
        "seen": seen,
        "reserved": torch.cuda.memory_reserved(0),
        "context": torch._C._cuda_hasPrimaryContext(0),  # type: ignore[attr-defined]
        "current": torch.cuda.current_device(),
        "features": FEATURES,
    }
