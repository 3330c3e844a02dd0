"""`OverfitSubset` cuts loaders down to the samples of a few batches."""

from __future__ import annotations

from copy import deepcopy
from itertools import islice
from typing import Any

from torch.utils.data import DataLoader, RandomSampler, SequentialSampler

from trainstack.trainer.data.library_orders import LengthGroupedSampler
from trainstack.trainer.data.loading import PartOfDataset, loading_options
from trainstack.trainer.data.step_batches import order_of, unsupported_order_reason


class KeptBatches(list[Any]):
    """Batches that were read once, and how their loader made them."""

    collate_fn: Any = None


class OverfitSubset:
    """Cuts loaders down to the samples of the first `number` global batches of the first epoch.

    Samples are loaded anew each time, with their augmentation. Every process and every resumed run picks the same ones.
    Batches of a loader with an order of its own are read once and kept, with the augmentation that they came with.

    Args:
        number: of global batches; -1 for all of them.
        global_batch: samples in each.
        seed: of the data order.
        version: of the data order.
    """

    def __init__(self, number: int, global_batch: int, seed: int, version: int) -> None:
        self._number, self._global_batch, self._order = number, global_batch, {"seed": seed, "version": version}
        self._subset: PartOfDataset | None = None
        self._kept: KeptBatches | None = None

    def of(self, loader: Any, batches: int) -> Any:
        """A loader like `loader` over those samples.

        The samples behind a loader with an order of its own are not known: as many of its first `batches` are kept as
        the global batches take.
        """
        if unsupported_order_reason(loader) is not None:
            if self._number < 0:
                return loader
            if self._kept is None:  # copies, since a loader may reuse the memory of a batch
                self._kept = KeptBatches(deepcopy(batch) for batch in islice(loader, self._number * batches))
                self._kept.collate_fn = getattr(loader, "collate_fn", None)
            return self._kept
        if self._subset is None or self._subset.dataset is not loader.dataset:
            order = order_of(loader, global_batch=self._global_batch, micro_batch=1, **self._order)
            self._subset = PartOfDataset(loader.dataset, order.first(self._number * self._global_batch))
        return like(loader, self._subset, loader.batch_size)


def like(loader: DataLoader[Any], dataset: Any, batch_size: int | None) -> DataLoader[Any]:
    """A loader over `dataset` that loads and collates as `loader` does."""
    mine = loader.sampler
    sampler: Any = (SequentialSampler if isinstance(mine, SequentialSampler) else RandomSampler)(dataset)
    if isinstance(mine, LengthGroupedSampler):
        lengths = mine.lengths if dataset is loader.dataset else mine.lengths[dataset.indices]
        sampler = LengthGroupedSampler(lengths, window=mine.window)
    options = {"sampler": sampler, "worker_init_fn": loader.worker_init_fn, **loading_options(loader)}
    return DataLoader(dataset, batch_size=batch_size, **options)
