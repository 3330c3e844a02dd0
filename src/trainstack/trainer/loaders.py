"""Making the `DataLoader` that describes a data set, with the collator that belongs to it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch.utils.data import DataLoader, IterableDataset, RandomSampler, SequentialSampler

from trainstack.errors import ConfigurationError, ModuleContractError


def make_dataloader(
    dataset: Any,
    sampler: Callable[[Any], Any],
    batch_size: int,
    collate_fn: Callable[[Any], Any] | None,
    options: Mapping[str, Any],
) -> DataLoader[Any]:
    """See `ModuleInterface.build_dataloader`; `collate_fn` is what applies where `options` has none."""
    lacks = [name for name in ("__len__", "__getitem__") if not hasattr(dataset, name)]
    if lacks and not isinstance(dataset, IterableDataset):
        raise ModuleContractError(
            f"a {type(dataset).__name__} is no data set: it has no {' and no '.join(lacks)}. Give an object with "
            "__len__ and __getitem__, or an IterableDataset."
        )
    chosen = {"batch_size": batch_size, **options}
    if chosen.get("collate_fn") is None:
        chosen["collate_fn"] = collate_fn or getattr(dataset, "data_collator", None)
    shuffle = chosen.pop("shuffle", None)
    if "batch_sampler" in chosen:
        del chosen["batch_size"]
    elif not isinstance(dataset, IterableDataset) and chosen.get("sampler") is None:
        if shuffle is not None:
            sampler = RandomSampler if shuffle else SequentialSampler
        chosen["sampler"] = sampler(dataset)
    try:
        return DataLoader(dataset, **chosen)
    except (TypeError, ValueError) as error:
        raise ConfigurationError(f"DataLoader does not take the options {chosen}: {error}") from error
