"""`Task` is the user code of a case: steps, hooks and their actions. Both sides run it."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import Optimizer

from tools.differential.case import IN_VALIDATION, Case
from tools.differential.datasets import TrainingSet, validation_loaders
from tools.differential.networks import OUT, VIEWS, Network
from tools.differential.optimizers import make_optimizers, scheduled
from tools.differential.trace import Trace, bits_of


class Planned(Exception):
    """The error of a case with `raises`."""


@dataclass
class Output:
    """The output of a step as a dataclass."""

    loss: Tensor
    pred: Tensor


class Gap:
    """A metric: the mean and the largest distance from the targets."""

    def __init__(self) -> None:
        self.reset()

    def update(self, outputs: Tensor, targets: Tensor) -> None:
        gaps = (outputs - targets).abs()
        self.sums.append(float(gaps.sum()))
        self.most = torch.maximum(self.most, gaps.max().double())

    def compute(self) -> dict[str, Any]:
        return {"sum": sum(self.sums), "most": self.most}

    def reset(self) -> None:
        self.sums: list[float] = []
        self.most = torch.zeros((), dtype=torch.float64)


class Task:
    """The network, the data and the user code of one case.

    Attributes:
        trace: the calls.
        log: records a value with a name; the side that runs the task sets it.
        validate: runs a validation without recording it; the side that runs the task sets it.
        raises: whether the planned error is still to be raised.
        optimizers: the optimizers of the run, for hooks that change them.
        rank: the rank that runs the task.
    """

    def __init__(self, case: Case, rank: int = 0) -> None:
        self.case, self.trace, self.rank = case, Trace(), rank
        self.network = Network(case, self.trace)
        self.network.register_buffer("stat", torch.zeros(3))
        self.data = TrainingSet(case, self.trace)
        self.log: Callable[[str, Any], None] = lambda name, value: None
        self.validate: Callable[[], Any] = lambda: None
        self.raises = False
        self.optimizers: list[Optimizer] = []
        self.outside: nn.Parameter | None = None
        self._reached = Counter[str]()
        self._step = 0
        self._running: Tensor | None = None
        self._val_loss: Tensor | None = None
        self._pred: Tensor | None = None

    def begin(self) -> None:
        """Begin the training, after all trials."""
        self.trace.muted, self._step = False, 0

    def make_optimizers(self) -> tuple[list[Optimizer], list[Any]]:
        """The optimizers, and the functions that make their schedulers."""
        held = self.network.held()
        self.optimizers = make_optimizers(self.case, held, self.trace)
        return self.optimizers, scheduled(self.case)

    def val_loaders(self, sampler: type, batch_size: int) -> Any:
        """The result of `get_val_dataloaders`."""
        return validation_loaders(self.case, sampler, batch_size)

    # --- steps

    def batch_weight(self, batch: Any) -> int:
        """The number of items of a batch."""
        self.reach("batch_weight")
        targets = _pair(batch)[1][:, 0]
        if self.case.additive:
            return int(self._weights_of(targets).sum())
        return int((targets > 0.3).sum()) if self.case.weights == "some are zero" else 1 + int((targets > 0).sum())

    def _weights_of(self, targets: Tensor) -> Tensor:
        """The number of items of each sample."""
        return (targets > 0.3).double() if self.case.weights == "some are zero" else 1 + (targets > 0).double()

    def _loss(self, pred: Tensor, y: Tensor, reduction: str = "mean") -> Tensor:
        """The mean over the items that `batch_weight` counts; additive cases allow any split of a batch."""
        if not self.case.additive:
            return functional.mse_loss(pred, y)
        each = (pred - y).square().mean(1)
        if reduction == "sum":
            return each.sum()
        weights = self._weights_of(y[:, 0]) if self.case.weights else torch.ones_like(each)
        return (each * weights).sum() / weights.sum()  # nan for a batch of weight 0

    def train_step(self, number: int, batch: Any) -> Any:
        """The loss of a micro-batch, in the form of the case."""
        self.reach("train_step", number, batch)
        self.network.begin_step(number)
        first, self._step = number != self._step, number
        x, y = _pair(batch)
        pred = self.network(x)
        if self.outside is not None:
            pred = pred + self.outside.to(pred.dtype)
        self.reach("after forward")
        loss = self._loss(pred, y, self.case.reduction)
        if self.case.shift:
            assert self.network.shift is not None
            loss = loss + VIEWS[self.case.shift](self.network.shift)
        if first and self.case.poisoned in (None, self.rank):
            loss = self._poisoned(number, loss, pred)
        self._pred = pred
        return self._returned(self._in_memory(loss), pred)

    def val_step(self, number: int, batch: Any) -> Any:
        """The loss of a validation batch, in the form of the case."""
        self.reach("val_step", number, batch)
        x, y = _pair(batch)
        torch.rand(1)
        pred = self.network(x)
        loss = self._loss(pred, y)
        if self.case.val_memory:
            if self._val_loss is None:
                self._val_loss = torch.zeros_like(loss)
            loss = self._val_loss.copy_(loss)
        return self._returned(loss, pred)

    def metric_inputs(self, outputs: Any, batch: Any) -> tuple[Tensor, Tensor]:
        """The input of the metric, with the shape of the targets."""
        x, y = _pair(batch)
        return x.double().reshape(len(x), -1)[:, :OUT], y

    def _poisoned(self, number: int, loss: Tensor, pred: Tensor) -> Tensor:
        for step, kind in self.case.poison:
            if step == number and kind == "gradient":
                pred.register_hook(lambda gradient: gradient * float("nan"))
            elif step == number:
                loss = loss * float("nan" if kind == "loss" else "inf")
        return loss

    def _in_memory(self, loss: Tensor) -> Tensor:
        """The loss in the kind of memory of the case."""
        memory = self.case.loss_memory
        if memory == "kept by the user":
            if self._running is None:
                self._running = loss.detach()
            else:
                self._running.mul_(0.9).add_(loss.detach(), alpha=0.1)
        elif memory == "view of a large tensor":
            loss = torch.cat([loss.reshape(1), loss.new_zeros(50)])[0]
        elif memory == "is a parameter":
            assert self.network.shift is not None
            loss = self.network.shift.squeeze()
        elif memory == "hook on the loss":
            loss.register_hook(lambda gradient: gradient.data.mul_(0.5))
        elif memory == "own backward":
            loss.backward = self._own_backward(loss)  # type: ignore[method-assign]
        return loss

    def _own_backward(self, loss: Tensor) -> Callable[..., None]:
        def backward(*given: Any, **named: Any) -> None:
            self.trace.add("loss", "backward")
            torch.Tensor.backward(loss, *given, **named)

        return backward

    def _returned(self, loss: Tensor, pred: Tensor) -> Any:
        forms: dict[str, Callable[[], Any]] = {
            "loss": lambda: loss,
            "tuple": lambda: (loss, pred),
            "list": lambda: [loss, pred],
            "dict": lambda: {"loss": loss, "pred": pred},
            "dataclass": lambda: Output(loss, pred),
            "nested": lambda: (loss, {"pred": pred, "pair": (pred[:1], 0.5)}, "text", 3),
        }
        return forms[self.case.returns]()

    # --- hooks

    def reach(self, place: str, *given: Any) -> None:
        """Call user code at `place` with the arguments `given`: it can raise and act."""
        if self.trace.muted:
            return
        self._reached[place] += 1
        if self.raises and self.case.raises == (place, self._reached[place]) and self.case.raises_on == self.rank:
            self.raises = False
            raise Planned(place)
        if place not in ("after forward", "batch_weight"):
            self.trace.add("reached", place, *given)
        for action in self.case.actions:
            if action.where == place and action.occurrence == self._reached[place]:
                self._act(action.what, place, given)

    def _act(self, what: str, place: str, given: tuple[Any, ...]) -> None:
        simple: dict[str, Callable[[], Any]] = {
            "add a layer": lambda: self.optimizers[0].add_param_group({"params": self.network.grow()}),
            "remove a layer": self._remove_layer,
            "remove a layer from the module alone": self._pop_layer,
            "replace a parameter": self._replace_parameter,
            "add a parameter outside the module": self._add_outside,
            "freeze": lambda: self.network.trunk.requires_grad_(False),
            "unfreeze": lambda: self.network.trunk.requires_grad_(True),
            "assign a new buffer": lambda: setattr(self.network, "stat", self.network.stat + 1),
            "call eval": self.network.eval,
            "change the rate": self._change_rate,
            "draw random numbers": lambda: self._draw(place),
            "log": lambda: self._log_two(place),
            "log, then write": self._log_and_write,
            "write the data of gradients": lambda: self._write_gradients(lambda gradient: gradient.data.mul_(0.1)),
            "write gradients": lambda: self._write_gradients(lambda gradient: gradient.mul_(0.5)),
            "scale the loss": lambda: given[-1].data.mul_(100),
            "write outputs": self._write_outputs,
            "validate": self._validate,
        }
        simple[what]()

    def _pop_layer(self) -> list[nn.Parameter]:
        """Remove the newest part of the network; returns its parameters."""
        network = self.network
        if len(network.grown):
            part = network.grown[-1]
            del network.grown[-1]
        elif len(network.extras):
            part = network.extras.pop(next(reversed(list(network.extras))))
        else:
            return []
        return list(part.parameters())

    def _remove_layer(self) -> None:
        """Remove the newest part of the network, also from the optimizers."""
        gone = {id(p) for p in self._pop_layer()}
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                for p in [p for p in group["params"] if id(p) in gone]:
                    optimizer.state.pop(p, None)
                group["params"] = [p for p in group["params"] if id(p) not in gone]

    def _replace_parameter(self) -> None:
        """Replace a parameter by another one, also in its optimizer."""
        before = self.network.head.weight
        after = nn.Parameter(0.5 * before.detach())
        self.network.head.weight = after
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                for position, p in enumerate(group["params"]):
                    if p is before:
                        group["params"][position] = after
                        optimizer.state.pop(before, None)

    def _add_outside(self) -> None:
        if self.outside is None:
            self.outside = nn.Parameter(torch.ones(OUT, dtype=self.network.head.weight.dtype))
            self.optimizers[-1].add_param_group({"params": [self.outside]})

    def _change_rate(self) -> None:
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = group["lr"] * 0.5

    def _draw(self, place: str) -> None:
        drawn = (torch.rand(2), float(np.random.rand()), random.random())
        if place not in IN_VALIDATION:  # where the library sets the random numbers
            self.trace.add("drawn", place, *drawn)

    def _log_two(self, place: str) -> None:
        self.log(f"user/{place}", 1.5 * self._reached[place])
        self.log(f"user/{place}/tensor", torch.tensor(0.5 * self._reached[place]))

    def _log_and_write(self) -> None:
        value = torch.tensor(1.5)
        self.log("user/written", value)
        value.add_(1)

    def _write_gradients(self, write: Callable[[Tensor], Any]) -> None:
        for p in self.network.parameters():
            if p.grad is not None:
                write(p.grad)

    def _write_outputs(self) -> None:
        if self._pred is not None:
            self._pred.detach().add_(1)

    def _validate(self) -> None:
        with self.trace.mute():
            self.validate()

    # --- final state

    def state(self, schedulers: Iterable[Any]) -> dict[str, Any]:
        """The final state of the training, by name."""
        network, found = self.network, dict[str, Any]()
        for name, p in network.named_parameters():
            found[f"parameter {name}"], found[f"requires_grad of {name}"] = bits_of(p), p.requires_grad
            found[f"gradient of {name}"] = bits_of(p.grad)
        found |= {f"buffer {name}": bits_of(buffer) for name, buffer in network.named_buffers()}
        found |= {f"mode of {name or 'the network'}": part.training for name, part in network.named_modules()}
        if self.outside is not None:
            found["parameter outside"] = bits_of(self.outside)
        for position, optimizer in enumerate(self.optimizers):
            found[f"optimizer {position}"] = bits_of(optimizer.state_dict())
        for position, scheduler in enumerate(schedulers):
            found[f"scheduler {position}"] = bits_of(scheduler.state_dict())
        found["random numbers of torch"] = bits_of(torch.get_rng_state())
        found["random numbers of numpy"] = bits_of(np.random.get_state(legacy=False))
        found["random numbers of Python"] = str(random.getstate())
        return found


def _pair(batch: Any) -> tuple[Tensor, Tensor]:
    if isinstance(batch, dict) and "first" in batch:
        xs, ys = zip(*[_pair(part) for part in batch.values() if part is not None], strict=True)
        return torch.cat(xs), torch.cat(ys)
    return (batch["x"], batch["y"]) if isinstance(batch, dict) else (batch[0], batch[1])
