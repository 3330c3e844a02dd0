"""The optimizers and schedulers: those of torch, and some as users write them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn, optim
from torch.optim import Optimizer, lr_scheduler

from tools.differential.trace import Trace

if TYPE_CHECKING:
    from tools.differential.case import Case


class Own(Optimizer):
    """The base of the optimizers below, which records calls and counts them in the state."""

    trace: Trace | None = None

    def __init__(self, params: Iterable[Any], lr: float = 0.05) -> None:
        super().__init__(params, {"lr": lr, "calls": 0})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        if self.trace is not None:
            self.trace.add("optimizer", type(self).__name__, [group["lr"] for group in self.param_groups])
        with torch.no_grad():
            for group in self.param_groups:
                group["calls"] += 1
                for p in group["params"]:
                    self.update(p, float(group["lr"]), group["calls"])

    def update(self, p: nn.Parameter, lr: float, calls: int) -> None:
        """Move one parameter."""
        raise NotImplementedError


class CountsCalls(Own):
    """Its rate depends on the number of calls."""

    def update(self, p: nn.Parameter, lr: float, calls: int) -> None:
        if p.grad is not None:
            p.sub_(p.grad, alpha=lr / calls**0.5)


class DecaysAll(Own):
    """Decays every parameter, also those without gradient."""

    def update(self, p: nn.Parameter, lr: float, calls: int) -> None:
        p.mul_(1 - 0.1 * lr)
        if p.grad is not None:
            p.sub_(p.grad, alpha=lr)


class ZeroesItself(CountsCalls):
    """Overrides `zero_grad`."""

    def zero_grad(self, set_to_none: bool = True) -> None:
        if self.trace is not None:
            self.trace.add("zero_grad", type(self).__name__)
        super().zero_grad(set_to_none)


def _of_torch(kind: type[Optimizer], **options: Any) -> Callable[..., Optimizer]:
    return partial(kind, **options)


MAKERS: dict[str, Callable[..., Optimizer]] = {
    "SGD": _of_torch(optim.SGD, lr=0.05),
    "momentum": _of_torch(optim.SGD, lr=0.05, momentum=0.9, nesterov=True, weight_decay=0.01),
    "Adam": _of_torch(optim.Adam, lr=0.02),
    "AMSGrad": _of_torch(optim.Adam, lr=0.02, amsgrad=True, foreach=True),
    "AdamW": _of_torch(optim.AdamW, lr=0.02, weight_decay=0.1),
    "fused AdamW": _of_torch(optim.AdamW, lr=0.02, fused=True),
    "NAdam": _of_torch(optim.NAdam, lr=0.02),
    "RAdam": _of_torch(optim.RAdam, lr=0.02),
    "RMSprop": _of_torch(optim.RMSprop, lr=0.01, momentum=0.5),
    "Adagrad": _of_torch(optim.Adagrad, lr=0.05),
    "Adadelta": _of_torch(optim.Adadelta, lr=1.0),
    "Adamax": _of_torch(optim.Adamax, lr=0.02),
    "Rprop": _of_torch(optim.Rprop, lr=0.01),
    "ASGD": _of_torch(optim.ASGD, lr=0.05),
    "CountsCalls": CountsCalls,
    "DecaysAll": DecaysAll,
    "ZeroesItself": ZeroesItself,
}
OWN = ("CountsCalls", "DecaysAll", "ZeroesItself")
NOT_COMPLEX = ("fused AdamW",)


def _tensor_rate(maker: Callable[..., Optimizer]) -> Callable[..., Optimizer]:
    """The optimizer with its learning rate in a tensor."""
    return lambda params: maker(params, lr=torch.tensor(0.03))


MAKERS["AdamW, rate in a tensor"] = _tensor_rate(_of_torch(optim.AdamW))


def make_optimizers(case: Case, params: Sequence[nn.Parameter], trace: Trace) -> list[Optimizer]:
    """The optimizers of a case, each over a part of `params`, in one group or two."""
    made, each = [], len(case.optimizers)
    for position, name in enumerate(case.optimizers):
        mine = list(params[position::each])
        half = len(mine) // 2
        groups = [{"params": mine}]
        if case.groups == 2 and half:
            groups = [{"params": mine[:half], "lr": 0.01}, {"params": mine[half:]}]
        optimizer = MAKERS[name](groups)
        optimizer.trace = trace  # type: ignore[attr-defined]
        if case.step_hooks and name not in OWN:
            optimizer.register_step_pre_hook(lambda o, args, kwargs: trace.add("optimizer", "before", type(o).__name__))
            optimizer.register_step_post_hook(lambda o, args, kwargs: trace.add("optimizer", "after", type(o).__name__))
        made.append(optimizer)
    return made


class OwnScheduler:
    """Halves the rates at every third step."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer, self.steps = optimizer, 0

    def step(self) -> None:
        self.steps += 1
        if self.steps % 3 == 0:
            for group in self.optimizer.param_groups:
                group["lr"] = group["lr"] * 0.5

    def state_dict(self) -> dict[str, Any]:
        return {"steps": self.steps}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.steps = state["steps"]


def _chained(optimizer: Optimizer) -> Any:
    parts = [lr_scheduler.ConstantLR(optimizer, 0.5, 2), lr_scheduler.ExponentialLR(optimizer, 0.9)]
    return lr_scheduler.ChainedScheduler(parts, optimizer)


def _sequential(optimizer: Optimizer) -> Any:
    parts = [lr_scheduler.LinearLR(optimizer, 0.1, 1.0, 3), lr_scheduler.CosineAnnealingLR(optimizer, 40)]
    return lr_scheduler.SequentialLR(optimizer, parts, [3])


SCHEDULERS: dict[str, Callable[[Optimizer], Any]] = {
    "StepLR": partial(lr_scheduler.StepLR, step_size=2, gamma=0.5),
    "ExponentialLR": partial(lr_scheduler.ExponentialLR, gamma=0.9),
    "CosineAnnealingLR": partial(lr_scheduler.CosineAnnealingLR, T_max=200),
    "CosineAnnealingWarmRestarts": partial(lr_scheduler.CosineAnnealingWarmRestarts, T_0=3),
    "LambdaLR": partial(lr_scheduler.LambdaLR, lr_lambda=lambda step: 1 / (1 + step)),
    "OneCycleLR": partial(lr_scheduler.OneCycleLR, max_lr=0.05, total_steps=500, cycle_momentum=False),
    "SequentialLR": _sequential,
    "ChainedScheduler": _chained,
    "own": OwnScheduler,
    "ReduceLROnPlateau": partial(lr_scheduler.ReduceLROnPlateau, patience=0, factor=0.5),
}


class Scheduled(NamedTuple):
    """A scheduler and the times of its steps.

    Attributes:
        make: makes the scheduler.
        optimizer: the position of its optimizer.
        interval: "step" or "epoch".
        frequency: the number of intervals between two steps.
        monitor: the name of the value for its step; empty for none.
        factory: whether the library gets the function `make`.
    """

    make: Callable[[Optimizer], Any]
    optimizer: int
    interval: str
    frequency: int
    monitor: str
    factory: bool


def scheduled(case: Case) -> list[Scheduled]:
    """The schedulers of a case, before they are made."""
    return [
        Scheduled(SCHEDULERS[one.kind], one.optimizer, one.interval, one.frequency, one.monitor, one.factory)
        for one in case.schedulers
    ]
