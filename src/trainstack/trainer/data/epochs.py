"""`set_epoch` sets the epoch in all parts of a loader."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate
from typing import Any

from torch.utils.data import ChainDataset, ConcatDataset, Dataset, Subset

from trainstack.errors import ModuleContractError, annotate


class WrapsDatasets(Dataset[Any]):
    """The base of the library's datasets that wrap other datasets.

    Attributes:
        parts: the wrapped datasets.
    """

    parts: Sequence[Any] = ()


def datasets_in(dataset: Any) -> Iterator[Any]:
    """`dataset`, and the datasets inside wrappers of torch and the library.

    A wrapper of the library comes after its parts, because its `set_epoch` may read their lengths.
    """
    if not isinstance(dataset, WrapsDatasets):
        yield dataset
    if isinstance(dataset, Subset):
        yield from datasets_in(dataset.dataset)
    elif isinstance(dataset, ConcatDataset | ChainDataset):
        for part in dataset.datasets:
            yield from datasets_in(part)
    elif isinstance(dataset, WrapsDatasets):
        for part in dataset.parts:
            yield from datasets_in(part)
        yield dataset


def samplers_of(loader: Any) -> list[Any]:
    """The sampler, the batch sampler and its sampler; None for each that is missing."""
    batches = getattr(loader, "batch_sampler", None)
    return [getattr(loader, "sampler", None), batches, getattr(batches, "sampler", None)]


def set_epoch(loader: Any, epoch: int, *, in_own_order: bool, told: Iterable[Any] = ()) -> None:
    """Call `set_epoch(epoch)` of the parts of a loader that have it, once for each object.

    Args:
        loader: the loader that the module returned.
        epoch: the next epoch to read.
        in_own_order: whether the samplers of the loader are used; if not, only datasets are called.
        told: objects that already have the epoch.

    Raises:
        ModuleContractError: the lengths of the parts of a `ConcatDataset` have changed since it was made.
    """
    owners = list(datasets_in(getattr(loader, "dataset", None)))
    call_set_epoch([*owners, *samplers_of(loader), loader] if in_own_order else owners, epoch, told)
    for owner in owners:
        if isinstance(owner, ConcatDataset):
            _check_lengths(owner, epoch)


def tell_users_datasets(loader: Any, epoch: int) -> list[Any]:
    """Call `set_epoch(epoch)` of the user's datasets in the loader of the previous epoch. Returns those datasets.

    This must precede `get_train_dataloader`, which may read their lengths.
    """
    owners = [one for one in datasets_in(getattr(loader, "dataset", None)) if not isinstance(one, WrapsDatasets)]
    call_set_epoch(owners, epoch)
    return owners


def _check_lengths(dataset: ConcatDataset[Any], epoch: int) -> None:
    now = list(accumulate(len(part) for part in dataset.datasets))  # type: ignore[arg-type]
    if now != dataset.cumulative_sizes:
        raise ModuleContractError(
            f"a ConcatDataset was made of {dataset.cumulative_sizes[-1]} samples, and its parts have {now[-1]} in "
            f"epoch {epoch}. It does not update the lengths, so it would read other samples. Create it in "
            "get_train_dataloader, which is called for each epoch."
        )


def call_set_epoch(owners: Iterable[Any], epoch: int, told: Iterable[Any] = ()) -> None:
    """Call `set_epoch(epoch)` once for each of `owners` that has it and is not in `told`."""
    called = {id(one) for one in told}
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
