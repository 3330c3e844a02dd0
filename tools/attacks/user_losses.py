"""User code with common losses and layers; some of them normalize over the batch or compare records."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import trainstack as ts
from tools.attacks.runs import CLASSES, FEATURES, TOKENS, Kind, UserModule

_WEIGHTS = torch.tensor([1.0, 1.0, 500.0])


class _ClassWeights(UserModule):
    def train_step(self, global_step: int, batch: Any, device: Any) -> Any:
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1], weight=_WEIGHTS)


class _MaskedMean(UserModule):
    """A mean over the records of the rare class, which most records do not have."""

    def train_step(self, global_step: int, batch: Any, device: Any) -> Any:
        losses = nn.functional.cross_entropy(self.net(batch[0]), batch[1], reduction="none")
        weights = 1e-3 + (batch[1] == CLASSES - 1).to(losses)
        return (losses * weights).sum() / weights.sum()


class _TokenMean(UserModule):
    """A mean over tokens with `ignore_index`, as in language models."""

    def make_net(self) -> nn.Module:
        return nn.Sequential(nn.Linear(FEATURES, 8), nn.Tanh(), nn.Linear(8, TOKENS * CLASSES))

    def train_step(self, global_step: int, batch: Any, device: Any) -> Any:
        outputs = self.net(batch[0]).view(-1, TOKENS, CLASSES)
        return nn.functional.cross_entropy(outputs.transpose(1, 2), batch[2], ignore_index=-100)


class _LossesPerRecord(UserModule):
    """One loss per record, as the library recommends."""

    def train_step(self, global_step: int, batch: Any, device: Any) -> Any:
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1], reduction="none")


class _CoupledLosses(UserModule):
    """A vector of losses that is divided by a statistic of the batch."""

    def train_step(self, global_step: int, batch: Any, device: Any) -> Any:
        losses = nn.functional.cross_entropy(self.net(batch[0]), batch[1], reduction="none")
        return losses / losses.mean()


class _CoupledByDetached(UserModule):
    """A vector of losses with correct values, and gradients that depend on the batch."""

    def train_step(self, global_step: int, batch: Any, device: Any) -> Any:
        losses = nn.functional.cross_entropy(self.net(batch[0]), batch[1], reduction="none")
        centre = losses.mean()
        return losses + (centre - centre.detach())


class _Contrastive(UserModule):
    def train_step(self, global_step: int, batch: Any, device: Any) -> Any:
        outputs = nn.functional.normalize(self.net(batch[0]), dim=1)
        return nn.functional.cross_entropy(outputs @ outputs.T, torch.arange(len(outputs)))


class _Tail(nn.Module):
    """Two layers with a normalization layer between them."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(FEATURES, 8), norm, nn.Linear(8, CLASSES)

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.last(torch.tanh(self.norm(self.first(inputs))))
        return outputs


class _BatchNorm(UserModule):
    def make_net(self) -> nn.Module:
        return _Tail(nn.BatchNorm1d(8))


class _FrozenBatchNorm(UserModule):
    """A frozen BatchNorm: in eval mode."""

    def make_net(self) -> nn.Module:
        return _Tail(nn.BatchNorm1d(8))

    def train(self, mode: bool = True) -> Any:
        super().train(mode)
        self.net.norm.eval()
        return self


class _BatchNormLeftInEval(UserModule):
    """A hook sets it to training mode after the second step."""

    def make_net(self) -> nn.Module:
        return _Tail(nn.BatchNorm1d(8).eval())

    def train(self, mode: bool = True) -> Any:
        super().train(mode)
        self.net.norm.eval()
        return self

    def on_end_train_step(self, global_step: int, *outputs: Any) -> None:
        if global_step >= 2:
            self.net.norm.train()


class _GradientCheckpointing(UserModule):
    def train_step(self, global_step: int, batch: Any, device: Any) -> Any:
        outputs = checkpoint(self.net, batch[0], use_reentrant=False)
        return nn.functional.cross_entropy(outputs, batch[1])


class _CheckpointedDropout(UserModule):
    def make_net(self) -> nn.Module:
        return nn.Sequential(nn.Linear(FEATURES, 8), nn.Dropout(0.5), nn.Linear(8, CLASSES))

    def train_step(self, global_step: int, batch: Any, device: Any) -> Any:
        outputs = checkpoint(self.net, batch[0], use_reentrant=False)
        return nn.functional.cross_entropy(outputs, batch[1])


class _LoRALayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(FEATURES, CLASSES).requires_grad_(False)
        self.down, self.up = nn.Linear(FEATURES, 2, bias=False), nn.Linear(2, CLASSES, bias=False)

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.base(inputs) + self.up(self.down(inputs))
        return outputs


class _LoRA(UserModule):
    def make_net(self) -> nn.Module:
        return _LoRALayer()


class _WeightNorm(UserModule):
    def make_net(self) -> nn.Module:
        return nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(FEATURES, 8)), nn.Linear(8, CLASSES))


class _SpectralNorm(UserModule):
    """Its power iteration writes a buffer in each forward pass."""

    def make_net(self) -> nn.Module:
        return nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Linear(FEATURES, 8)), nn.Linear(8, CLASSES))


class _Compiled(UserModule):
    def make_net(self) -> nn.Module:
        inner = torch.compile(nn.Linear(FEATURES, 8), backend="eager")
        return nn.Sequential(inner, nn.Tanh(), nn.Linear(8, CLASSES))  # type: ignore[arg-type]


RARE_IN = 4000
"""A check before training loads 300 records, which seldom include the rare one."""

KINDS = (
    Kind(name="plain", module=UserModule, short=True, must_train=True),
    Kind(name="class weights", module=_ClassWeights, rare_in=RARE_IN, short=True),
    Kind(name="masked mean", module=_MaskedMean, rare_in=RARE_IN, short=True),
    Kind(name="token mean", module=_TokenMean, rare_in=RARE_IN, short=True),
    Kind(name="losses per record", module=_LossesPerRecord, must_train=True),
    Kind(name="losses over their mean", module=_CoupledLosses, short=True),
    Kind(name="losses with coupled gradients", module=_CoupledByDetached, short=True),
    Kind(name="contrastive loss", module=_Contrastive),
    Kind(name="BatchNorm in training mode", module=_BatchNorm),
    Kind(name="BatchNorm in eval mode", module=_FrozenBatchNorm, must_train=True, short=True),
    Kind(name="BatchNorm set to train in a hook", module=_BatchNormLeftInEval),
    Kind(name="gradient checkpointing", module=_GradientCheckpointing, must_train=True, short=True),
    Kind(name="checkpointing with dropout", module=_CheckpointedDropout),
    Kind(name="LoRA", module=_LoRA, must_train=True),
    Kind(name="LoRA with EMA", module=_LoRA, callbacks=lambda: [ts.callbacks.EMA(0.9)], must_train=True),
    Kind(name="weight_norm", module=_WeightNorm, must_train=True),
    Kind(name="spectral_norm", module=_SpectralNorm),
    Kind(name="compiled part", module=_Compiled, must_train=True),
)
