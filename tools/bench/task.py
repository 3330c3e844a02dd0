"""`Task`: the input of every contender."""

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
    """One workload: a model and its data.

    Attributes:
        name, title: the name on the command line, and a description.
        kind: train for one epoch; train with options for speed (`tuned_optimizer`, channels last); or evaluate and
            collect the outputs.
        make_model: makes a model; its weights depend only on the global generator of torch.
        make_optimizer: makes an optimizer of parameters.
        inputs, targets: the whole data, `(steps * micro_batch, ...)`.
        micro_batch: the number of samples of a forward pass.
        accumulation: the number of forward passes of an update.
        feed: the source of batches: a `DataLoader` over a `TensorDataset` (rows are collated), a `DataLoader` over
            ready-made batches, or a list of ready-made batches. It is the same for every contender.
        tuned_optimizer: the optimizer with options for speed; None for `make_optimizer`.
        loss: the loss of a batch, from the output of the model and the targets.
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
        """The number of forward passes of one run, by which times are divided."""
        return len(self.inputs) // self.micro_batch

    def cut(self, steps: int) -> Task:
        """The task with only the first `steps` batches."""
        rows = steps * self.micro_batch
        return replace(self, inputs=self.inputs[:rows], targets=self.targets[:rows])

    def batches(self) -> Sequence[tuple[Tensor, Tensor]]:
        """Ready-made batches with separate memory."""
        pairs = zip(self.inputs.split(self.micro_batch), self.targets.split(self.micro_batch), strict=True)
        return [(inputs.clone(), targets.clone()) for inputs, targets in pairs]

    def make_loader(self) -> Any:
        """The batches of an epoch, in the order of the data."""
        if self.feed == "tensors":
            return DataLoader(TensorDataset(self.inputs, self.targets), batch_size=self.micro_batch, shuffle=False)
        if self.feed == "loader":
            return DataLoader(self.batches(), batch_size=None, shuffle=False)  # type: ignore[arg-type]
        return self.batches()
