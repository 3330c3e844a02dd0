"""`PreshardedSource` makes steps of batches that are different on each rank."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

from trainstack.backends import Borrowed, Communicator
from trainstack.backends.single_process import after_copies
from trainstack.trainer.core.samples import checked_weight
from trainstack.trainer.data.step_batches import MicroBatch, StepBatches, WeightFn


@dataclass(slots=True)
class PreshardedSource:
    """Batches that the loader of each rank has already split, in the order of the loader.

    A step consists of the next batches of all ranks. A rank whose batches have ended takes part with borrowed
    micro-batches of weight 0, until the batches of all ranks have ended. It borrows its previous batch, or that of
    another rank if it never had one.

    Args:
        batches: the batches of this rank.
        accumulation: the largest number of micro-batches in a global step.
        weight_fn: counts the items of a batch.
        comm: the communicator. A step needs one exchange, or two with accumulation.
    """

    batches: Iterable[Any]
    accumulation: int
    weight_fn: WeightFn
    comm: Communicator

    def iter_steps(self, batches_done: int = 0) -> Iterator[StepBatches]:
        """The steps of one pass, the same number on every rank.

        The first `batches_done` batches of this rank are read at once and skipped. A rank may have fewer.
        """
        stream, previous = after_copies(iter(self.batches)), list[Any]()
        for batch in islice(stream, batches_done):
            previous = [batch]
        return self._steps(stream, previous)

    def _steps(self, stream: Iterator[Any], previous: list[Any]) -> Iterator[StepBatches]:
        several = self.comm.size > 1
        while True:
            current = list(islice(stream, 1))
            count = checked_weight(self.weight_fn(current[0])) if current else 0.0
            lacks = not (current or previous)
            items, reading, lacking = self.comm.sum([count, float(bool(current)), float(lacks)], "the next step")
            if not reading:
                return
            if several:
                previous = list(current) or previous
            if lacking and several:
                batches = self.comm.gather(previous[0] if previous else None, "a batch to borrow")
                previous = previous or [next(batch for batch in batches if batch is not None)]
            step = StepBatches(iter(()), counted=self.accumulation if several else None, uneven=several)
            step.micro_batches = self._micro_batches(step, current, stream, count, items, previous)
            yield step

    def _micro_batches(
        self,
        step: StepBatches,
        current: list[Any],
        stream: Iterator[Any],
        count: float,
        items: float,
        previous: list[Any],
    ) -> Iterator[MicroBatch]:
        # The estimate must be the same on all ranks, because their gradients are summed. With one micro-batch on each
        # rank it is the total.
        counts, several, last = list[float](), self.comm.size > 1, self.accumulation - 1
        estimate = items * self.accumulation
        while current:
            counts.append(count)
            if not several and count > estimate:
                step.rescale = estimate / (count * self.accumulation) if estimate else 1.0
                estimate = count * self.accumulation
            yield current.pop(), count / (estimate or 1.0), len(counts) == self.accumulation
            if len(counts) < self.accumulation:
                current.extend(islice(stream, 1))
                count = checked_weight(self.weight_fn(current[0])) if current else 0.0
                previous[:] = current if several and current else previous
        for position in range(len(counts), self.accumulation if several else 0):
            yield Borrowed(previous[0]), 0.0, position == last
        total = items if self.accumulation == 1 else self.comm.sum([math.fsum(counts)], "the batch_weight of a step")[0]
        step.settle(counts, estimate or 1.0, total)
