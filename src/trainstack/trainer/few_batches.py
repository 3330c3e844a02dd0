"""The first few global batches of the training data, to be trained on again and again."""

from __future__ import annotations

from typing import Any

from torch.utils.data import DataLoader, RandomSampler, SequentialSampler, Subset

from trainstack.errors import ConfigurationError
from trainstack.trainer.order import DataOrder
from trainstack.trainer.sources import why_foreign


class FewBatches:
    """Cuts loaders down to the samples of the first `number` global batches of the first epoch.

    Samples are loaded anew each time, with their augmentation. Every process and every resumed run picks the same ones.

    Args:
        number: of global batches; -1 for all of them.
        global_batch: samples in each.
        seed: of the data order.
    """

    def __init__(self, number: int, global_batch: int, seed: int) -> None:
        self._number, self._global_batch, self._seed = number, global_batch, seed
        self._subset: Subset[Any] | None = None

    def of(self, loader: Any) -> DataLoader[Any]:
        """A loader like `loader` over those samples.

        Raises:
            ConfigurationError: the library does not know the samples behind it.
        """
        reason = why_foreign(loader)
        if reason is not None:
            raise ConfigurationError(
                f"overfit_batches={self._number}: which samples the training loader gives is not known, since "
                f"{reason}. Use a DataLoader over a map-style data set, or overfit_batches=0."
            )
        if self._subset is None or self._subset.dataset is not loader.dataset:
            shuffled = not isinstance(loader.sampler, SequentialSampler)
            length = len(loader.dataset)
            order = DataOrder(
                length=length, global_batch=self._global_batch, micro_batch=1, seed=self._seed, shuffle=shuffled
            )
            wanted = length if self._number < 0 else self._number * self._global_batch
            self._subset = Subset(loader.dataset, order.permutation(0)[:wanted].tolist())
        return like(loader, self._subset, loader.batch_size)


def like(loader: DataLoader[Any], dataset: Any, batch_size: int | None) -> DataLoader[Any]:
    """A loader over `dataset` that loads and collates as `loader` does."""
    sampler = SequentialSampler if isinstance(loader.sampler, SequentialSampler) else RandomSampler
    options: dict[str, Any] = {"prefetch_factor": loader.prefetch_factor} if loader.num_workers > 0 else {}
    return DataLoader(
        dataset,
        batch_size=batch_size,
        sampler=sampler(dataset),
        num_workers=loader.num_workers,
        collate_fn=loader.collate_fn,
        pin_memory=loader.pin_memory,
        timeout=loader.timeout,
        worker_init_fn=loader.worker_init_fn,
        multiprocessing_context=loader.multiprocessing_context,
        **options,
    )
