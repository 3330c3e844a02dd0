"""Modules whose steps make several updates, and the results of ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits as bce
from torch.utils.data import DataLoader, TensorDataset

import trainstack as ts
from tests.helpers.modules import arguments, weights

POINTS = torch.randn(22, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def networks() -> tuple[nn.Module, nn.Module]:
    """A generator and a discriminator, with the same weights in each call."""
    torch.manual_seed(1)
    generator = nn.Sequential(nn.Linear(2, 6), nn.ReLU(), nn.Linear(6, 2)).double()
    return generator, nn.Sequential(nn.Linear(2, 6), nn.Tanh(), nn.Linear(6, 1)).double()


def judge_loss(generator: nn.Module, judge: nn.Module, real: Tensor) -> Tensor:
    """That of the discriminator."""
    right, wrong = judge(real), judge(generator(real.flip(1)).detach())
    return bce(right, torch.ones_like(right)) + bce(wrong, torch.zeros_like(wrong))


def fooling_loss(generator: nn.Module, judge: nn.Module, real: Tensor) -> Tensor:
    """That of the generator."""
    judged = judge(generator(real.flip(1)))
    return bce(judged, torch.ones_like(judged))


class Points(ts.ModuleInterface):
    """A module over 22 points in their order."""

    def __init__(self) -> None:
        super().__init__()
        self.generator, self.judge = networks()
        self.dataset = TensorDataset(POINTS)

    def get_train_dataloader(self, sampler: Any, batch_size: int) -> Any:
        return DataLoader(self.dataset, batch_size=batch_size)

    def get_optimizers_schedulers(self, *_: Any) -> Any:
        adam = torch.optim.Adam
        return [adam(self.judge.parameters(), lr=0.02), adam(self.generator.parameters(), lr=0.01)], []


class InTurns(Points):
    """A discriminator that is updated `rounds` times, then the generator against the new discriminator."""

    def __init__(self, rounds: int = 1) -> None:
        super().__init__()
        self.rounds = rounds

    def train_step(self, global_step: int, batch: Any, device: Any) -> Any:
        for _ in range(self.rounds):
            yield judge_loss(self.generator, self.judge, batch[0]), 0
        yield fooling_loss(self.generator, self.judge, batch[0]), 1


class Regression(Points):
    """Fits a function with an optimizer that evaluates the loss several times a step."""

    def __init__(self, optimizer: Callable[..., Any], *, yields: bool = False) -> None:
        super().__init__()
        self.optimizer, self.yields = optimizer, yields
        if yields:
            self.train_step = self.yielding_step

    def get_optimizers_schedulers(self, *_: Any) -> Any:
        return self.optimizer(self.generator.parameters()), None

    def loss(self, batch: Any) -> Tensor:
        return ((self.generator(batch[0]) - batch[0].sin()) ** 2).mean()

    def train_step(self, global_step: int, batch: Any, device: Any) -> Any:
        return self.loss(batch)

    def yielding_step(self, global_step: int, batch: Any, device: Any) -> Any:
        yield lambda: self.loss(batch), 0


def lbfgs(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.LBFGS(parameters, lr=0.5, max_iter=4)


class Polyak(torch.optim.SGD):
    """Gradient descent with the step size of Polyak: the loss over the squared norm of the gradient."""

    def step(self, closure: Any = None) -> Any:
        (group,) = self.param_groups
        loss = closure()
        rate = 0.1 * loss / sum(p.grad.square().sum() for p in group["params"])
        with torch.no_grad():
            for p in group["params"]:
                p -= rate * p.grad


def trained(kind: str, **changes: Any) -> list[float]:
    """The weights after two epochs."""
    kinds: dict[str, Callable[[], Points]] = {
        "turns": InTurns,
        "rounds": lambda: InTurns(3),
        "lbfgs": lambda: Regression(lbfgs),
        "polyak": lambda: Regression(Polyak, yields=True),
    }
    module = kinds[kind]()
    values = {"epochs": 2, "train_batch_size": 8, "clip_grads": False, **changes}
    trainer = ts.Trainer(module, arguments("unused", **values))
    trainer.train()
    trainer.close()
    return list(weights(module).tolist())


def different_updates() -> str:
    """The error of each rank where one rank yields another optimizer than the others."""
    import torch.distributed as dist

    class Parted(Points):
        def train_step(self, global_step: int, batch: Any, device: Any) -> Any:
            yield judge_loss(self.generator, self.judge, batch[0]), 0
            yield fooling_loss(self.generator, self.judge, batch[0]), 1 - dist.get_rank()

    try:
        ts.Trainer(Parted(), arguments("unused", backend="ddp")).train()
    except ts.ModuleContractError as error:
        return str(error)
    return ""
