"""The micro-batches of each global step."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice, tee
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler, SequentialSampler

from trainstack.backends import EMPTY, Communicator
from trainstack.backends.workload import Draw, Sampling, TrainingSet
from trainstack.errors import ConfigurationError, ModuleContractError
from trainstack.trainer.core.order import DataOrder
from trainstack.trainer.data.loading import Fetcher
from trainstack.trainer.data.torch_classes import is_usual, replaced_method


class StepBatches(NamedTuple):
    """What one global step trains on, on this process.

    Attributes:
        batches: the micro-batches.
        weights: the share of each in the step; over all processes they sum to one (to zero if nothing counts).
        items: what the step's loss is a mean over, on all processes together: samples, tokens, ...
        samples: samples on all processes together; 0 where unknown.
        counted: how many micro-batches counters count, where that is not how many there are.
    """

    batches: Sequence[Any]
    weights: Sequence[float]
    items: float
    samples: int
    counted: int | None = None


WeightFn = Callable[[Any], float]


def unsupported_order_reason(loader: Any) -> str | None:
    """Why the library cannot order the data behind `loader` itself; None if it can."""
    if not isinstance(loader, DataLoader):
        return f"it is a {type(loader).__name__}, not a DataLoader"
    replaced = replaced_method(loader, DataLoader)
    if replaced is not None:
        return f"{type(loader).__name__} has its own {replaced}"
    if isinstance(loader.dataset, IterableDataset):
        return "its data set is iterable and has no indices"
    if loader.batch_size is None or not is_usual(loader.batch_sampler, BatchSampler):
        return "it has its own batch sampler, or no automatic batching"
    sampler: Any = loader.sampler
    if not is_usual(sampler, RandomSampler) and not is_usual(sampler, SequentialSampler):
        return f"its sampler is a {type(sampler).__name__} with an order of its own"
    dataset: Any = loader.dataset
    if len(sampler) != len(dataset) or getattr(sampler, "replacement", False):
        return "its sampler does not draw every sample once"
    return None


def check_not_presharded(loader: Any, world_size: int) -> None:
    """Refuse a sampler that shards the data: the library would shard it a second time.

    Raises:
        ModuleContractError: the sampler or batch sampler of `loader` is for several processes, and there are several.
    """
    batches = getattr(loader, "batch_sampler", None)
    for sampler in (getattr(loader, "sampler", None), batches, getattr(batches, "sampler", None)):
        parts = getattr(sampler, "num_replicas", None)
        if world_size > 1 and isinstance(parts, int) and parts > 1:
            raise ModuleContractError(
                f"a {type(sampler).__name__} shares the data out among {parts} processes, and so does the library. "
                "Give it all of the data: DataLoader(dataset, batch_size=batch_size, sampler=sampler(dataset)), with "
                "the sampler that the method is handed."
            )


def describe_order(loader: Any) -> str:
    """How the samples behind `loader` come in training."""
    if unsupported_order_reason(loader) is not None:
        return "in the loader's own order"
    return "in data set order" if isinstance(loader.sampler, SequentialSampler) else "shuffled"


@dataclass(slots=True)
class OrderedSource:
    """A map-style data set in the library's own order: every sample once, whatever the number of processes.

    Args:
        fetcher: loads samples by index.
        order: which samples, when.
        weight_fn: the user's `batch_weight`, or None where a batch counts as its samples.
        comm: tells what the other processes' batches weigh, where `weight_fn` has to be asked.
    """

    fetcher: Fetcher
    order: DataOrder
    weight_fn: WeightFn | None = None
    comm: Communicator = field(default_factory=Communicator)

    def iter_steps(self, epoch: int, samples_done: int, batches_done: int) -> Iterator[StepBatches]:
        """The steps of `epoch` that follow the first `samples_done` samples."""
        shares, ahead = tee(self.order.local_batches(epoch, samples_done))
        batches = self.fetcher.batches(epoch, (index for share in ahead for index in share.micro_batches))
        for share in shares:
            own = list(islice(batches, len(share.micro_batches)))
            if self.weight_fn is None:
                counts = [len(index) for index in share.micro_batches]
                total = float(share.samples)
            else:
                counts = [float(self.weight_fn(batch)) for batch in own]  # type: ignore[misc]
                total = self.comm.sum([math.fsum(counts)])[0]
            yield _step_batches(own, counts, total, share.samples)


@dataclass(slots=True)
class CustomOrderSource:
    """Any iterable of ready-made batches, taken in the order in which it gives them.

    Every process reads all of them and trains on each `world_size`-th.
    """

    batches: Iterable[Any]
    accumulation: int
    weight_fn: WeightFn
    rank: int = 0
    world_size: int = 1

    def iter_steps(self, epoch: int, samples_done: int, batches_done: int) -> Iterator[StepBatches]:
        """The steps that follow the first `batches_done` batches; those are read, now, and put aside."""
        stream = iter(self.batches)
        for _ in islice(stream, batches_done * self.world_size):
            pass
        return map(self._single, stream) if self.accumulation == self.world_size == 1 else self._cut(stream)

    def _cut(self, stream: Iterator[Any]) -> Iterator[StepBatches]:
        while together := list(islice(stream, self.accumulation * self.world_size)):
            counts = [float(self.weight_fn(batch)) for batch in together]
            mine = slice(self.rank, None, self.world_size)
            yield _step_batches(together[mine], counts[mine], math.fsum(counts), 0)

    def _single(self, batch: Any) -> StepBatches:
        """The micro-batches of a step that has one: what `_step_batches` does, faster."""
        count = float(self.weight_fn(batch))
        if 0 < count < math.inf:
            return StepBatches((batch,), _WHOLE, count, 0)
        return _step_batches([batch], [count], count, 0)


@dataclass(slots=True)
class PreshardedSource:
    """Ready-made batches of each process's own, taken in the order in which they come.

    A step is over the next batches of all processes together. One whose batches have ended joins in without any until
    those of all have.
    """

    batches: Iterable[Any]
    accumulation: int
    weight_fn: WeightFn
    comm: Communicator

    def iter_steps(self) -> Iterator[StepBatches]:
        """The steps of one pass, as many on every process."""
        stream = iter(self.batches)
        while True:
            own = list(islice(stream, self.accumulation))
            counts = [float(self.weight_fn(batch)) for batch in own]
            total, going_on = self.comm.sum([math.fsum(counts), float(bool(own))])
            if not going_on:
                return
            yield _step_batches(own, counts, total, 0)


def _step_batches(batches: list[Any], counts: Sequence[float], total: float, samples: int) -> StepBatches:
    """What one process does in a step of `total` items; micro-batches that count nothing come first, so that the last
    one, which sums gradients over the processes, has something to add."""
    if len(counts) == 1 and counts[0] == total and total > 0:
        return StepBatches(batches, _WHOLE, total, samples)
    if not 0 <= total < math.inf or min(counts, default=0) < 0:
        raise ModuleContractError(
            f"batch_weight returned {list(counts)}: return how many items the loss of the batch is a mean over, "
            "a finite number >= 0."
        )
    if not batches:
        return StepBatches([EMPTY], [0.0], total, samples)
    shares = [count / total if total else 0.0 for count in counts]
    if not shares[-1]:
        order = sorted(range(len(batches)), key=lambda position: shares[position] > 0)
        batches, shares = [batches[i] for i in order], [shares[i] for i in order]
    return StepBatches(batches, shares, total, samples)


_WHOLE = (1.0,)


def custom_batch_weight(module: Any) -> WeightFn | None:
    """The module's `batch_weight` if it overrides the method; None where a batch counts as its samples."""
    weigh = getattr(module, "batch_weight", None)
    counts = getattr(weigh, "counts_samples", False)
    return None if (counts(module) if callable(counts) else counts) else weigh


def sums_losses(module: Any) -> bool:
    """Whether the losses of `module` are sums over samples, as its `loss_reduction` says.

    Raises:
        ConfigurationError: it says something else.
    """
    reduction = getattr(module, "loss_reduction", None)
    if reduction not in (None, "mean", "sum"):
        raise ConfigurationError(
            f"{type(module).__name__}.loss_reduction is {reduction!r}. Write 'mean', or 'sum' if train_step returns a "
            "sum over the samples of the batch."
        )
    return reduction == "sum"


def sum_steps(steps: Iterable[StepBatches]) -> Iterator[StepBatches]:
    """`steps` whose losses are sums over samples: their micro-batches are added up over all processes.

    One without items still has weight 0.
    """
    return (step._replace(weights=[float(weight > 0) for weight in step.weights]) for step in steps)


@dataclass(slots=True)
class PoissonSource:
    """A map-style data set, sampled anew in each global step.

    Counters and logs get the planned numbers, since the number of records that were drawn is private.

    Args:
        fetcher: loads records by index.
        sampling: draws them.
        data: its plan.
        accumulation: micro-batches a global step in the plan.
    """

    fetcher: Fetcher
    sampling: Sampling
    data: TrainingSet
    accumulation: int

    def iter_steps(self, epoch: int, first_step: int, steps: int) -> Iterator[StepBatches]:
        """At most `steps` steps, the first of them for global step `first_step`; fewer if sampling is over."""
        last = first_step + self.sampling.steps_allowed(steps)
        self.sampling.begin()
        draws, ahead = tee(self.sampling.draw(step) for step in range(first_step, last))
        batches = self.fetcher.batches(epoch, (part for draw in ahead for part in self._cut(draw)))
        for draw in draws:
            counts = [len(part) for part in self._cut(draw)]
            own = list(islice(batches, len(counts)))
            for batch, count in zip(own, counts, strict=True):
                self.sampling.check(batch, count)
            yield self._step_batches(own, counts, draw.total)

    def _cut(self, draw: Draw) -> tuple[Tensor, ...]:
        """Parts of nearly equal size, none larger than fits."""
        pieces = -(-len(draw.local) // self.data.max_micro_batch)
        return torch.tensor_split(draw.local, pieces) if pieces else ()

    def _step_batches(self, batches: list[Any], counts: Sequence[int], total: float) -> StepBatches:
        planned = self.data.global_batch
        shares = [count / total for count in counts] if batches else [0.0]
        return StepBatches(batches or [EMPTY], shares, float(planned), planned, self.accumulation)
