"""`as_is` hands a loader over as an iterable of batches."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any


def as_is(loader: Any) -> Any:
    """Use the batches of `loader` as they come, with an order and sizes of the loader's own.

    For loaders whose `batch_size` has another meaning, such as the parts of a graph in `RandomNodeLoader` of PyTorch
    Geometric. Override `batch_weight` of the module where the number of samples cannot be told from a batch.

    Args:
        loader: an iterable. Its length, its data set, `set_epoch` and its state are used where it has them.

    Returns:
        An iterable for `get_train_dataloader` and the methods for evaluation.
    """
    return _SizedLoader(loader) if hasattr(loader, "__len__") else _Loader(loader)


_OWN = ("batch_size", "batch_sampler", "sampler", "drop_last", "collate_fn")
"""Attributes of a `DataLoader` that are not those of its batches."""


class _Loader:
    def __init__(self, loader: Any) -> None:
        self.loader = loader

    def __iter__(self) -> Iterator[Any]:
        return iter(self.loader)

    def __getattr__(self, name: str) -> Any:
        if name in _OWN or name == "loader" or name.startswith("__"):
            raise AttributeError(f"a loader that is used as it is has no {name!r}")
        return getattr(self.loader, name)


class _SizedLoader(_Loader):
    def __len__(self) -> int:
        return len(self.loader)
