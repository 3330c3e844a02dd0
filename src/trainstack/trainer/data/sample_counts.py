"""Counts the samples of batches that come in a loader's own order."""

from __future__ import annotations

import copy
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

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
        for index in self._sampler:
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
    if not _has_indices(loader):
        return _read(fast_batches(loader, enabled=fast_paths), None)
    name = "sampler" if loader.batch_sampler is None else "batch_sampler"
    mine = _persistent.get(loader)
    if mine is None:
        mine = copy.copy(loader)
        # DataLoader refuses the assignment
        vars(mine)[name] = _CountedIndices(getattr(loader, name), name == "batch_sampler")
        if loader.persistent_workers:
            _persistent[loader] = mine
    return _read(fast_batches(mine, enabled=fast_paths), getattr(mine, name).counts)


def _read(batches: Iterator[Any], counts: deque[int | None] | None) -> Iterator[tuple[Any, int | None]]:
    for batch in batches:
        yield batch, None if counts is None else counts.popleft()
        del batch  # the next one may need its memory


def _has_indices(loader: Any) -> bool:
    if not isinstance(loader, DataLoader) or replaced_method(loader, DataLoader) is not None:
        return False
    # torch 2.13.0: workers may return batches in another order; the iterator of persistent workers.
    in_order = loader.num_workers == 0 or getattr(loader, "in_order", True)
    return in_order and not isinstance(loader.dataset, IterableDataset) and getattr(loader, "_iterator", None) is None


class SampleCounter:
    """Counts samples as `samples_in` does, for batches of one loader.

    Args:
        loader: what gives the batches.
        warn: called with the warning about the first batch whose parts differ in their lengths.
        pending: batches that may be read before they are counted.
    """

    def __init__(self, loader: Any, warn: Callable[[str], None], pending: int = 1) -> None:
        self._lists_are_fields = makes_lists_of_fields(loader)
        self._warn: Callable[[str], None] | None = warn
        self._known: deque[tuple[Any, int]] = deque(maxlen=pending)

    def read(self, loader: Any, *, fast_paths: bool) -> Iterator[Any]:
        """The batches of `iter(loader)`. Each is counted by its indices, if the loader has some."""
        for batch, count in counted_batches(loader, fast_paths=fast_paths):
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
        if self._warn is not None:
            message = differing_lengths(batch)
            if message is not None:
                self._warn(message)
                self._warn = None
        return count
