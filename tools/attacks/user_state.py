"""User code in which records influence later steps: buffers, attributes, datasets, monitors of training values."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, default_collate

import trainstack as ts
from tools.attacks.runs import CLASSES, Kind, UserModule

_FROM = 3
"""The first step that writes buffers, counted from 1: after all checks at the start of a run."""


class _Centred(UserModule):
    """Subtracts a centre from its inputs; `learn` moves the centre."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.register_buffer("centre", torch.zeros(6))
        self.calls = 0

    def learn(self, inputs: Tensor) -> None:
        raise NotImplementedError

    def loss(self, batch: Any) -> Tensor:
        return nn.functional.cross_entropy(self.net(batch[0] - self.centre), batch[1])

    def train_step(self, global_step: int, batch: Any, device: Any) -> Any:
        loss = self.loss(batch)
        if global_step >= _FROM - 1:
            self.learn(batch[0].detach())
        return loss


class _BufferInPlace(_Centred):
    def learn(self, inputs: Tensor) -> None:
        self.centre.lerp_(inputs.mean(0), 0.5)


class _BufferByData(_Centred):
    def learn(self, inputs: Tensor) -> None:
        self.centre.data.mul_(0.5).add_(0.5 * inputs.mean(0))


class _BufferByNumpy(_Centred):
    def learn(self, inputs: Tensor) -> None:
        self.centre.numpy()[:] = 0.5 * self.centre.numpy() + 0.5 * inputs.numpy().mean(0)


class _PlainAttribute(_Centred):
    mean: Any = 0.0

    def loss(self, batch: Any) -> Tensor:
        return nn.functional.cross_entropy(self.net(batch[0] - self.mean), batch[1])

    def learn(self, inputs: Tensor) -> None:
        self.mean = 0.5 * self.mean + 0.5 * inputs.mean(0)


class _ListInAttribute(_Centred):
    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.queue: list[Tensor] = []

    def loss(self, batch: Any) -> Tensor:
        past = torch.stack(self.queue).mean(0) if self.queue else self.centre
        return nn.functional.cross_entropy(self.net(batch[0] - past), batch[1])

    def learn(self, inputs: Tensor) -> None:
        self.queue.append(inputs.mean(0))


class _BufferInStepHook(_Centred):
    def train_step(self, global_step: int, batch: Any, device: Any) -> Any:
        return self.loss(batch), batch[0]

    def on_end_train_step(self, global_step: int, *outputs: Any) -> None:
        if global_step >= _FROM and len(outputs) > 1:
            self.centre.mul_(0.5).add_(0.5 * outputs[1].mean(0))


class _BufferInEpochHook(_Centred):
    def train_step(self, global_step: int, batch: Any, device: Any) -> Any:
        return self.loss(batch), batch[0]

    def on_end_train_epoch(self, global_step: int, *outputs: Any) -> None:
        if len(outputs) > 1:
            self.centre.mul_(0.5).add_(0.5 * outputs[1].mean(0))


class _AttributeInBackwardHook(_Centred):
    """The module keeps the loss without noise of `on_end_backward`."""

    last: Any = 0.0

    def loss(self, batch: Any) -> Tensor:
        return nn.functional.cross_entropy(self.net(batch[0] - self.last), batch[1])

    def train_step(self, global_step: int, batch: Any, device: Any) -> Any:
        return self.loss(batch)

    def on_end_backward(self, global_step: int, loss_tensor: Tensor) -> None:
        self.last = float(loss_tensor.detach())


class _WritesBuffer(ts.Callback):
    def on_train_batch_begin(self, trainer: Any, batch: Any) -> None:
        if trainer.global_steps_finished >= _FROM - 1:
            trainer.module.centre.mul_(0.5).add_(0.5 * batch[0].mean(0))


class _BufferStandsStill(_Centred):
    def learn(self, inputs: Tensor) -> None: ...


class _WritesParameter(ts.Callback):
    def on_train_batch_begin(self, trainer: Any, batch: Any) -> None:
        if trainer.global_steps_finished >= _FROM - 1:
            with torch.no_grad():
                trainer.module.net[0].bias.add_(batch[0].mean())


class _WritesParameterByData(ts.Callback):
    def on_train_batch_begin(self, trainer: Any, batch: Any) -> None:
        if trainer.global_steps_finished >= _FROM - 1:
            trainer.module.net[0].bias.data += batch[0].mean()


class _Wrapped(Dataset[Any]):
    def __init__(self, base: Any) -> None:
        self.base = base

    def __len__(self) -> int:
        return len(self.base)


class _Learning(_Wrapped):
    """Normalizes by a running mean over the fetched records."""

    mean: Any = 0.0

    def __getitem__(self, index: int) -> Any:
        inputs, label, tokens = self.base[index]
        self.mean = 0.9 * self.mean + 0.1 * inputs
        return inputs - self.mean, label, tokens


class _LearningDataset(UserModule):
    def make_dataset(self) -> Any:
        return _Learning(super().make_dataset())


class _Mixing(_Wrapped):
    """Mixes each record with its neighbour, as mixup and mosaic datasets do."""

    def __getitem__(self, index: int) -> Any:
        inputs, label, tokens = self.base[index]
        other = self.base[(index + 1) % len(self.base)][0]
        return 0.7 * inputs + 0.3 * other, label, tokens


class _MixingDataset(UserModule):
    def make_dataset(self) -> Any:
        return _Mixing(super().make_dataset())


class _Normalizing(_Wrapped):
    """Subtracts public constants."""

    def __getitem__(self, index: int) -> Any:
        inputs, label, tokens = self.base[index]
        return (inputs - 0.1) / 2.0, label, tokens


class _NormalizingDataset(UserModule):
    def make_dataset(self) -> Any:
        return _Normalizing(super().make_dataset())


def _centring_collate(samples: Any) -> Any:
    inputs, *rest = default_collate(samples)
    return [inputs - inputs.mean(0), *rest]


class _CentringCollate(UserModule):
    collate = staticmethod(_centring_collate)


class _RareIsHuge(UserModule):
    """The loss of the rare class is huge, as for a wrong unit or a broken sensor."""

    def train_step(self, global_step: int, batch: Any, device: Any) -> Any:
        losses = nn.functional.cross_entropy(self.net(batch[0]), batch[1], reduction="none")
        return (losses * (1 + 1e6 * (batch[1] == CLASSES - 1))).mean()


class _PlateauOnTrainLoss(_RareIsHuge):
    def make_scheduler(self, optimizer: torch.optim.Optimizer) -> list[Any]:
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(
            optimizer, factor=0.1, patience=0, threshold=0.5, threshold_mode="abs"
        )
        return [ts.SchedulerConfig(plateau, monitor="train/loss_epoch")]


class _RateFromTheLoss(_RareIsHuge):
    """Sets the learning rate by hand from the loss of `train_step`."""

    seen: Any = None

    def train_step(self, global_step: int, batch: Any, device: Any) -> Any:
        loss = super().train_step(global_step, batch, device)
        self.seen = loss.detach()
        return loss

    def on_end_train_step(self, global_step: int, *outputs: Any) -> None:
        if self.optimizer is not None and float(self.seen.mean()) > 100:
            for group in self.optimizer.param_groups:
                group["lr"] *= 0.1


class _RateFromHookOutputs(_RareIsHuge):
    """Sets the learning rate by hand from the outputs that the hook gets."""

    def on_end_train_step(self, global_step: int, *outputs: Any) -> None:
        if self.optimizer is not None and outputs and float(torch.as_tensor(outputs[0]).mean()) > 100:
            for group in self.optimizer.param_groups:
                group["lr"] *= 0.1


def _early_stopping() -> list[Any]:
    return [ts.callbacks.EarlyStopping("train/loss_epoch", patience=1, min_delta=0.5)]


class _PlateauOnNoisyLoss(_RareIsHuge):
    def make_scheduler(self, optimizer: torch.optim.Optimizer) -> list[Any]:
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.1, patience=0)
        return [ts.SchedulerConfig(plateau, monitor="train/loss_epoch")]


def _best_checkpoint() -> list[Any]:
    return [ts.callbacks.BestCheckpoint("train/loss_epoch")]


_NOISY_LOSS = {"telemetry": {"loss": (0.0, 10.0)}}

KINDS = (
    Kind(name="buffer in place", module=_BufferInPlace),
    Kind(name="buffer by .data", module=_BufferByData, short=True),
    Kind(name="buffer by .numpy()", module=_BufferByNumpy, short=True),
    Kind(name="plain attribute", module=_PlainAttribute, short=True),
    Kind(name="list in an attribute", module=_ListInAttribute),
    Kind(name="buffer in on_end_train_step", module=_BufferInStepHook, short=True),
    Kind(name="buffer in on_end_train_epoch", module=_BufferInEpochHook),
    Kind(name="attribute in on_end_backward", module=_AttributeInBackwardHook),
    Kind(name="buffer by a callback", module=_BufferStandsStill, callbacks=lambda: [_WritesBuffer()], short=True),
    Kind(name="parameter by a callback", module=_BufferStandsStill, callbacks=lambda: [_WritesParameter()]),
    Kind(name="parameter by .data", module=_BufferStandsStill, callbacks=lambda: [_WritesParameterByData()]),
    Kind(name="dataset that learns", module=_LearningDataset),
    Kind(name="dataset that mixes records", module=_MixingDataset, short=True),
    Kind(name="normalizing dataset", module=_NormalizingDataset, short=True, must_train=True),
    Kind(name="collate that centres", module=_CentringCollate),
    Kind(name="plateau on the training loss", module=_PlateauOnTrainLoss, short=True),
    Kind(name="early stopping on it", module=_RareIsHuge, callbacks=_early_stopping, short=True),
    Kind(
        name="plateau on the noisy loss", module=_PlateauOnNoisyLoss, privacy=_NOISY_LOSS, must_train=True, short=True
    ),
    Kind(
        name="early stopping on the noisy loss",
        module=_RareIsHuge,
        callbacks=_early_stopping,
        privacy=_NOISY_LOSS,
        must_train=True,
    ),
    Kind(
        name="best checkpoint by the noisy loss",
        module=_RareIsHuge,
        callbacks=_best_checkpoint,
        privacy=_NOISY_LOSS,
        must_train=True,
    ),
    Kind(name="rate from the loss", module=_RateFromTheLoss, short=True),
    Kind(name="rate from the outputs in a hook", module=_RateFromHookOutputs),
)
