"""Global steps whose records a layer of the stack draws, instead of taking them from a permutation."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice, tee
from typing import Any

import torch
from torch import Tensor

from trainstack.backends import EMPTY
from trainstack.backends.sampling import Draw, Sampling, TrainingSet
from trainstack.trainer.fetching import Fetcher
from trainstack.trainer.sources import Window


@dataclass(slots=True)
class SampledSource:
    """A map-style data set, sampled anew in each global step.

    What counters and logs are told is what was planned: how many records were really drawn is not for them to know.

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

    def windows(self, epoch: int, first_step: int, steps: int) -> Iterator[Window]:
        """At most `steps` windows, the first of them for global step `first_step`; fewer if sampling is over."""
        last = first_step + self.sampling.steps_allowed(steps)
        self.sampling.begin()
        draws, ahead = tee(self.sampling.draw(step) for step in range(first_step, last))
        batches = self.fetcher.batches(epoch, (part for draw in ahead for part in self._cut(draw)))
        for draw in draws:
            counts = [len(part) for part in self._cut(draw)]
            own = list(islice(batches, len(counts)))
            for batch, count in zip(own, counts, strict=True):
                self.sampling.check(batch, count)
            yield self._window(own, counts, draw.total)

    def _cut(self, draw: Draw) -> tuple[Tensor, ...]:
        """Parts of nearly equal size, none larger than fits."""
        pieces = -(-len(draw.mine) // self.data.most_at_once)
        return torch.tensor_split(draw.mine, pieces) if pieces else ()

    def _window(self, batches: list[Any], counts: Sequence[int], total: float) -> Window:
        planned = self.data.global_batch
        shares = [count / total for count in counts] if batches else [0.0]
        return Window(batches or [EMPTY], shares, float(planned), planned, self.accumulation)
