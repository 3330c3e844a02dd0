"""`OverfitSubset` limits loaders to the samples of a few batches."""

from __future__ import annotations

from copy import deepcopy
from itertools import islice
from typing import Any

from torch.utils.data import DataLoader, RandomSampler, SequentialSampler

from trainstack.trainer.data.library_orders import LengthGroupedSampler
from trainstack.trainer.data.loading import PartOfDataset, loading_options
from trainstack.trainer.data.step_batches import order_of, unsupported_order_reason


class KeptBatches(list[Any]):
    """Batches that were read once, with the `collate_fn` of their loader."""

    collate_fn: Any = None


class OverfitSubset:
    """Limits loaders to the samples of the first `number` global batches of the first epoch.

    Samples are loaded again each time, with new augmentation. Every process and every resumed run uses the same
    samples. Batches of a loader with a custom order are read once and kept, with their augmentation.

    Args:
        number: the number of global batches; -1 for all.
        global_batch: the number of samples in each.
        seed: the seed of the data order.
        version: the version of the data order.
    """

    def __init__(self, number: int, global_batch: int, seed: int, version: int) -> None:
        self._number, self._global_batch, self._order = number, global_batch, {"seed": seed, "version": version}
        self._subset: PartOfDataset | None = None
        self._latest: tuple[Any, DataLoader[Any]] | None = None  # a loader, and its limited loader
        self._kept: KeptBatches | None = None

    def of(self, loader: Any, batches: int) -> Any:
        """A loader like `loader` over these samples.

        The samples of a loader with a custom order are unknown, so its first batches are kept: `batches` for each
        global batch.
        """
        if unsupported_order_reason(loader) is not None:
            if self._number < 0:
                return loader
            if self._kept is None:  # copies, because a loader may reuse the memory of a batch
                self._kept = KeptBatches(deepcopy(batch) for batch in islice(loader, self._number * batches))
                self._kept.collate_fn = getattr(loader, "collate_fn", None)
            return self._kept
        if self._latest is not None and self._latest[0] is loader:  # a new loader would start new workers
            return self._latest[1]
        if self._subset is None or self._subset.dataset is not loader.dataset:
            order = order_of(loader, global_batch=self._global_batch, micro_batch=1, **self._order)
            self._subset = PartOfDataset(loader.dataset, order.first(self._number * self._global_batch))
        options = {"drop_last": loader.drop_last, "persistent_workers": loader.persistent_workers}
        limited = like(loader, self._subset, loader.batch_size, **options)
        self._latest = loader, limited
        return limited


def like(loader: DataLoader[Any], dataset: Any, batch_size: int | None, **options: Any) -> DataLoader[Any]:
    """A loader over `dataset` that loads and collates as `loader` does, with other `options` of `DataLoader`."""
    mine = loader.sampler
    sampler: Any = (SequentialSampler if isinstance(mine, SequentialSampler) else RandomSampler)(dataset)
    if isinstance(mine, LengthGroupedSampler):
        lengths = mine.lengths if dataset is loader.dataset else mine.lengths[dataset.indices]
        sampler = LengthGroupedSampler(lengths, window=mine.window)
    options |= {"sampler": sampler, "worker_init_fn": loader.worker_init_fn, **loading_options(loader)}
    return DataLoader(dataset, batch_size=batch_size, **options)
