"""Count the samples in batches of a loader with a custom order."""

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
    """A sampler that notes the number of indices of each batch.

    Args:
        sampler: a batch sampler, or a sampler whose items are passed to the dataset, and may be lists.
        of_batches: whether it is a batch sampler.
    """

    def __init__(self, sampler: Any, of_batches: bool) -> None:
        self._sampler, self._of_batches = sampler, of_batches
        self.counts: deque[int | None] = deque()

    def __iter__(self) -> Iterator[Any]:
        self.counts.clear()
        return self._noted(iter(self._sampler))  # not in the generator: a sampler may draw its order here

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


# Loaders with persistent workers keep their iterator between passes, so their copies are kept as well.
_persistent: weakref.WeakKeyDictionary[DataLoader[Any], DataLoader[Any]] = weakref.WeakKeyDictionary()


def counted_batches(loader: Any, *, fast_paths: bool) -> Iterator[tuple[Any, int | None]]:
    """The batches of `iter(loader)`, each with its number of samples; None if there is no list of indices.

    A `DataLoader` over a dataset with indices fetches a batch for each list of indices. Its length is the number.
    """
    mine = _counting_copy(loader)
    if mine is None:
        return _with_counts(fast_batches(loader, enabled=fast_paths), None)
    counts = (mine.sampler if mine.batch_sampler is None else mine.batch_sampler).counts
    return _with_counts(fast_batches(mine, enabled=fast_paths), counts)


def _with_counts(batches: Iterator[Any], counts: deque[int | None] | None) -> Iterator[tuple[Any, int | None]]:
    for batch in batches:
        yield batch, None if counts is None else counts.popleft()
        del batch  # frees its memory for the next one


def _counting_copy(loader: Any) -> Any:
    """A copy of `loader` with a `_CountedIndices` as sampler; None if its batches do not come from lists of indices."""
    if not isinstance(loader, DataLoader) or replaced_method(loader, DataLoader) is not None:
        return None
    # With `in_order=False` workers return batches in another order than that of their indices.
    in_order = loader.num_workers == 0 or getattr(loader, "in_order", True)
    if not in_order or isinstance(loader.dataset, IterableDataset):
        return None
    of_batches = loader.batch_sampler is not None
    if not of_batches and type(loader.sampler) in (RandomSampler, SequentialSampler):
        return None  # the dataset has ready-made batches
    mine = _persistent.get(loader)
    if mine is None:
        if getattr(loader, "_iterator", None) is not None:  # private, torch 2.13.0: persistent workers run already
            return None
        mine = copy.copy(loader)
        name = "batch_sampler" if of_batches else "sampler"
        vars(mine)[name] = _CountedIndices(getattr(loader, name), of_batches)  # DataLoader refuses the assignment
        if loader.persistent_workers:
            _persistent[loader] = mine
    return mine


class SampleCounter:
    """Counts the samples of the batches of one loader, by their indices or by `samples_in`.

    Args:
        loader: the loader.
        warn: called at most once, with the warning about a batch whose parts have different lengths. Only the first
            batches are checked.
        pending: the largest number of batches that are read before they are counted.
    """

    _CHECKED = 16  # enough to find a wrong batch layout, at no cost in later steps

    def __init__(self, loader: Any, warn: Callable[[str], None], pending: int = 1) -> None:
        self._lists_are_fields = makes_lists_of_fields(loader)
        self._warn, self._to_check = warn, self._CHECKED
        self._known: deque[tuple[Any, int]] = deque(maxlen=pending)

    def read(self, loader: Any, *, fast_paths: bool) -> Iterator[Any]:
        """The batches of `iter(loader)`. They are counted by their indices, if the loader has indices."""
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
            ModuleContractError: the number is unknown.
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
