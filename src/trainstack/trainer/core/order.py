"""The order of training data as pure arithmetic.

A permutation of (seed, epoch) is cut into global batches, each global batch into the processes' shares, and each
share into micro-batches. So every process count and every micro-batch size sees the same global batches.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import tee

import torch
from torch import Tensor

from trainstack.trainer.core.shuffling import (
    LARGEST_IN_MEMORY,
    ORDER_VERSION,
    ROUNDS,
    DataSetOrder,
    KeyedPermutation,
    check_order_version,
)

_MASK = (1 << 64) - 1
_ROUND_KEY = 0x6F72646572  # "order": a key of a round is no seed of a sample

EpochOrder = Tensor | KeyedPermutation | DataSetOrder
"""The index at each position of an epoch."""


def mix(*numbers: int) -> int:
    """One 64-bit number out of several, each bit depending on all of them.

    The finaliser of SplitMix64 (Steele, Lea, Flood: Fast Splittable Pseudorandom Number Generators, 2014),
    applied to one number after the other.
    """
    state = 0x9E3779B97F4A7C15
    for number in numbers:
        state = (state ^ (number & _MASK)) + 0x9E3779B97F4A7C15 & _MASK
        state = (state ^ state >> 30) * 0xBF58476D1CE4E5B9 & _MASK
        state = (state ^ state >> 27) * 0x94D049BB133111EB & _MASK
        state ^= state >> 31
    return state


@dataclass(frozen=True, slots=True, kw_only=True)
class RankSlice:
    """One process's part of one global batch.

    Attributes:
        micro_batches: data set indices, one int64 tensor a micro-batch; empty for a process without samples.
        samples: how many samples the global batch holds on all processes together.
        borrowed: indices of micro-batches that this process runs with weight 0, before its own: all run as many.
        uneven: whether any process has such micro-batches.
    """

    micro_batches: tuple[Tensor, ...]
    samples: int
    borrowed: tuple[Tensor, ...] = ()
    uneven: bool = False

    @property
    def all_micro_batches(self) -> tuple[Tensor, ...]:
        """Those that are borrowed, and its own."""
        return self.borrowed + self.micro_batches


@dataclass(frozen=True, slots=True, kw_only=True)
class DataOrder:
    """Which samples each process trains on, at which global step.

    Args:
        length: samples in the data set.
        global_batch: samples a global step, over all processes.
        micro_batch: samples a forward pass, at most.
        world_size: number of processes.
        rank: which of them this is.
        seed: of the permutations; ignored without `shuffle`.
        shuffle: a new permutation each epoch; otherwise data set order.
        drop_last: leave out a last global batch that is not full.
        lengths: of the samples, int64 of shape `(length,)`: batches then hold samples of like lengths.
        window: samples that are sorted by length together; None for those of 50 global batches.
        version: how more than `LARGEST_IN_MEMORY` samples are shuffled, see `ORDER_VERSION`.
    """

    length: int
    global_batch: int
    micro_batch: int
    world_size: int = 1
    rank: int = 0
    seed: int = 0
    shuffle: bool = True
    drop_last: bool = False
    lengths: Tensor | None = None
    window: int | None = None
    version: int = ORDER_VERSION

    def indices(self, epoch: int) -> EpochOrder:
        """The order of `epoch`. Above `LARGEST_IN_MEMORY` samples it takes no memory, unless `lengths` do.

        Raises:
            CheckpointMismatchError: the version is unknown.
        """
        if self.length <= LARGEST_IN_MEMORY or self.lengths is not None:
            return self.permutation(epoch)
        if not self.shuffle:
            return DataSetOrder(self.length)
        if check_order_version(self.version) == 0:
            return self.permutation(epoch)
        return KeyedPermutation(self.length, [mix(self.seed, epoch, _ROUND_KEY, number) for number in range(ROUNDS)])

    def permutation(self, epoch: int) -> Tensor:
        """The order of the whole epoch in memory: an int64 tensor of shape `(length,)`. It is that of version 0."""
        if not self.shuffle:
            return torch.arange(self.length)
        # Shifted by one: a seed of 63 bits is the same number whether it is read with a sign or without.
        generator = torch.Generator().manual_seed(mix(self.seed, epoch) >> 1)
        order = torch.randperm(self.length, generator=generator)
        return order if self.lengths is None else self._grouped(order, self.lengths, generator)

    def _grouped(self, order: Tensor, lengths: Tensor, generator: torch.Generator) -> Tensor:
        """`order` sorted by length within windows, whose global batches come in random order.

        The batch with the longest sample comes first, so that a lack of memory shows at once. A last batch that is not
        full stays the last; its samples are drawn from all.
        """
        full = self.length - self.length % self.global_batch
        window = max(1, (self.window or 50 * self.global_batch) // self.global_batch) * self.global_batch
        parts = [
            part[torch.argsort(lengths[part], descending=True, stable=True)]
            for part in (*torch.split(order[:full], window), order[full:])
        ]
        batches = torch.cat(parts)[:full].view(-1, self.global_batch)
        if len(batches):
            batches = batches[torch.randperm(len(batches), generator=generator)]
            longest = int(lengths[batches[:, 0]].argmax())
            batches[[0, longest]] = batches[[longest, 0]]
        return torch.cat([batches.flatten(), parts[-1]])

    def first(self, number: int) -> Sequence[int]:
        """The first `number` indices of epoch 0; all of them, in any order, if it is negative."""
        if number < 0 and self.length > LARGEST_IN_MEMORY:
            return range(self.length)
        order = self.indices(0)
        wanted = slice(0, self.length if number < 0 else min(number, self.length))
        part = order[wanted] if isinstance(order, Tensor) else next(order.parts([wanted]))
        return part.tolist()

    @property
    def samples_per_epoch(self) -> int:
        """Samples of a full epoch, over all processes."""
        return self.length - self.length % self.global_batch if self.drop_last else self.length

    def local_batches(self, epoch: int, start: int = 0) -> Iterator[RankSlice]:
        """This process's share of each global batch of `epoch`, from the sample at position `start` on."""
        order = self.indices(epoch)
        batches, ahead = tee(range(start, self.samples_per_epoch, self.global_batch))
        for begin, mine in zip(batches, self._shares(order, ahead), strict=True):
            end = min(begin + self.global_batch, self.samples_per_epoch)
            low, extra = divmod(end - begin, self.world_size)
            own = torch.split(mine, self.micro_batch) if len(mine) else ()
            # Rank 0 has the most samples. Its first micro-batch is lent: it is as large as a real one, on which layers
            # such as batch norm depend.
            passes, fewest = -(-(low + (extra > 0)) // self.micro_batch), -(-low // self.micro_batch)
            borrowed: tuple[Tensor, ...] = ()
            if passes > len(own):
                lent = slice(begin, begin + min(low + (extra > 0), self.micro_batch))
                part = order[lent] if isinstance(order, Tensor) else next(order.parts([lent]))
                borrowed = (part,) * (passes - len(own))
            yield RankSlice(micro_batches=own, samples=end - begin, borrowed=borrowed, uneven=fewest < passes)

    def _shares(self, order: EpochOrder, begins: Iterable[int]) -> Iterator[Tensor]:
        """The indices of this process in the global batches that begin at `begins`."""
        spans = (self._span(begin) for begin in begins)
        return (order[span] for span in spans) if isinstance(order, Tensor) else order.parts(spans)

    def _span(self, begin: int) -> slice:
        end = min(begin + self.global_batch, self.samples_per_epoch)
        if self.lengths is not None:  # in turn, so that the ranks get like lengths and take as long as each other
            return slice(begin + self.rank, end, self.world_size)
        low, extra = divmod(end - begin, self.world_size)
        first = begin + self.rank * low + min(self.rank, extra)
        return slice(first, first + low + (self.rank < extra))


class OrderCursor:
    """Looks up this process's share of a global batch; of successive ones without a new permutation each time."""

    def __init__(self, order: DataOrder) -> None:
        self._order = order
        self._place, self._next = (-1, -1), (-1, -1)
        self._share: RankSlice | None = None
        self._shares: Iterator[RankSlice] = iter(())

    def share(self, epoch: int, start: int) -> RankSlice | None:
        """The share of the global batch that begins at the sample at position `start`; None behind the last."""
        if (epoch, start) != self._place:
            if (epoch, start) != self._next:
                self._shares = self._order.local_batches(epoch, start)
            self._place, self._share = (epoch, start), next(self._shares, None)
            self._next = (epoch, start + (self._share.samples if self._share else 0))
        return self._share
