"""`CollationCheck` compares a record of each batch with the result of `collate_fn` for that record alone."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from trainstack.backends.dp.modes.base import flatten_outputs, rows_of
from trainstack.backends.dp.sealed.plain_state import same_value
from trainstack.backends.dp.sealed.sample_replay import NOT_REPEATABLE

_FIRST, _SHARE = 16, 0.02
"""So many paddings are always tried out, and later ones as long as all trials take less than this share of the time
since the first."""

_COUPLES = (
    "collate_fn gives a record another sample together with other records than alone, and another gradient with it: "
    "one record then changes the gradients of others. Let a row depend on its own record alone, and let train_step "
    "mask padding."
)


class CollationCheck:
    """Checks one random record of each micro-batch.

    If the row equals that of the record alone, the check is complete. Otherwise, as with padding, it compares the
    gradients of both before the step is released. It compares a row that only extends the sample of the record, by
    padding, within 2 % of the time.

    Args:
        refuse: is given the reason for which the run is not private.
        note: is given a line on samples that the guarantee does not cover.
    """

    def __init__(self, *, refuse: Callable[[str], None], note: Callable[[str], None]) -> None:
        self._refuse, self._note = refuse, note
        self._repeats = True
        self._pairs: list[tuple[Any, Any]] = []
        self._paddings, self._spent, self._since = 0, 0.0, time.perf_counter()

    @property
    def is_waiting(self) -> bool:
        """Whether gradients are to be compared."""
        return bool(self._pairs)

    def look(self, batch: Any, index: Tensor, again: Callable[[Tensor], Any]) -> None:
        """A micro-batch was made of the records at `index`; `again` makes a batch of other indices in the same way."""
        if not self._repeats:
            return
        number = secrets.randbelow(len(index))
        one = index[number : number + 1]
        alone = again(one)
        leaves = flatten_outputs(alone)[0]
        for row in (number, *range(number), *range(number + 1, len(index))):  # `collate_fn` may sort
            found = rows_of(batch, len(index), slice(row, row + 1))
            fit = _fit(flatten_outputs(found)[0], leaves)
            if fit is not None:
                if fit == "padded" and self._has_time():
                    self._pairs.append((alone, found))
                return
        if _fit(flatten_outputs(again(one))[0], leaves) != "same":
            self._repeats = False
            self._note(NOT_REPEATABLE)
            return
        self._pairs.append((alone, rows_of(batch, len(index), slice(number, number + 1))))

    def compare(self, gradients: Callable[[Any], list[Tensor]]) -> None:
        """Compare the waiting rows; `gradients` returns those of a batch of one record.

        Raises:
            PrivacyError: a record has other gradients in its batch than alone.
        """
        pairs, self._pairs = self._pairs, []
        now = time.perf_counter()
        for alone, row in pairs:
            one, other = (torch.cat([part.flatten().float() for part in gradients(batch)]) for batch in (alone, row))
            if not bool((one - other).norm() <= 1e-3 * one.norm() + 1e-12):
                self._refuse(_COUPLES)
        self._spent += time.perf_counter() - now

    def _has_time(self) -> bool:
        self._paddings += 1
        return self._paddings <= _FIRST or self._spent < _SHARE * (time.perf_counter() - self._since)


def _fit(row: list[Any], alone: list[Any]) -> str | None:
    """Returns "same" for equal leaves, and "padded" if those of `row` begin or end with those of `alone`."""
    if len(row) != len(alone):
        return None
    fit = "same"
    for mine, its in zip(row, alone, strict=True):
        if same_value(mine, its):
            continue
        if not isinstance(mine, Tensor) or not isinstance(its, Tensor) or mine.dim() != its.dim():
            return None
        if any(long < short for long, short in zip(mine.shape, its.shape, strict=True)) or mine.shape == its.shape:
            return None
        first = mine[tuple(slice(0, size) for size in its.shape)]
        last = mine[tuple(slice(long - size, long) for long, size in zip(mine.shape, its.shape, strict=True))]
        if not (same_value(first, its) or same_value(last, its)):
            return None
        fit = "padded"
    return fit
