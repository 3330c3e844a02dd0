"""Reading a loader that has an order of its own, without what torch wraps around each of its batches."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor
from torch._C._autograd import _profiler_enabled
from torch.utils.data import DataLoader, default_convert
from torch.utils.data._utils.fetch import _MapDatasetFetcher


def batches_of(loader: Any) -> Iterator[Any]:
    """What `iter(loader)` gives.

    A `DataLoader` over a map-style data set that loads in this process enters a range for the profiler, converts and
    counts at each batch, which takes longer than fetching one that is ready. Here its own iterator is made, with all
    that it checks and draws, and its sampler and fetcher are then used without it. Anything else is read as it comes.
    """
    iterator: Iterator[Any] = iter(loader)
    if type(loader) is not DataLoader or loader.num_workers or loader.pin_memory or _profiler_enabled():
        return iterator
    sampled, fetcher = getattr(iterator, "_sampler_iter", None), getattr(iterator, "_dataset_fetcher", None)
    if sampled is None or type(fetcher) is not _MapDatasetFetcher:
        return iterator
    ready = loader.batch_sampler is None and loader.collate_fn is default_convert
    return map(_fetching_ready(loader.dataset) if ready else fetcher.fetch, sampled)


def _fetching_ready(dataset: Any) -> Callable[[Any], Any]:
    """What `default_convert(dataset[index])` gives; a tuple of tensors, the usual case, becomes a list at once."""

    def fetch(index: Any) -> Any:
        batch = dataset[index]
        if type(batch) is tuple and all(map(_is_plain, batch)):
            return list(batch)
        return default_convert(batch)  # type: ignore[no-untyped-call]

    return fetch


def _is_plain(item: Any) -> bool:
    return type(item) is Tensor
