"""User code that draws random numbers: layers, `train_step`, datasets, collate functions, seeds in hooks."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, default_collate

from tools.attacks.runs import CLASSES, FEATURES, Kind, UserModule


class _Dropout(UserModule):
    def make_net(self) -> nn.Module:
        return nn.Sequential(nn.Dropout(0.5), nn.Linear(FEATURES, 8), nn.Tanh(), nn.Dropout(0.5), nn.Linear(8, CLASSES))


class _Branch(nn.Module):
    """A residual branch that is skipped for half of the records, as in torchvision's `stochastic_depth`."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(FEATURES, FEATURES)

    def forward(self, inputs: Tensor) -> Tensor:
        keep = (torch.rand(inputs.shape[0], 1) < 0.5).to(inputs)
        return inputs + keep * torch.tanh(self.inner(inputs))


class _StochasticDepth(UserModule):
    def make_net(self) -> nn.Module:
        return nn.Sequential(_Branch(), nn.Linear(FEATURES, CLASSES))


class _NoiseInTrainStep(UserModule):
    def train_step(self, global_step: int, batch: Any, device: Any) -> Any:
        noisy = batch[0] + torch.randn_like(batch[0])
        return nn.functional.cross_entropy(self.net(noisy), batch[1])


class _SeededTrainStep(_NoiseInTrainStep):
    def train_step(self, global_step: int, batch: Any, device: Any) -> Any:
        torch.manual_seed(global_step)
        return super().train_step(global_step, batch, device)


class _SeededHook(_Dropout):
    def on_begin_train_epoch(self, global_step: int, epoch: int) -> None:
        torch.manual_seed(epoch)


class _NoiseFromOwnGenerator(UserModule):
    """A generator with a fixed seed, as an attribute of the module."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.generator = torch.Generator().manual_seed(7)

    def train_step(self, global_step: int, batch: Any, device: Any) -> Any:
        noise = torch.randn(batch[0].shape, generator=self.generator)
        return nn.functional.cross_entropy(self.net(batch[0] + noise), batch[1])


class _MixupInTrainStep(UserModule):
    """Mixes each record of the batch with another one."""

    def train_step(self, global_step: int, batch: Any, device: Any) -> Any:
        order = torch.randperm(len(batch[0]))
        mixed = 0.7 * batch[0] + 0.3 * batch[0][order]
        outputs = self.net(mixed)
        first = nn.functional.cross_entropy(outputs, batch[1])
        return 0.7 * first + 0.3 * nn.functional.cross_entropy(outputs, batch[1][order])


class _Augmented(Dataset[Any]):
    def __init__(self, base: Any, draw: Any) -> None:
        self.base, self.draw = base, draw

    def __len__(self) -> int:
        return len(self.base)

    def __getitem__(self, index: int) -> Any:
        inputs, label, tokens = self.base[index]
        return inputs + self.draw(), label, tokens


class _AugmentationByTorch(UserModule):
    def make_dataset(self) -> Any:
        return _Augmented(super().make_dataset(), lambda: torch.randn(FEATURES))


class _AugmentationByNumpy(UserModule):
    def make_dataset(self) -> Any:
        return _Augmented(super().make_dataset(), lambda: torch.from_numpy(np.random.standard_normal(FEATURES)).float())


class _AugmentationByOwnGenerator(UserModule):
    """A generator with a fixed seed, as an attribute of the dataset."""

    def make_dataset(self) -> Any:
        generator = np.random.default_rng(3)
        return _Augmented(super().make_dataset(), lambda: torch.from_numpy(generator.standard_normal(FEATURES)).float())


def _noisy_collate(samples: Any) -> Any:
    inputs, *rest = default_collate(samples)
    return [inputs + torch.randn_like(inputs), *rest]


class _RandomCollate(UserModule):
    collate = staticmethod(_noisy_collate)


def _mixing_collate(samples: Any) -> Any:
    inputs, *rest = default_collate(samples)
    return [0.7 * inputs + 0.3 * inputs[torch.randperm(len(inputs))], *rest]


class _MixupInCollate(UserModule):
    collate = staticmethod(_mixing_collate)


class _SeededByIndex(Dataset[Any]):
    """The augmentation of a sample depends only on its index: it is the same in all epochs, and public."""

    def __init__(self, base: Any) -> None:
        self.base = base

    def __len__(self) -> int:
        return len(self.base)

    def __getitem__(self, index: int) -> Any:
        inputs, label, tokens = self.base[index]
        np.random.seed(index)
        torch.manual_seed(index)
        drawn = torch.from_numpy(np.random.default_rng(index).standard_normal(FEATURES) + np.random.random())
        return inputs + drawn.float() + torch.randn(FEATURES), label, tokens


class _AugmentationSeededByIndex(UserModule):
    def make_dataset(self) -> Any:
        return _SeededByIndex(super().make_dataset())


class _AugmentationInWorkers(_AugmentationByTorch):
    def get_train_dataloader(self, sampler: Any, batch_size: int) -> Any:
        data = self.make_dataset()
        return DataLoader(data, batch_size, sampler=sampler(data), num_workers=1, multiprocessing_context="fork")


KINDS = (
    Kind(name="dropout", module=_Dropout, must_train=True, short=True),
    Kind(name="stochastic depth", module=_StochasticDepth, must_train=True, short=True),
    Kind(name="noise in train_step", module=_NoiseInTrainStep, must_train=True, short=True),
    Kind(name="manual_seed in train_step", module=_SeededTrainStep),
    Kind(name="manual_seed in a hook", module=_SeededHook),
    Kind(name="generator of the module", module=_NoiseFromOwnGenerator),
    Kind(name="mixup in train_step", module=_MixupInTrainStep, short=True),
    Kind(name="augmentation, torch", module=_AugmentationByTorch, must_train=True, short=True),
    Kind(name="augmentation, numpy", module=_AugmentationByNumpy, must_train=True),
    Kind(name="augmentation, own generator", module=_AugmentationByOwnGenerator),
    Kind(name="augmentation in workers", module=_AugmentationInWorkers, must_train=True),
    Kind(name="augmentation seeded by index", module=_AugmentationSeededByIndex, must_train=True),
    Kind(name="random collate", module=_RandomCollate, short=True),
    Kind(name="mixup in collate", module=_MixupInCollate),
)
