"""Poisson sampling of the records of each step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trainstack.backends.dp.modes.base import Unsupported, rows_of, tensor_columns
from trainstack.backends.dp.randomness import Randomness
from trainstack.backends.dp.torch_names import pytree
from trainstack.backends.processes.world import World
from trainstack.backends.workload import Draw, Sampling
from trainstack.errors import PrivacyError


def count_records(batch: Any) -> int:
    """The number of records in a collated batch: the length of its first item.

    The gradient mode checks the other items.
    """

    columns = tensor_columns(batch)
    if columns is not None:
        return len(columns[0])

    def is_column(value: Any) -> bool:
        return isinstance(value, list) and not any(hasattr(leaf, "shape") for leaf in pytree.tree_leaves(value))

    for leaf in pytree.tree_leaves(batch, is_leaf=is_column):
        shape = getattr(leaf, "shape", None)
        if shape:
            return int(shape[0])
        if isinstance(leaf, list):
            return len(leaf)
    raise PrivacyError(
        f"cannot tell how many records a batch of type {type(batch).__name__} holds. Let collate_fn return tensors "
        "with the records along dimension 0."
    )


def check_records(batch: Any, records: int) -> None:
    """Refuse a batch in which a record is missing or repeated: a record could then add more than is accounted for.

    Raises:
        PrivacyError: with the value that `collate_fn` should return.
    """
    columns = tensor_columns(batch)
    if columns is not None and all(len(column) == records for column in columns):
        return
    found = count_records(batch)
    if found != records:
        raise PrivacyError(
            f"collate_fn made a batch of {found} records of {records}: each record has to be one row of the batch, so "
            "that its gradient is clipped once. Make several views of a record inside train_step, and drop no record."
        )
    try:
        rows_of(batch, records, slice(0, 1))
    except Unsupported as error:
        raise PrivacyError(str(error)) from error


def ranks_of(records: Tensor, size: int, key: int) -> Tensor:
    """The process of each of `records` (indices, int64), as if drawn uniformly and independently: int64.

    Code may depend on the rank. By its place in the data set or in the sample, a record that is left out would move
    others to another process, and would change their gradients. A hash of key and index needs no memory for the records
    that were not drawn. It need not be secret: the guarantee holds for every fixed assignment.

    Args:
        size: the number of processes.
        key: 128 bits, the same on all processes.
    """
    mixed: Any = records.numpy().astype(np.uint64)
    for word in (key & _WORD, key >> 64 & _WORD):  # the finaliser of SplitMix64, once for each half of the key
        mixed = mixed + np.uint64(word)
        mixed = (mixed ^ mixed >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
        mixed = (mixed ^ mixed >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
        mixed ^= mixed >> np.uint64(31)
    return torch.from_numpy(((mixed >> np.uint64(32)) * np.uint64(size) >> np.uint64(32)).view(np.int64))


_WORD = (1 << 64) - 1


class PoissonSampling(Sampling):
    """One Poisson sample over the whole data set a global step, however many processes share it.

    Args:
        records: in the data set.
        rate: the probability of each.
        world: this process's place.
        rank_key: of `ranks_of`, which tells the process of each record.
        randomness: draws the sample. If processes draw alike, they cut one sample. Otherwise each draws a sample of all
            records and keeps its own ones: each record has one process, so the distribution is the same.
        steps_allowed: returns the number of the given next steps that the budget of the main process allows.
        exhausted_reason: returns the reason why it allows no more.
        discard: discards the sums of an interrupted step.
    """

    def __init__(
        self,
        *,
        records: int,
        rate: float,
        world: World,
        rank_key: int,
        randomness: Randomness,
        steps_allowed: Callable[[int], int],
        exhausted_reason: Callable[[], str],
        discard: Callable[[], None],
    ) -> None:
        self._records, self._rate, self._randomness = records, rate, randomness
        self._world, self._comm, self._rank_key = world, world.comm, rank_key
        self.look: Callable[[Any, Tensor, Callable[[Tensor], Any]], None] = lambda batch, index, again: None
        self._steps_allowed, self._exhausted_reason, self._discard = steps_allowed, exhausted_reason, discard

    def begin(self) -> None:
        self._randomness.begin()
        self._discard()

    def draw(self, step: int) -> Draw:
        chosen, world = self._randomness.mask(step, self._records, self._rate), self._world
        if world.size == 1:
            return Draw(local=chosen, total=float(len(chosen)))
        mine = chosen[ranks_of(chosen, world.size, self._rank_key) == world.rank]
        alike = self._randomness.same_on_all_ranks
        return Draw(local=mine, total=float(len(chosen)) if alike else self._records * self._rate)

    def check(self, batch: Any, index: Tensor, again: Callable[[Tensor], Any] | None) -> None:
        check_records(batch, len(index))
        if again is not None:
            self.look(batch, index, again)

    def steps_allowed(self, steps: int) -> int:
        return int(self._comm.broadcast_object(self._steps_allowed(steps), "reserving private steps"))

    def exhausted_reason(self) -> str:
        return self._exhausted_reason()
