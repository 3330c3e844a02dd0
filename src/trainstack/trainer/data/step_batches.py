"""The micro-batches of each global step."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, islice, repeat, tee
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, SequentialSampler

from trainstack.backends import Borrowed, Communicator
from trainstack.backends.single_process import after_copies
from trainstack.backends.workload import Draw, Sampling, TrainingSet
from trainstack.errors import ConfigurationError
from trainstack.trainer.core.order import DataOrder
from trainstack.trainer.core.samples import checked_weight
from trainstack.trainer.data.library_orders import CombinedOrder, LengthGroupedSampler
from trainstack.trainer.data.loading import Fetcher
from trainstack.trainer.data.torch_classes import ORDERS, is_usual, replaced_method


@dataclass(slots=True)
class StepBatches:
    """The micro-batches of one global step on this process.

    A micro-batch is fetched when the loop asks for it, never ahead, because a loader may reuse the memory of a batch
    for the next one. If `batch_weight` counts items, their total is therefore known only after the last micro-batch.
    The weights are then shares of an estimate, and the gradients are multiplied by `scale` afterwards.

    Attributes:
        micro_batches: yields each micro-batch once, with its weight, and whether it is the last of the step on this
            process. A short step of a loader without length may end before the last. The loop exhausts the iterator.
        weights: the share of each micro-batch in the step. Over all processes they sum to 1, or to 0 if there are no
            items. Like `items` and `scale`, it is valid once `micro_batches` is exhausted.
        items: the number of items (samples, tokens, ...) in the mean of the step's loss, over all processes.
        samples: the number of samples over all processes; 0 if unknown.
        counted: the number of micro-batches to add to the counters; None for the actual number.
        uneven: whether a rank may run a micro-batch of weight 0; the same on all ranks.
        scale: the factor that turns the accumulated gradients into those of the mean loss.
        indices: the indices of the samples, one int64 tensor for each micro-batch; None if unknown.
        rescale: a factor for the accumulated gradients before the next micro-batch. It is set when the estimate grows,
            so that no weight exceeds 1. Larger weights could overflow in half precision.
    """

    micro_batches: Iterator[MicroBatch]
    weights: Sequence[float] = ()
    items: float = 0.0
    samples: int = 0
    counted: int | None = None
    uneven: bool = False
    scale: float = 1.0
    rescale: float = 1.0
    indices: Sequence[Tensor] | None = None

    def settle(self, counts: Sequence[float], estimate: float, total: float) -> None:
        """Set the weights after the last micro-batch, from its `counts` of items and the `total` of all processes."""
        self.items = total
        self.weights = [count / total if total else 0.0 for count in counts]
        self.scale = estimate / total if total else 1.0


MicroBatch = tuple[Any, float, bool]
"""A collated batch, its weight, and whether it is the last of its global step on this process."""

WeightFn = Callable[[Any], float]


def unsupported_order_reason(loader: Any) -> str | None:
    """The reason why the library cannot make the order of the data of `loader`; None if it can."""
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
    if not any(is_usual(sampler, kind) for kind in ORDERS):
        return f"its sampler is a {type(sampler).__name__} with a custom order"
    dataset: Any = loader.dataset
    if len(sampler) != len(dataset) or getattr(sampler, "replacement", False):
        return "its sampler does not draw every sample once"
    return None


def describe_order(loader: Any) -> str:
    """A description of the order of the samples of `loader` in training."""
    if unsupported_order_reason(loader) is not None:
        return "in the loader's own order"
    if isinstance(loader.sampler, LengthGroupedSampler | CombinedOrder):
        return loader.sampler.describe()
    return "in data set order" if isinstance(loader.sampler, SequentialSampler) else "shuffled"


def order_of(loader: Any, *, global_batch: int, **options: Any) -> DataOrder:
    """The library's order of the samples of `loader`. `options` are arguments of `DataOrder`."""
    sampler = loader.sampler
    grouped = isinstance(sampler, LengthGroupedSampler)
    return DataOrder(
        length=len(loader.dataset),
        global_batch=global_batch,
        shuffle=not isinstance(sampler, SequentialSampler | CombinedOrder),
        lengths=sampler.lengths if grouped else None,
        window=sampler.window if grouped else None,
        **options,
    )


@dataclass(slots=True)
class OrderedSource:
    """A map-style data set in the library's order: every sample once, for any number of processes.

    Args:
        fetcher: loads samples by index.
        order: the order of the samples.
        weight_fn: the user's `batch_weight`; None if a batch counts as its samples.
        comm: sums the results of `weight_fn` over the processes.
    """

    fetcher: Fetcher
    order: DataOrder
    weight_fn: WeightFn | None = None
    comm: Communicator = field(default_factory=Communicator)

    def iter_steps(self, epoch: int, samples_done: int, batches_done: int) -> Iterator[StepBatches]:
        """The steps of `epoch` that follow the first `samples_done` samples."""
        shares, ahead = tee(self.order.local_batches(epoch, samples_done))
        batches = self.fetcher.batches(epoch, (index for share in ahead for index in share.all_micro_batches))
        weights: dict[tuple[int, int, int], list[float]] = {}
        for share in shares:
            number, borrowed = len(share.micro_batches), len(share.borrowed)
            own = _lend(islice(batches, borrowed + number), borrowed)
            if self.weight_fn is not None:
                step = _weigh_step(own, borrowed + number, self.weight_fn, share.samples, self.comm)
                step.indices = share.micro_batches
                yield step
                continue
            layout = number, len(share.micro_batches[-1]) if number else 0, share.samples  # only the last is not full
            if layout not in weights:  # most steps have the same layout
                weights[layout] = [len(index) / share.samples for index in share.micro_batches]
            step = _known_step(own, weights[layout], share.samples, borrowed)
            step.uneven, step.indices = share.uneven, share.micro_batches
            yield step


@dataclass(slots=True)
class CustomOrderSource:
    """Any iterable of batches, in its order.

    Every process reads all batches, and trains on every `world_size`-th.
    """

    batches: Iterable[Any]
    accumulation: int
    weight_fn: WeightFn
    rank: int = 0
    world_size: int = 1

    def iter_steps(self, epoch: int, samples_done: int, batches_done: int) -> Iterator[StepBatches]:
        """The steps after the first `batches_done` batches, which are read at once and skipped."""
        stream = after_copies(iter(self.batches))
        for _ in islice(stream, batches_done * self.world_size):
            pass
        return self._steps(stream)

    def _steps(self, stream: Iterator[Any]) -> Iterator[StepBatches]:
        single = self.accumulation == self.world_size == 1
        for first in stream:
            if single:
                count = checked_weight(self.weight_fn(first))
                weight = float(count > 0)
                yield StepBatches(iter([(first, weight, True)]), (weight,), count)
            else:
                step = StepBatches(iter(()), uneven=self.world_size > 1)
                step.micro_batches = self._micro_batches(step, first, stream)
                yield step
            del first  # frees its memory for the next batch

    def _micro_batches(self, step: StepBatches, first: Any, stream: Iterator[Any]) -> Iterator[MicroBatch]:
        number = self.accumulation * self.world_size
        last_round = number - self.world_size
        counts: list[float] = []
        estimate = 0.0
        for position, batch in enumerate(chain([first], islice(stream, number - 1))):
            counts.append(checked_weight(self.weight_fn(batch)))
            # Every process reads these batches, so all have the same estimate. It must not change in the last round,
            # because the processes sum their gradients in it.
            if counts[-1] > estimate and (not estimate or self.world_size == 1 or position < last_round):
                step.rescale *= estimate / (counts[-1] * number) if estimate else 1.0
                estimate = counts[-1] * number
            if position % self.world_size == self.rank:
                weight = counts[-1] / estimate if counts[-1] else 0.0
                yield batch, weight, position // self.world_size == self.accumulation - 1
        own = counts[self.rank :: self.world_size]
        if self.world_size > 1:  # an early end of the stream needs one more pass, in which gradients are summed
            rounds = -(-len(counts) // self.world_size)
            step.counted = rounds
            passes = rounds if rounds == self.accumulation else rounds + 1
            yield from ((Borrowed(batch), 0.0, at == passes - 1) for at in range(len(own), passes))
        step.settle(own, estimate or 1.0, math.fsum(counts))


_LAST = (True,)


def _lend(batches: Iterator[Any], number: int) -> Iterator[Any]:
    """`batches`, with the first `number` marked as borrowed."""
    return chain(map(Borrowed, islice(batches, number)), batches) if number else batches


def _known_step(batches: Iterator[Any], weights: Sequence[float], samples: int, borrowed: int = 0) -> StepBatches:
    """A step whose batches count as their samples, with `samples` on all ranks. The first `borrowed` are borrowed."""
    if len(weights) == 1 and not borrowed:
        return StepBatches(zip(batches, weights, _LAST, strict=True), weights, samples, samples)
    passes = borrowed + len(weights)
    lasts = chain(repeat(False, passes - 1), _LAST)
    shares = chain(repeat(0.0, borrowed), weights)
    return StepBatches(zip(batches, shares, lasts, strict=True), weights, samples, samples, passes)


def _weigh_step(
    batches: Iterator[Any], passes: int, weight_fn: WeightFn, samples: int, comm: Communicator
) -> StepBatches:
    """A step of `passes` batches on each rank, whose items `weight_fn` counts. Borrowed batches have no items."""
    step = StepBatches(iter(()), samples=samples, counted=passes, uneven=comm.size > 1)

    def micro_batches() -> Iterator[MicroBatch]:
        # The estimate must be the same on all ranks, because their gradients are summed. With one pass it is the total.
        counts, estimate, total = list[float](), 0.0, 0.0
        for position, batch in enumerate(batches):
            count = 0.0 if type(batch) is Borrowed else checked_weight(weight_fn(batch))
            if not position:
                total = comm.sum([count], "the first batch_weight of a step")[0]
                estimate = total * passes or (float(samples) if comm.size > 1 else 0.0)
            if comm.size == 1 and count > estimate:
                step.rescale = estimate / (count * passes) if estimate else 1.0
                estimate = count * passes
            if type(batch) is not Borrowed:
                counts.append(count)
            yield batch, count / (estimate or 1.0), position == passes - 1
        if passes > 1:
            total = comm.sum([math.fsum(counts)], "the batch_weight of a step")[0]
        step.settle(counts, estimate or 1.0, total)

    step.micro_batches = micro_batches()
    return step


def custom_batch_weight(module: Any) -> WeightFn | None:
    """The module's `batch_weight` if it overrides the method; None if a batch counts as its samples."""
    weigh = getattr(module, "batch_weight", None)
    counts = getattr(weigh, "counts_samples", False)
    return None if (counts(module) if callable(counts) else counts) else weigh


def sums_losses(module: Any) -> bool:
    """Whether the losses of `module` are sums over samples, by its `loss_reduction`.

    Raises:
        ConfigurationError: `loss_reduction` has an unknown value.
    """
    reduction = getattr(module, "loss_reduction", None)
    if reduction not in (None, "mean", "sum"):
        raise ConfigurationError(
            f"{type(module).__name__}.loss_reduction is {reduction!r}. Write 'mean', or 'sum' if train_step returns a "
            "sum over the samples of the batch."
        )
    return reduction == "sum"


def sum_steps(steps: Iterable[StepBatches]) -> Iterator[StepBatches]:
    """Give all micro-batches of `steps` weight 1, for losses that are sums over samples. Without items it is 0."""
    for step in steps:
        step.micro_batches = _summed(step, step.micro_batches)
        yield step


def _summed(step: StepBatches, micro_batches: Iterator[MicroBatch]) -> Iterator[MicroBatch]:
    for batch, weight, last in micro_batches:
        step.rescale = 1.0  # a sum needs no estimate
        yield batch, float(weight > 0), last
    step.weights, step.scale = [float(weight > 0) for weight in step.weights], 1.0


@dataclass(slots=True)
class PoissonSource:
    """A map-style data set that is sampled at random for each global step.

    Counters and logs get the planned numbers, because the number of sampled records is private.

    Args:
        fetcher: loads records by index.
        sampling: draws the records.
        data: the batch sizes of the plan.
        accumulation: the planned number of micro-batches in a global step.
        comm: exchanges the numbers of micro-batches. A rank with fewer borrows the first record.
    """

    fetcher: Fetcher
    sampling: Sampling
    data: TrainingSet
    accumulation: int
    comm: Communicator

    def iter_steps(self, epoch: int, first_step: int, steps: int) -> Iterator[StepBatches]:
        """At most `steps` steps, from global step `first_step` on; fewer if the privacy budget allows fewer."""
        last = first_step + self.sampling.steps_allowed(steps)
        self.sampling.begin()
        draws, ahead = tee(self.sampling.draw(step) for step in range(first_step, last))
        batches = self.fetcher.batches(epoch, (part for draw in ahead for part in self._cut(draw)))
        planned = self.data.global_batch
        for draw in draws:
            parts = self._cut(draw)
            weights = [len(part) / draw.total for part in parts]
            own = self._micro_batches(islice(batches, len(parts)), epoch, parts, weights)
            yield StepBatches(own, weights, float(planned), planned, self.accumulation)

    def _micro_batches(
        self, batches: Iterator[Any], epoch: int, parts: Sequence[Tensor], weights: Sequence[float]
    ) -> Iterator[MicroBatch]:
        passes = max(1, *self.comm.gather(len(parts), "the micro-batches of a step"))
        for _ in range(passes - len(parts)):
            yield Borrowed(self.fetcher.load(epoch, torch.zeros(1, dtype=torch.long))), 0.0, False
        again = partial(self.fetcher.load, epoch) if self.fetcher.may_mix_records() else None
        for position, (batch, index) in enumerate(zip(batches, parts, strict=True)):
            self.sampling.check(batch, index, again)
            yield batch, weights[position], position == len(parts) - 1

    def _cut(self, draw: Draw) -> tuple[Tensor, ...]:
        """Split a draw into parts of nearly equal size, at most `max_micro_batch`."""
        pieces = -(-len(draw.local) // self.data.max_micro_batch)
        return torch.tensor_split(draw.local, pieces) if pieces else ()
