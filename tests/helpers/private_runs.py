"""Private runs on a small module, and the same training written out by hand."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import Subset

import trainstack as ts
from tests.helpers.modules import Classifier, arguments, numbers, weights

LIMIT, SEED = 0.5, 3


def promise(**changes: Any) -> ts.DifferentialPrivacyArguments:
    """No noise and known masks, unless told otherwise."""
    values: dict[str, Any] = {"delta": 1e-4, "per_sample_max_grad_norm": LIMIT, "accountant": "rdp"}
    if not {"noise_multiplier", "target_epsilon"} & changes.keys():
        values["noise_multiplier"] = 0.0
        values["debug_seed"] = SEED
    return ts.DifferentialPrivacyArguments(**{**values, **changes})


def private(directory: Any, args: ts.DifferentialPrivacyArguments | None = None, **changes: Any) -> ts.TrainerArguments:
    """Arguments of a private run."""
    return arguments(
        directory, **{"backend": "sp-dp", "differential_privacy_args": args or promise(), "writers": [], **changes}
    )


_SEEN: WeakKeyDictionary[Recording, list[Tensor]] = WeakKeyDictionary()
"""Not an attribute of the optimizer, which a checkpoint would keep."""


class Recording(torch.optim.SGD):
    """Keeps every gradient that it gets."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        _SEEN[self] = []

    @property
    def seen(self) -> list[Tensor]:
        return _SEEN[self]

    def step(self, closure: Any = None) -> Any:
        parameters = [p for group in self.param_groups for p in group["params"]]
        self.seen.append(torch.cat([p.grad.flatten() for p in parameters if p.grad is not None]).clone())
        return super().step(closure)


class Recorded(Classifier):
    """`released` holds the gradients that left the private step."""

    def __init__(self, dataset: Any = None, **changes: Any) -> None:
        super().__init__(dataset, optimizer=Recording, **changes)

    @property
    def released(self) -> list[Tensor]:
        return self.made.seen

    def get_optimizers_schedulers(self, *given: Any) -> Any:
        made = super().get_optimizers_schedulers(*given)
        self.made = made[0][0]
        return made


class TwoOptimizers(Classifier):
    """One optimizer a layer, each with a schedule."""

    def get_optimizers_schedulers(self, *given: Any) -> Any:
        return two_optimizers(self)


def two_optimizers(module: Any) -> tuple[list[Any], list[Any]]:
    """SGD and Adam, whose rates fall."""
    first = torch.optim.SGD(module.net[0].parameters(), lr=0.2, momentum=0.5)
    second = torch.optim.Adam(module.net[3].parameters(), lr=0.05, eps=1e-2)
    return [first, second], [torch.optim.lr_scheduler.ExponentialLR(one, 0.9) for one in (first, second)]


def by_hand(records: int = 41, batch: int = 8, epochs: int = 2, seed: int = SEED) -> Tensor:
    """The weights after DP-SGD without noise, in plain PyTorch: one record after the other."""
    module, data = Classifier(), numbers(records)
    optimizers, schedulers = two_optimizers(module)
    parameters = list(module.parameters())
    for step in range(1, epochs * math.ceil(records / batch) + 1):
        drawn = np.flatnonzero(np.random.default_rng([seed, step, 0]).random(records) < batch / records)
        sums = [torch.zeros_like(p) for p in parameters]
        for i in drawn:
            x, y = data[int(i)]
            loss = nn.functional.cross_entropy(module.net(x[None]), y[None])
            gradients = torch.autograd.grad(loss, parameters)
            norm = math.sqrt(sum(float(g.square().sum()) for g in gradients))
            for total, gradient in zip(sums, gradients, strict=True):
                total += gradient * min(1.0, LIMIT / (norm + 1e-6))
        for parameter, total in zip(parameters, sums, strict=True):
            parameter.grad = total / batch
        for one in (*optimizers, *schedulers):
            one.step()
    return weights(module)


def counts(records: int, rate: float, steps: Sequence[int], seed: int = SEED) -> list[int]:
    """The numbers of records that the steps of a run with a debug seed draw."""
    return [int((np.random.default_rng([seed, step, 0]).random(records) < rate).sum()) for step in steps]


class Shaped(ts.ModuleInterface):
    """One of `private_shapes` over its data, of which `order` selects the records."""

    def __init__(self, shape: nn.Module, data: Any, order: Sequence[int]) -> None:
        super().__init__()
        self.shape, self.data = shape, Subset(data, list(order))

    def get_optimizers_schedulers(self, *given: Any) -> Any:
        self.made = Recording([p for p in self.parameters() if p.requires_grad], lr=0.1)
        return self.made

    def get_train_dataloader(self, sampler: Any, batch_size: int) -> Any:
        return torch.utils.data.DataLoader(self.data, sampler=sampler(self.data), batch_size=batch_size)

    def train_step(self, global_step: int, batch: Any, device: Any) -> Any:
        return self.shape.train_step(batch)


class Rated(Classifier):
    """Returns the loss, and for each record whether its label was found."""

    def train_step(self, global_step: int, batch: Any, device: Any) -> Any:
        scores = self.net(batch[0])
        right = (scores.argmax(1) == batch[1]).float()
        return {"loss": nn.functional.cross_entropy(scores, batch[1]), "accuracy": right}


class BreaksOff(Classifier):
    """Fails in the step after `steps`."""

    def __init__(self, steps: int, dataset: Any = None) -> None:
        super().__init__(dataset)
        self.steps = steps

    def train_step(self, global_step: int, batch: Any, device: Any) -> Any:
        if global_step > self.steps:
            raise ArithmeticError("broken off")
        return super().train_step(global_step, batch, device)
