"""Reading a loader past torch's iterator: the same batches, random numbers and errors."""

from __future__ import annotations

from collections import namedtuple
from typing import Any

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, SequentialSampler

from trainstack.backends.fast_paths import fast_batches

Pair = namedtuple("Pair", "x y")


def tensors(n: int = 6) -> list[Any]:
    return [torch.full((2,), float(i)) for i in range(n)]


class Streamed(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter(tensors())


class Slow(Dataset[Any]):
    """Draws from the global generator at each batch."""

    def __len__(self) -> int:
        return 5

    def __getitem__(self, index: int) -> Any:
        return torch.rand(2), index


LOADERS = {
    "tuples": lambda: DataLoader([(t, t + 1) for t in tensors()], batch_size=None),  # type: ignore[arg-type]
    "lists": lambda: DataLoader([[t, t + 1] for t in tensors()], batch_size=None),  # type: ignore[arg-type]
    "dicts": lambda: DataLoader([{"x": t} for t in tensors()], batch_size=None),  # type: ignore[arg-type]
    "named": lambda: DataLoader([Pair(t, 1) for t in tensors()], batch_size=None),  # type: ignore[arg-type]
    "arrays": lambda: DataLoader([(t.numpy(), "a") for t in tensors()], batch_size=None),  # type: ignore[arg-type]
    "shuffled": lambda: DataLoader(Slow(), batch_size=None, shuffle=True),
    "collated": lambda: DataLoader(Slow(), batch_size=None, collate_fn=lambda sample: {"x": sample[0] * 2}),
    "batched": lambda: DataLoader(Slow(), batch_sampler=BatchSampler(SequentialSampler(range(5)), 2, drop_last=False)),
    "streamed": lambda: DataLoader(Streamed(), batch_size=4),
    "list": lambda: tensors(),
}


def read(batches: Any) -> list[Any]:
    torch.manual_seed(3)
    return [*batches(), torch.rand(1)]


@pytest.mark.parametrize("kind", LOADERS)
def test_batches_and_random_numbers_are_those_of_the_loader(kind: str) -> None:
    loader: Any = LOADERS[kind]()
    usual, ours = read(lambda: iter(loader)), read(lambda: fast_batches(loader))
    assert [type(batch) for batch in ours] == [type(batch) for batch in usual]
    torch.testing.assert_close(_numbers(ours), _numbers(usual), rtol=0, atol=0)


def _numbers(batches: Any) -> Any:
    """With tensors and containers alone, which `assert_close` compares."""
    if isinstance(batches, dict):
        return [_numbers(value) for value in batches.values()]
    if isinstance(batches, list | tuple):
        return [_numbers(value) for value in batches]
    return torch.tensor(ord(batches)) if isinstance(batches, str) else torch.as_tensor(batches)


def test_a_batch_that_cannot_be_loaded_fails_in_order() -> None:
    class Torn(Slow):
        def __getitem__(self, index: int) -> Any:
            if index == 2:
                raise OSError("row 2 cannot be read")
            return super().__getitem__(index)

    batches = fast_batches(DataLoader(Torn(), batch_size=None))
    assert len([next(batches), next(batches)]) == 2
    with pytest.raises(OSError, match="row 2"):
        next(batches)
