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
    """How many records a collated batch holds: the length of what comes first in it.

    Whether everything else in it agrees is for the gradient mode to see.
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
    """Refuse a batch in which a record is missing, or stands more than once: each would add more than is accounted for.

    Raises:
        PrivacyError: saying what to let `collate_fn` return.
    """
    columns = tensor_columns(batch)
    if columns is not None and all(len(column) == records for column in columns):
        return
    found = count_records(batch)
    if found != records:
        raise PrivacyError(
            f"collate_fn made a batch of {found} records of {records}: each record has to be one row of the batch, so "
            "that its gradient is clipped once. Do several views of a record inside of train_step, and leave none out."
        )
    try:
        rows_of(batch, records, slice(0, 1))
    except Unsupported as error:
        raise PrivacyError(str(error)) from error


def draw_ranks(records: int, size: int, key: int) -> Tensor:
    """The process of each record, drawn uniformly and independently: int16 of shape `(records,)`.

    Code may depend on the rank. By its place in the data set or in the sample, a record that is left out would move
    others to another process, and would change their gradients.

    Args:
        records: in the data set.
        size: how many processes there are.
        key: a secret of 128 bits, the same on all processes.
    """
    generator = np.random.Generator(np.random.Philox(key=key))
    return torch.from_numpy(generator.integers(size, size=records, dtype=np.int16))


class PoissonSampling(Sampling):
    """One Poisson sample over the whole data set a global step, however many processes share it.

    Args:
        records: in the data set.
        rate: the probability of each.
        world: this process's place.
        ranks: the process of each record, as `draw_ranks` gives it.
        randomness: where the sample comes from. Where processes draw alike, they cut one sample; else each draws
            among the records that are its own, which is the same law.
        steps_allowed: how many of so many next steps the budget allows, as the main process knows it.
        exhausted_reason: why it allows no more.
        discard: forgets what a step that was broken off has added up.
    """

    def __init__(
        self,
        *,
        records: int,
        rate: float,
        world: World,
        ranks: Tensor,
        randomness: Randomness,
        steps_allowed: Callable[[int], int],
        exhausted_reason: Callable[[], str],
        discard: Callable[[], None],
    ) -> None:
        self._records, self._rate, self._randomness = records, rate, randomness
        self._rank, self._comm = world.rank, world.comm
        self._ranks = ranks if world.size > 1 else None
        self.look: Callable[[Any, Tensor, Callable[[Tensor], Any]], None] = lambda batch, index, again: None
        self._steps_allowed, self._exhausted_reason, self._discard = steps_allowed, exhausted_reason, discard

    def begin(self) -> None:
        self._randomness.begin()
        self._discard()

    def draw(self, step: int) -> Draw:
        ranks = self._ranks
        if self._randomness.same_on_all_ranks or ranks is None:
            chosen = self._randomness.mask(step, self._records, self._rate)
            mine = chosen if ranks is None else chosen[ranks[chosen] == self._rank]
            return Draw(local=mine, total=float(len(chosen)))
        own = (ranks == self._rank).nonzero().flatten()
        mine = own[self._randomness.mask(step, len(own), self._rate)]
        return Draw(local=mine, total=self._records * self._rate)

    def check(self, batch: Any, index: Tensor, again: Callable[[Tensor], Any] | None) -> None:
        check_records(batch, len(index))
        if again is not None:
            self.look(batch, index, again)

    def steps_allowed(self, steps: int) -> int:
        return int(self._comm.broadcast_object(self._steps_allowed(steps), "reserving private steps"))

    def exhausted_reason(self) -> str:
        return self._exhausted_reason()
