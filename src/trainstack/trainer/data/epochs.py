"""`set_epoch` tells a loader's parts which epoch is read."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate
from typing import Any

from torch.utils.data import ChainDataset, ConcatDataset, Dataset, Subset

from trainstack.errors import ModuleContractError, annotate


class WrapsDatasets(Dataset[Any]):
    """A dataset of the library's over others.

    Attributes:
        parts: the others.
    """

    parts: Sequence[Any] = ()


def datasets_in(dataset: Any) -> Iterator[Any]:
    """`dataset`, and the datasets inside torch's wrappers and the library's; a wrapper of the library after its parts.

    Its `set_epoch` may look at their lengths.
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
    """The sampler, the batch sampler and its sampler; None for what the loader lacks."""
    batches = getattr(loader, "batch_sampler", None)
    return [getattr(loader, "sampler", None), batches, getattr(batches, "sampler", None)]


def set_epoch(loader: Any, epoch: int, *, in_own_order: bool, told: Iterable[Any] = ()) -> None:
    """Call `set_epoch(epoch)` where a loader has it, on each object once.

    Args:
        loader: what the module returned.
        epoch: the epoch whose first batch is read next.
        in_own_order: whether its samplers are used; if not, only datasets are called.
        told: objects that know the epoch already.

    Raises:
        ModuleContractError: the parts of a `ConcatDataset` have other lengths than when it was made.
    """
    owners = list(datasets_in(getattr(loader, "dataset", None)))
    call_set_epoch([*owners, *samplers_of(loader), loader] if in_own_order else owners, epoch, told)
    for owner in owners:
        if isinstance(owner, ConcatDataset):
            _check_lengths(owner, epoch)


def tell_users_datasets(loader: Any, epoch: int) -> list[Any]:
    """Call `set_epoch(epoch)` of the user's datasets behind the loader of the epoch before; returns those datasets.

    `get_train_dataloader` may read their lengths, so they are told before it is called.
    """
    owners = [one for one in datasets_in(getattr(loader, "dataset", None)) if not isinstance(one, WrapsDatasets)]
    call_set_epoch(owners, epoch)
    return owners


def _check_lengths(dataset: ConcatDataset[Any], epoch: int) -> None:
    now = list(accumulate(len(part) for part in dataset.datasets))  # type: ignore[arg-type]
    if now != dataset.cumulative_sizes:
        raise ModuleContractError(
            f"a ConcatDataset was made of {dataset.cumulative_sizes[-1]} samples, and its parts have {now[-1]} in "
            f"epoch {epoch}. It keeps the lengths that it was made with, so other samples would be read. Make it in "
            "get_train_dataloader, which is called for each epoch."
        )


def call_set_epoch(owners: Iterable[Any], epoch: int, told: Iterable[Any] = ()) -> None:
    """Call `set_epoch(epoch)` of each of `owners` that has it, once, and not of those in `told`."""
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
