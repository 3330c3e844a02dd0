"""Modules with one mistake each, for `trainstack doctor FILE.py`; the docstring of each class names the checks."""

from __future__ import annotations

import functools
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset, Subset, TensorDataset, default_collate

import trainstack as ts

INPUTS, LABELS = torch.randn(120, 4, generator=torch.Generator().manual_seed(0)), torch.arange(120) * 7 % 3
TRAIN, VAL = TensorDataset(INPUTS[:80], LABELS[:80]), TensorDataset(INPUTS[80:], LABELS[80:])


class Good(ts.ModuleInterface):
    """No mistake."""

    data: Any = TRAIN
    options: ClassVar[dict[str, Any]] = {}
    outputs = 3

    def __init__(self) -> None:
        super().__init__()
        self.net: Any = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, self.outputs))

    def get_train_dataloader(self, sampler: Any, batch_size: int) -> Any:
        return DataLoader(self.data, batch_size, sampler=sampler(self.data), **self.options)

    def get_val_dataloaders(self, sampler: Any, batch_size: int) -> Any:
        return DataLoader(VAL, batch_size, sampler=sampler(VAL))

    def get_optimizers_schedulers(self, estimated_global_steps_per_epoch: int, epochs: int) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01), None

    def loss(self, batch: Any) -> Tensor:
        return functional.cross_entropy(self.net(batch[0]), batch[1])

    def train_step(self, global_step: int, batch: Any, device: Any) -> Any:
        return self.loss(batch)

    def val_step(self, global_step: int, batch: Any, device: Any) -> Any:
        scores = self.net(batch[0])
        return functional.cross_entropy(scores, batch[1]), scores.argmax(1)


def dataset(inputs: Any = INPUTS[:80], labels: Any = LABELS[:80]) -> TensorDataset:
    return TensorDataset(inputs, labels)


class NonFinite(Good):
    """D101 D314"""

    data = dataset(inputs=INPUTS[:80].clone().index_fill_(1, torch.tensor([2]), float("nan")))


class Pixels(Good):
    """D102"""

    data = dataset(inputs=(INPUTS[:80] * 60 + 100).round().clamp(0, 255))


class DropsAll(Good):
    """D103"""

    data = Subset(TRAIN, range(3))
    options: ClassVar = {"drop_last": True}


class Sorted(Good):
    """D104"""

    data = dataset(labels=LABELS[:80].sort().values)

    def get_train_dataloader(self, sampler: Any, batch_size: int) -> Any:
        return DataLoader(self.data, batch_size)


class Unshuffled(Good):
    """D105"""

    def get_train_dataloader(self, sampler: Any, batch_size: int) -> Any:
        return DataLoader(TRAIN, batch_size)


class ConstantLabels(Good):
    """D106"""

    data = dataset(labels=torch.ones(80, dtype=torch.int64))


class RareLabel(Good):
    """D105 D107"""

    data = dataset(labels=torch.cat([LABELS[:79], torch.tensor([3])]))

    def get_train_dataloader(self, sampler: Any, batch_size: int) -> Any:
        first = Subset(self.data, [*range(40), 79])
        return DataLoader(first, batch_size, sampler=torch.utils.data.SequentialSampler(first))


class InPlace(Dataset[Any]):
    def __init__(self) -> None:
        self.values = np.ones((80, 4), dtype=np.float32)

    def __len__(self) -> int:
        return 80

    def __getitem__(self, index: int) -> Any:
        inputs = torch.from_numpy(self.values[index])
        inputs *= 0.5
        return inputs, int(LABELS[index])


class ChangesData(Good):
    """D108"""

    data = InPlace()


class Workers(Good):
    """D110 D111"""

    options: ClassVar = {"num_workers": 3, "collate_fn": lambda samples: default_collate(samples)}


class Tokens(Good):
    """D112 D113"""

    row = torch.tensor([5, 6, 0, 0])
    data: ClassVar = [{"input_ids": row, "labels": row, "attention_mask": (row > 0).long()}] * 40

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(10, 8, padding_idx=9), nn.Linear(8, 10)
        del self.net

    def loss(self, batch: Any) -> Tensor:
        scores = self.head(self.embedding(batch["input_ids"]))
        mask = batch["attention_mask"].flatten()
        each = functional.cross_entropy(scores.flatten(0, 1), batch["labels"].flatten(), reduction="none")
        return (each * (mask + 0.1)).mean()

    def get_val_dataloaders(self, sampler: Any, batch_size: int) -> Any:
        return None

    val_step = ts.ModuleInterface.val_step


class Lists(Good):
    """D201 D202"""

    def __init__(self) -> None:
        super().__init__()
        self.layers = [nn.Linear(4, 4)]
        self.spare = nn.Linear(2, 2)

    def get_optimizers_schedulers(self, estimated_global_steps_per_epoch: int, epochs: int) -> Any:
        return torch.optim.SGD(self.net.parameters(), lr=0.01), None


class TwoOptimizers(Good):
    """D202"""

    def get_optimizers_schedulers(self, estimated_global_steps_per_epoch: int, epochs: int) -> Any:
        return [torch.optim.SGD(self.parameters(), lr=0.01) for _ in range(2)], None


class Unused(Good):
    """D203"""

    def __init__(self) -> None:
        super().__init__()
        self.spare = nn.Linear(2, 2)


class Eval(Good):
    """D204"""

    def __init__(self) -> None:
        super().__init__()
        self.net.eval()


class WrongWidth(Good):
    """D205"""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(5, 3)


class SmallVocabulary(Tokens):
    """D112 D206"""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(4, 8)


class LastOfOne(Good):
    """D207"""

    data = Subset(TRAIN, range(73))

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))


class Repeated(Good):
    """D208"""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(*[nn.Linear(4, 4)] * 3, nn.Linear(4, 3))


class Frozen(Good):
    """D209 D301"""

    def __init__(self) -> None:
        super().__init__()
        self.net.requires_grad_(False)


class AlwaysDrops(Good):
    """D210"""

    def val_step(self, global_step: int, batch: Any, device: Any) -> Any:
        return functional.cross_entropy(functional.dropout(self.net(batch[0]), 0.2), batch[1])


class Counts(Good):
    """D211"""

    def __init__(self) -> None:
        super().__init__()
        self.seen = 0

    def train_step(self, global_step: int, batch: Any, device: Any) -> Any:
        self.seen += len(batch[0])
        return self.loss(batch)


class NoLoss(Good):
    """D301"""

    def train_step(self, global_step: int, batch: Any, device: Any) -> Any:
        return self.net(batch[0])


class Softmax(Good):
    """D303"""

    def loss(self, batch: Any) -> Tensor:
        return functional.cross_entropy(self.net(batch[0]).softmax(1), batch[1])


class LogSoftmax(Good):
    """D303"""

    def loss(self, batch: Any) -> Tensor:
        return nn.CrossEntropyLoss()(functional.log_softmax(self.net(batch[0]), 1), batch[1])


class Binary(Good):
    outputs = 1

    def val_step(self, global_step: int, batch: Any, device: Any) -> Any:
        return functional.binary_cross_entropy_with_logits(self.net(batch[0])[:, 0], (batch[1] > 1).float())


class Sigmoid(Binary):
    """D304"""

    def loss(self, batch: Any) -> Tensor:
        return functional.binary_cross_entropy_with_logits(self.net(batch[0]).sigmoid()[:, 0], (batch[1] > 1).float())


class Nll(Good):
    """D305"""

    def loss(self, batch: Any) -> Tensor:
        return functional.nll_loss(self.net(batch[0]), batch[1])


class OneClass(Binary):
    """D306 D311 D407"""

    def loss(self, batch: Any) -> Tensor:
        return functional.cross_entropy(self.net(batch[0]), batch[1] * 0)


class OneHot(Good):
    """D307"""

    def loss(self, batch: Any) -> Tensor:
        return functional.cross_entropy(self.net(batch[0]), functional.one_hot(batch[1], 3).float())


class Broadcast(Binary):
    """D308 D309"""

    def loss(self, batch: Any) -> Tensor:
        return functional.mse_loss(self.net(batch[0]), batch[1].float())


class FloatLabels(Good):
    """D309"""

    data = dataset(labels=LABELS[:80].float())


class TooManyClasses(Good):
    """D310"""

    data = dataset(labels=LABELS[:80] + 3)


class Independent(Good):
    """D311"""

    def loss(self, batch: Any) -> Tensor:
        return sum(parameter.square().sum() for parameter in self.parameters())  # type: ignore[return-value]


class WithoutLabels(Good):
    """D312"""

    def loss(self, batch: Any) -> Tensor:
        return self.net(batch[0]).square().mean()


class Constant(Good):
    """D311 D313 D407"""

    def loss(self, batch: Any) -> Tensor:
        return (self.net(batch[0]) * 0).mean() + 1


class ByHand(Good):
    """D401"""

    def train_step(self, global_step: int, batch: Any, device: Any) -> Any:
        loss = self.loss(batch)
        loss.backward(retain_graph=True)
        return loss


class Schedule(Good):
    """D402"""

    def get_optimizers_schedulers(self, estimated_global_steps_per_epoch: int, epochs: int) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.01)
        return optimizer, torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 1)


class Diverges(Good):
    """D403"""

    def get_optimizers_schedulers(self, estimated_global_steps_per_epoch: int, epochs: int) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1e3), None


class NoRate(Good):
    """D404"""

    def get_optimizers_schedulers(self, estimated_global_steps_per_epoch: int, epochs: int) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.0), None


class LongWarmup(Good):
    """D405"""

    def get_optimizers_schedulers(self, estimated_global_steps_per_epoch: int, epochs: int) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.01)
        return optimizer, torch.optim.lr_scheduler.LinearLR(optimizer, 0.01, 1.0, total_iters=1000)


class Explodes(Good):
    """D406"""

    def loss(self, batch: Any) -> Tensor:
        return super().loss(batch) * 1e6


class DecaysNorms(Good):
    """D408"""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 3))

    def get_optimizers_schedulers(self, estimated_global_steps_per_epoch: int, epochs: int) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-3), None


class NoValLoss(Good):
    """D501"""

    def val_step(self, global_step: int, batch: Any, device: Any) -> Any:
        return self.net(batch[0]), batch[1]


class BooleanMetric(Good):
    """D502"""

    @functools.cached_property
    def metrics(self) -> Any:
        return {"acc": ts.metric_of(lambda scores, labels: 1.0)}

    def val_step(self, global_step: int, batch: Any, device: Any) -> Any:
        scores = self.net(batch[0])
        return functional.cross_entropy(scores, batch[1]), scores.argmax(1) == batch[1]


class SameData(Good):
    """D503"""

    def get_val_dataloaders(self, sampler: Any, batch_size: int) -> Any:
        copy = TensorDataset(*(tensor.clone() for tensor in TRAIN.tensors))
        return DataLoader(copy, batch_size, sampler=sampler(copy))


class OverlappingData(Good):
    """D503"""

    data = Subset(TRAIN, range(60))

    def get_val_dataloaders(self, sampler: Any, batch_size: int) -> Any:
        part = Subset(TRAIN, range(50, 80))
        return DataLoader(part, batch_size, sampler=sampler(part))


class NoValData(Good):
    """D505"""

    def get_val_dataloaders(self, sampler: Any, batch_size: int) -> Any:
        return None


class Raises(Good):
    """D601"""

    def train_step(self, global_step: int, batch: Any, device: Any) -> Any:
        raise KeyError("image")


class FixedDevice(Good):
    """D603 D601"""

    def val_step(self, global_step: int, batch: Any, device: Any) -> Any:
        return functional.cross_entropy(self.net(batch[0].to("cuda")), batch[1])


class MovesBatch(Good):
    """D604"""

    def train_step(self, global_step: int, batch: Any, device: Any) -> Any:
        return functional.cross_entropy(self.net(batch[0].to(device)), batch[1])


class Waits(Good):
    """D605"""

    def train_step(self, global_step: int, batch: Any, device: Any) -> Any:
        loss = self.loss(batch)
        self.log("loss_now", loss.item())
        return loss


class NoGradient(Good):
    """D607 D301"""

    @torch.no_grad()
    def train_step(self, global_step: int, batch: Any, device: Any) -> Any:
        return self.loss(batch)


class Summed(Good):
    """Correct in one piece; a sum where a step is split."""

    def loss(self, batch: Any) -> Tensor:
        return functional.cross_entropy(self.net(batch[0]), batch[1], reduction="sum")


class Logs(Good):
    """Makes the trainer warn of an item that nothing takes."""

    def _unused_items(self, batch: Any, takers: Any) -> str | None:
        return "the batches have 'mask', which nothing takes. Leave it out of the data set."


class KeepsState(Counts):
    """No mistake: the state is kept, a generator too."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = torch.Generator().manual_seed(0)

    def train_step(self, global_step: int, batch: Any, device: Any) -> Any:
        torch.rand(1, generator=self.generator)
        return super().train_step(global_step, batch, device)

    def get_state(self) -> dict[str, Any]:
        return {"weights": super().get_state(), "samples": self.seen}

    def update_state(self, state: Any) -> None:
        if state:
            super().update_state(state["weights"])
            self.seen = state["samples"]


class Draws(Good):
    """No mistake: checkpoints keep the generators of a module."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = torch.Generator().manual_seed(0)

    def train_step(self, global_step: int, batch: Any, device: Any) -> Any:
        return self.loss((batch[0] + torch.rand(1, generator=self.generator), batch[1]))
