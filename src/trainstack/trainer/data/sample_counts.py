"""Counts the samples of batches that come in a loader's own order."""

from __future__ import annotations

import copy
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, RandomSampler, SequentialSampler

from trainstack.backends.fast_paths import fast_batches
from trainstack.trainer.core.samples import differing_lengths, samples_in
from trainstack.trainer.data.torch_classes import makes_lists_of_fields, replaced_method


class _CountedIndices:
    """A sampler that notes how many indices each batch has.

    Args:
        sampler: a sampler of batches, or one whose indices the dataset takes as they are; these may be lists.
        of_batches: which of the two it is.
    """

    def __init__(self, sampler: Any, of_batches: bool) -> None:
        self._sampler, self._of_batches = sampler, of_batches
        self.counts: deque[int | None] = deque()

    def __iter__(self) -> Iterator[Any]:
        self.counts.clear()
        return self._noted(iter(self._sampler))  # now, for a sampler may draw its order here

    def _noted(self, indices: Iterator[Any]) -> Iterator[Any]:
        for index in indices:
            self.counts.append(self._count(index))
            yield index

    def _count(self, index: Any) -> int | None:
        if self._of_batches:
            return len(index) if hasattr(index, "__len__") else None
        is_batch = isinstance(index, list | range) or (isinstance(index, np.ndarray | Tensor) and index.ndim == 1)
        return len(index) if is_batch else None

    def __len__(self) -> int:
        return len(self._sampler)


# Loaders with persistent workers keep their iterator from pass to pass, so their copies are kept as well.
_persistent: weakref.WeakKeyDictionary[DataLoader[Any], DataLoader[Any]] = weakref.WeakKeyDictionary()


def counted_batches(loader: Any, *, fast_paths: bool) -> Iterator[tuple[Any, int | None]]:
    """The batches of `iter(loader)`, each with the number of its samples; None where no index says it.

    A `DataLoader` over a dataset with indices fetches a batch for each list of indices, whose length is noted.
    """
    mine = _counting_copy(loader)
    if mine is None:
        return _with_counts(fast_batches(loader, enabled=fast_paths), None)
    counts = (mine.sampler if mine.batch_sampler is None else mine.batch_sampler).counts
    return _with_counts(fast_batches(mine, enabled=fast_paths), counts)


def _with_counts(batches: Iterator[Any], counts: deque[int | None] | None) -> Iterator[tuple[Any, int | None]]:
    for batch in batches:
        yield batch, None if counts is None else counts.popleft()
        del batch  # the next one may need its memory


def _counting_copy(loader: Any) -> Any:
    """A copy of `loader` whose sampler is a `_CountedIndices`; None where no list of indices is behind a batch."""
    if not isinstance(loader, DataLoader) or replaced_method(loader, DataLoader) is not None:
        return None
    # torch 2.13.0: with `in_order=False` workers return batches as they are ready.
    in_order = loader.num_workers == 0 or getattr(loader, "in_order", True)
    if not in_order or isinstance(loader.dataset, IterableDataset):
        return None
    of_batches = loader.batch_sampler is not None
    if not of_batches and type(loader.sampler) in (RandomSampler, SequentialSampler):
        return None  # the dataset has ready-made batches
    mine = _persistent.get(loader)
    if mine is None:
        if getattr(loader, "_iterator", None) is not None:  # torch 2.13.0: persistent workers are running already
            return None
        mine = copy.copy(loader)
        name = "batch_sampler" if of_batches else "sampler"
        vars(mine)[name] = _CountedIndices(getattr(loader, name), of_batches)  # DataLoader refuses the assignment
        if loader.persistent_workers:
            _persistent[loader] = mine
    return mine


class SampleCounter:
    """Counts samples as `samples_in` does, for batches of one loader.

    Args:
        loader: what gives the batches.
        warn: called with the warning about a batch whose parts differ in their lengths, once at most; the first batches
            are looked at.
        pending: batches that may be read before they are counted.
    """

    _CHECKED = 16

    def __init__(self, loader: Any, warn: Callable[[str], None], pending: int = 1) -> None:
        self._lists_are_fields = makes_lists_of_fields(loader)
        self._warn, self._to_check = warn, self._CHECKED
        self._known: deque[tuple[Any, int]] = deque(maxlen=pending)

    def read(self, loader: Any, *, fast_paths: bool) -> Iterator[Any]:
        """The batches of `iter(loader)`. Each is counted by its indices, if the loader has some."""
        if _counting_copy(loader) is None:
            return fast_batches(loader, enabled=fast_paths)
        return self._noted(counted_batches(loader, fast_paths=fast_paths))

    def _noted(self, counted: Iterator[tuple[Any, int | None]]) -> Iterator[Any]:
        for batch, count in counted:
            if count is not None:
                self._known.append((batch, count))
            yield batch
            del batch

    def __call__(self, batch: Any) -> int:
        """The number of samples in `batch`.

        Raises:
            ModuleContractError: it cannot be known.
        """
        while self._known:
            known, count = self._known.popleft()
            if known is batch:
                return count
        count = samples_in(batch, lists_are_fields=self._lists_are_fields)
        if self._to_check:
            self._to_check -= 1
            message = differing_lengths(batch)
            if message is not None:
                self._to_check = 0
                self._warn(message)
        return count
