"""`as_is` wraps a loader as a plain iterable of batches."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any


def as_is(loader: Any) -> Any:
    """Use the batches of `loader` without a change, in the loader's order and sizes.

    This is for loaders whose `batch_size` has another meaning, such as the number of parts of a graph in
    `RandomNodeLoader` of PyTorch Geometric. If a batch does not show its number of samples, override `batch_weight` of
    the module.

    Args:
        loader: an iterable. Its length, data set, `set_epoch` and state are used if it has them.

    Returns:
        an iterable to return from `get_train_dataloader` and the methods for evaluation.
    """
    return _SizedLoader(loader) if hasattr(loader, "__len__") else _Loader(loader)


_OWN = ("batch_size", "batch_sampler", "sampler", "drop_last", "collate_fn")
"""Attributes of a `DataLoader` that do not describe the batches of a wrapped loader."""


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
