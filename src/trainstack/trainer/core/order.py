"""The order of training data, as arithmetic without I/O.

A permutation of (seed, epoch) is cut into global batches, each global batch into the shares of the processes, and each
share into micro-batches. Therefore the global batches do not depend on the number of processes or the micro-batch size.
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
_ROUND_KEY = 0x6F72646572  # "order" in ASCII: keeps the keys of rounds apart from the seeds of samples

EpochOrder = Tensor | KeyedPermutation | DataSetOrder
"""The index at each position of an epoch."""


def mix(*numbers: int) -> int:
    """Mix `numbers` into one 64-bit number; each bit depends on all of them.

    It applies the finaliser of SplitMix64 (Steele, Lea, Flood: Fast Splittable Pseudorandom Number Generators, 2014) to
    one number after the other.
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
    """Share of one process in one global batch.

    Attributes:
        micro_batches: dataset indices, one int64 tensor of shape `(samples,)` for each micro-batch; empty for a process
            without samples.
        samples: number of samples in the global batch on all processes together.
        borrowed: indices of micro-batches that this process runs with weight 0 before its own, so that all processes
            run equally many.
        uneven: whether any process has borrowed micro-batches.
    """

    micro_batches: tuple[Tensor, ...]
    samples: int
    borrowed: tuple[Tensor, ...] = ()
    uneven: bool = False

    @property
    def all_micro_batches(self) -> tuple[Tensor, ...]:
        """The borrowed micro-batches, followed by the process's own."""
        return self.borrowed + self.micro_batches


@dataclass(frozen=True, slots=True, kw_only=True)
class DataOrder:
    """Determines the samples of each process at each global step.

    Args:
        length: samples in the dataset.
        global_batch: samples a global step, over all processes.
        micro_batch: largest number of samples in a forward pass.
        world_size: number of processes.
        rank: rank of this process.
        seed: seed of the permutations; ignored without `shuffle`.
        shuffle: whether each epoch has a new permutation; otherwise the order is that of the dataset.
        drop_last: whether to omit a last global batch that is not full.
        lengths: lengths of the samples, int64 of shape `(length,)`. If given, a batch holds samples of similar lengths.
        window: number of samples that are sorted by length together; None for 50 global batches.
        version: version of the shuffle for more than `LARGEST_IN_MEMORY` samples, see `ORDER_VERSION`.
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
        """Return the order of `epoch`. Above `LARGEST_IN_MEMORY` samples without `lengths`, it takes no memory.

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
        """Return the order of the whole epoch as an int64 tensor of shape `(length,)`, shuffled as in version 0."""
        if not self.shuffle:
            return torch.arange(self.length)
        # The shift gives a seed of 63 bits, which is the same number as a signed and as an unsigned integer.
        generator = torch.Generator().manual_seed(mix(self.seed, epoch) >> 1)
        order = torch.randperm(self.length, generator=generator)
        return order if self.lengths is None else self._grouped(order, self.lengths, generator)

    def _grouped(self, order: Tensor, lengths: Tensor, generator: torch.Generator) -> Tensor:
        """Sort `order` by length within windows, and put the global batches of these into random order.

        The batch with the longest sample is the first, so that an out-of-memory error occurs at the first step. A last
        batch that is not full stays the last; its samples are a random part of all.
        """
        full = self.length - self.length % self.global_batch
        # 50 batches, as in the length-grouped sampler of transformers.
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
        """Return the first `number` indices of epoch 0; all of them, in any order, if it is negative."""
        if number < 0 and self.length > LARGEST_IN_MEMORY:
            return range(self.length)
        order = self.indices(0)
        wanted = slice(0, self.length if number < 0 else min(number, self.length))
        part = order[wanted] if isinstance(order, Tensor) else next(order.parts([wanted]))
        return part.tolist()

    @property
    def samples_per_epoch(self) -> int:
        """The number of samples in a full epoch, over all processes."""
        return self.length - self.length % self.global_batch if self.drop_last else self.length

    def local_batches(self, epoch: int, start: int = 0) -> Iterator[RankSlice]:
        """Yield this process's share of each global batch of `epoch`, starting with the sample at position `start`."""
        order = self.indices(epoch)
        batches, ahead = tee(range(start, self.samples_per_epoch, self.global_batch))
        for begin, mine in zip(batches, self._shares(order, ahead), strict=True):
            end = min(begin + self.global_batch, self.samples_per_epoch)
            low, extra = divmod(end - begin, self.world_size)
            own = torch.split(mine, self.micro_batch) if len(mine) else ()
            # The borrowed micro-batch is the first one of rank 0, which has the most samples. It is as large as a real
            # one, because layers such as batch norm depend on the size.
            passes, fewest = -(-(low + (extra > 0)) // self.micro_batch), -(-low // self.micro_batch)
            borrowed: tuple[Tensor, ...] = ()
            if passes > len(own):
                lent = slice(begin, begin + min(low + (extra > 0), self.micro_batch))
                part = order[lent] if isinstance(order, Tensor) else next(order.parts([lent]))
                borrowed = (part,) * (passes - len(own))
            yield RankSlice(micro_batches=own, samples=end - begin, borrowed=borrowed, uneven=fewest < passes)

    def _shares(self, order: EpochOrder, begins: Iterable[int]) -> Iterator[Tensor]:
        """Return the indices of this process in the global batches that start at the positions `begins`."""
        spans = (self._span(begin) for begin in begins)
        return (order[span] for span in spans) if isinstance(order, Tensor) else order.parts(spans)

    def _span(self, begin: int) -> slice:
        end = min(begin + self.global_batch, self.samples_per_epoch)
        if self.lengths is not None:  # every `world_size`-th sample, so that all ranks get similar lengths
            return slice(begin + self.rank, end, self.world_size)
        low, extra = divmod(end - begin, self.world_size)
        first = begin + self.rank * low + min(self.rank, extra)
        return slice(first, first + low + (self.rank < extra))


class OrderCursor:
    """Looks up this process's share of a global batch; successive shares use the same permutation."""

    def __init__(self, order: DataOrder) -> None:
        self._order = order
        self._place, self._next = (-1, -1), (-1, -1)
        self._share: RankSlice | None = None
        self._shares: Iterator[RankSlice] = iter(())

    def share(self, epoch: int, start: int) -> RankSlice | None:
        """Return the share of the global batch that starts at position `start`; None after the last one."""
        if (epoch, start) != self._place:
            if (epoch, start) != self._next:
                self._shares = self._order.local_batches(epoch, start)
            self._place, self._share = (epoch, start), next(self._shares, None)
            self._next = (epoch, start + (self._share.samples if self._share else 0))
        return self._share
