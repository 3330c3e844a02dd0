"""`Task`: the input of every contender, and its work."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from torch import Tensor, nn
from torch.nn import functional
from torch.optim import Optimizer
from torch.utils.data import DataLoader, TensorDataset

Feed = Literal["tensors", "loader", "list"]
MakeOptimizer = Callable[[Iterable[nn.Parameter]], Optimizer]
Loss = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One workload: a model, its data and how much of it there is.

    Attributes:
        name, title: as on the command line, and for people.
        kind: train for one epoch, the same where contenders may ask for more speed (`tuned_optimizer`, channels last),
            or evaluate and collect the outputs.
        make_model: a new model; its weights depend on torch's global generator alone.
        make_optimizer: an optimizer over parameters.
        inputs, targets: the whole data, `(steps * micro_batch, ...)`.
        micro_batch: samples a forward pass.
        accumulation: forward passes an update.
        feed: how batches reach the loop: a `DataLoader` over a `TensorDataset` (rows are collated), a `DataLoader`
            over ready-made batches, or a list of ready-made batches. Every contender gets the same.
        tuned_optimizer: the optimizer of those that ask for more speed; None for the same.
        loss: of a batch, from the model's output and the targets.
    """

    name: str
    title: str
    kind: Literal["train", "tuned", "evaluate"]
    make_model: Callable[[], nn.Module]
    make_optimizer: MakeOptimizer
    inputs: Tensor
    targets: Tensor
    micro_batch: int
    accumulation: int = 1
    feed: Feed = "tensors"
    tuned_optimizer: MakeOptimizer | None = None
    loss: Loss = functional.cross_entropy

    @property
    def steps(self) -> int:
        """Forward passes of one run; times are divided by them."""
        return len(self.inputs) // self.micro_batch

    def cut(self, steps: int) -> Task:
        """The same task over its first `steps` batches."""
        rows = steps * self.micro_batch
        return replace(self, inputs=self.inputs[:rows], targets=self.targets[:rows])

    def batches(self) -> Sequence[tuple[Tensor, Tensor]]:
        """Ready-made batches, each with its own memory."""
        pairs = zip(self.inputs.split(self.micro_batch), self.targets.split(self.micro_batch), strict=True)
        return [(inputs.clone(), targets.clone()) for inputs, targets in pairs]

    def make_loader(self) -> Any:
        """The batches of an epoch, in the order of the data."""
        if self.feed == "tensors":
            return DataLoader(TensorDataset(self.inputs, self.targets), batch_size=self.micro_batch, shuffle=False)
        if self.feed == "loader":
            return DataLoader(self.batches(), batch_size=None, shuffle=False)  # type: ignore[arg-type]
        return self.batches()
