"""`set_epoch` tells a loader's parts which epoch is read."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from torch.utils.data import ChainDataset, ConcatDataset, Dataset, Subset

from trainstack.errors import annotate


class WrapsDatasets(Dataset[Any]):
    """A dataset of the library's over others.

    Attributes:
        parts: the others.
    """

    parts: Sequence[Any] = ()


def datasets_in(dataset: Any) -> Iterator[Any]:
    """`dataset`, and the datasets inside torch's wrappers and the library's."""
    yield dataset
    if isinstance(dataset, Subset):
        yield from datasets_in(dataset.dataset)
    elif isinstance(dataset, ConcatDataset | ChainDataset):
        for part in dataset.datasets:
            yield from datasets_in(part)
    elif isinstance(dataset, WrapsDatasets):
        for part in dataset.parts:
            yield from datasets_in(part)


def samplers_of(loader: Any) -> list[Any]:
    """The sampler, the batch sampler and its sampler; None for what the loader lacks."""
    batches = getattr(loader, "batch_sampler", None)
    return [getattr(loader, "sampler", None), batches, getattr(batches, "sampler", None)]


def set_epoch(loader: Any, epoch: int, *, in_own_order: bool) -> None:
    """Call `set_epoch(epoch)` where a loader has it, on each object once.

    Args:
        loader: what the module returned.
        epoch: the epoch whose first batch is read next.
        in_own_order: whether its samplers are used; if not, only datasets are called.
    """
    owners = list(datasets_in(getattr(loader, "dataset", None)))
    call_set_epoch([*owners, *samplers_of(loader), loader] if in_own_order else owners, epoch)


def call_set_epoch(owners: Iterable[Any], epoch: int) -> None:
    """Call `set_epoch(epoch)` of each of `owners` that has it, once."""
    called = set[int]()
    for owner in owners:
        method = getattr(owner, "set_epoch", None)
        if not callable(method) or isinstance(owner, type) or id(owner) in called:
            continue
        called.add(id(owner))
        try:
            method(epoch)
        except Exception as error:
            annotate(error, f"raised in {type(owner).__name__}.set_epoch({epoch})")
            raise
