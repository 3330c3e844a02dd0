"""`SampleReplay` fetches the same records again and compares, for data sets that keep something of other records."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from trainstack.backends.dp.modes.base import flatten_outputs
from trainstack.backends.dp.sealed.plain_state import copy_value, same_value
from trainstack.backends.workload import TrainingSet

_RECORDS = 2
_FIRST, _SHARE = 16, 0.002
"""The number of first steps of a process that are always checked, and the largest share of the time that the checks of
later steps take."""

NOT_REPEATABLE = "records that the data set keeps for other samples: samples are not the same when fetched again"
OTHER_SAMPLES = "changes of the data set between epochs: a record has other samples than in the epoch before"
_LEARNS = (
    "the data set or collate_fn gives another sample for the same record than before: it keeps something of the "
    "records between, which carries them into the gradients of others. Let a sample depend on one record alone, "
    "and draw random numbers from the global generators."
)


class SampleReplay:
    """Compares samples of a few records with those at the beginning of an epoch.

    A data set may change between epochs, for example by `set_epoch`. Within an epoch it may not. The copies of a data
    set in the workers of a loader are not seen.

    Args:
        data: with a `fetch` that seeds the global generators alike each time.
        refuse: is given the reason for which the run is not private.
        note: is given a line on samples that the guarantee does not cover.
    """

    def __init__(self, data: TrainingSet, *, refuse: Callable[[str], None], note: Callable[[str], None]) -> None:
        assert data.length is not None  # checked at the start
        self._data, self._refuse, self._note = data, refuse, note
        drawn = secrets.SystemRandom().sample(range(data.length), min(_RECORDS, data.length))
        self._index = [torch.tensor([one]) for one in drawn]
        self._first: list[Any] | None = None
        self._repeats, self._steps, self._spent, self._since = True, 0, 0.0, time.perf_counter()

    def begin_epoch(self) -> None:
        """The data set is about to be read from the beginning."""
        before, self._first = self._first, self._fetch() if self._repeats else None
        if before is not None and not same_value(before, self._first):
            self._note(OTHER_SAMPLES)
        if self._first is not None and not self._is_same(self._first):
            self._repeats, self._first = False, None
            self._note(NOT_REPEATABLE)

    def check(self) -> None:
        """The samples of a step have been read, and nothing of it is released yet.

        Raises:
            PrivacyError: a sample has changed.
        """
        self._steps += 1
        now = time.perf_counter()
        if self._first is None or (self._steps > _FIRST and self._spent > _SHARE * (now - self._since)):
            return
        same = self._is_same(self._first)
        self._spent += time.perf_counter() - now
        if not same:
            self._first = None
            self._refuse(_LEARNS)

    def _is_same(self, before: list[Any]) -> bool:
        return same_value(before, self._fetch())

    def _fetch(self) -> list[Any]:
        return [copy_value(flatten_outputs(self._data.fetch(index))[0]) for index in self._index]


def mixed_records(data: TrainingSet, index: Tensor) -> str | None:
    """A sentence if the samples at `index` are made of several records each; None if nothing shows that.

    Rows that a data set reads by an integer from tensors with one row a record are counted. Other ways to read, such as
    from arrays, lists and files, are not seen.
    """
    assert data.length is not None
    for one in index.tolist():
        with _RowsRead(data.length) as read:
            data.fetch(torch.tensor([one]))
        if any(len(rows) > 1 for rows in read.rows.values()):
            return (
                "the data set reads several records for one sample, so that leaving out one record changes the samples "
                "of others. Let __getitem__ use the record of its index alone; mix records in train_step under "
                "grad_mode='loop' or not at all."
            )
    return None


class _RowsRead(TorchFunctionMode):
    """Notes which rows are read by an integer from tensors with `length` rows.

    Attributes:
        rows: the row numbers, by the id of the tensor.
    """

    def __init__(self, length: int) -> None:
        super().__init__()
        self._length, self._held = length, list[Tensor]()
        self.rows: dict[int, set[int]] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.__getitem__ and args[0].dim() and len(args[0]) == self._length:
            row = args[1][0] if isinstance(args[1], tuple) and args[1] else args[1]
            row = int(row) if isinstance(row, Tensor) and row.dim() == 0 and row.dtype is torch.int64 else row
            if isinstance(row, int) and not isinstance(row, bool):
                self._held.append(args[0])  # so that no other tensor gets its id
                self.rows.setdefault(id(args[0]), set()).add(row % self._length)
        return func(*args, **(kwargs or {}))
