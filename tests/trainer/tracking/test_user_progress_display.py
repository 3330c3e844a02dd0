"""A custom progress display."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import DataLoader, IterableDataset

import trainstack as ts
from tests.helpers.modules import Classifier, numbers, train
from trainstack.backends import World
from trainstack.trainer.evaluation.loader_pass import count_batches, evaluation_batches


class Bells(ts.ProgressDisplay):
    """Records its calls."""

    next_poll = 0

    def __init__(self) -> None:
        self.rung: list[Any] = []

    def start_epoch(self, epoch: int, epochs: int, total_steps: int | None, done: int) -> None:
        self.rung.append(f"epoch {epoch} of {epochs}")
        self.next_poll = 0

    def poll(self, done: int, loss: Callable[[], float | None]) -> None:
        self.rung.append(done)
        self.next_poll = done + 1

    def end_epoch(self, summary: str = "") -> None:
        self.next_poll = 1 << 62

    def start_validation(self, key: str, total: int | None) -> None:
        self.rung.append(key)
        self.next_poll = 1 << 62

    def end_validation(self) -> None: ...

    def close(self) -> None:
        self.rung.append("closed")


@pytest.mark.spec("FN-26")
def test_a_custom_progress_display_gets_all_calls(tmp_path: Path) -> None:
    bells = Bells()
    train(Classifier(validate=True), tmp_path, progress=bells, max_train_steps_per_epoch=2)
    assert bells.rung == ["epoch 1 of 1", 1, 2, "default", "closed"]
    with pytest.raises(ts.ConfigurationError, match=r"progress='bar': write one of 'auto'.*ProgressDisplay"):
        ts.TrainerArguments(progress="bar")  # type: ignore[arg-type]


class Totals(Bells):
    def start_validation(self, key: str, total: int | None) -> None:
        self.rung.append((key, total))


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter(numbers(10))


class Validated(Classifier):
    """Three loaders: in the library's order, with a custom order, and without a length."""

    def get_val_dataloaders(self, sampler: Any, batch_size: int) -> Any:
        indexed, batches = numbers(41), [[0, 1], [2], [3, 4]]
        return {
            "indexed": DataLoader(indexed, batch_size, sampler=sampler(indexed)),
            "batches": DataLoader(indexed, batch_sampler=batches),
            "stream": DataLoader(Stream(), batch_size),
        }


def test_a_validation_display_gets_the_number_of_batches(tmp_path: Path) -> None:
    for limit, expected in ((None, [11, 3, None]), (2, [2, 2, None])):
        totals = Totals()
        train(Validated(), tmp_path, progress=totals, max_steps=1, val_batch_size=4, max_val_steps_per_epoch=limit)
        assert [one[1] for one in totals.rung if isinstance(one, tuple)] == expected


@pytest.mark.parametrize("samples", [1, 7, 8, 41])
@pytest.mark.parametrize("limit", [None, 1, 3, 0.3, 1.0])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_the_number_of_batches_is_correct_on_each_rank(samples: int, limit: int | float | None, size: int) -> None:
    for rank in range(size):
        loader, world = DataLoader(numbers(samples), 4), World(rank=rank, size=size)
        pairs, _ = evaluation_batches(loader, seed=0, world=world, limit=limit)
        assert count_batches(loader, world, limit) == len(list(pairs))
