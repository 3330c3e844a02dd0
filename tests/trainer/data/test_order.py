"""Data order: a permutation that depends on seed and epoch only."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, Subset, TensorDataset, WeightedRandomSampler

import trainstack as ts
from tests.helpers.modules import Classifier, Noisy, arguments, numbers, train
from trainstack.trainer.core.order import DataOrder, mix
from trainstack.trainer.data.loading import _as_rows


def order(**changes: Any) -> DataOrder:
    return DataOrder(**{"length": 41, "global_batch": 8, "micro_batch": 8, "seed": 3, **changes})


def test_each_epoch_and_each_seed_has_its_own_permutation() -> None:
    first = order().permutation(0)

    assert sorted(first.tolist()) == list(range(41))
    assert torch.equal(first, order().permutation(0))
    assert not torch.equal(first, order().permutation(1))
    assert not torch.equal(first, order(seed=4).permutation(0))


def test_the_permutation_is_pinned() -> None:
    """If this fails, runs of the previous version do not resume exactly within an epoch: add it to the changelog."""
    assert order(length=8).permutation(2).tolist() == [6, 1, 7, 2, 0, 5, 4, 3]


def test_mixing_depends_on_each_number_and_their_order() -> None:
    values = {mix(a, b, c) for a in range(8) for b in range(8) for c in range(8)}

    assert len(values) == 512
    assert mix(1, 2) != mix(2, 1)


@pytest.mark.spec("HZ-28", "FN-46")
@pytest.mark.parametrize("limit", [1, 2, 3, 4, 8])
def test_the_global_batches_do_not_depend_on_the_split(limit: int, tmp_path: Path) -> None:
    reference, split = Remembers(numbers(41)), Remembers(numbers(41))
    train(reference, tmp_path, epochs=2)
    train(split, tmp_path, epochs=2, gpu_batch_size_limit=limit)

    assert reference.steps == split.steps
    assert len(reference.steps) == 12


@pytest.mark.spec("F301", "F104")
def test_epochs_are_shuffled_without_the_global_generators(tmp_path: Path) -> None:
    torch.manual_seed(999)
    expected = torch.rand(1)
    torch.manual_seed(999)
    module = Remembers(Noisy())
    train(module, tmp_path, epochs=2)

    assert torch.equal(torch.rand(1), expected)
    assert module.steps[:6] != module.steps[6:]


@pytest.mark.processes
@pytest.mark.spec("F301")
@pytest.mark.parametrize("limit", [8, 2])
@pytest.mark.parametrize("workers", [0, 2])
def test_augmentation_depends_on_epoch_and_sample_only(limit: int, workers: int, tmp_path: Path) -> None:
    """The number of workers and the micro-batch change nothing; the epoch does."""
    reference, other = Remembers(Noisy()), Remembers(Noisy(), num_workers=workers)
    train(reference, tmp_path, epochs=2)
    torch.manual_seed(8)
    train(other, tmp_path, epochs=2, gpu_batch_size_limit=limit)

    assert reference.samples == other.samples
    assert set(reference.samples[:41]).isdisjoint(reference.samples[41:])


def test_a_loader_without_shuffling_keeps_data_set_order(tmp_path: Path) -> None:
    module = InOrder(numbers(20))
    train(module, tmp_path)

    assert torch.equal(torch.tensor(module.samples), numbers(20).tensors[0][:, 0])


def test_a_subset_of_tensors_is_indexed_like_the_subset(tmp_path: Path) -> None:
    module = InOrder(Subset(Subset(numbers(20), list(range(19, -1, -1))), [0, 2, 4, 6, 8, 10, 12, 14]))
    train(module, tmp_path)

    assert torch.equal(torch.tensor(module.samples), numbers(20).tensors[0][[19, 17, 15, 13, 11, 9, 7, 5], 0])


@pytest.mark.parametrize(
    "indices",
    [
        range(5, 0, -2),
        [3, 1],
        (3, np.int64(1)),
        np.array([3, 1], dtype=np.uint8),
        torch.tensor([3, 1]),
        torch.tensor([3, 1], dtype=torch.int8),
    ],
)
def test_integers_of_a_subset_select_rows(indices: Any) -> None:
    rows = _as_rows(indices)
    assert rows is not None
    assert rows.dtype is torch.int64
    assert rows.tolist() == [int(index) for index in indices]


@pytest.mark.parametrize(
    "indices",
    [
        [True, False],
        np.array([True, False]),
        torch.tensor([True, False]),
        torch.tensor([1, 0], dtype=torch.uint8),
        torch.tensor([1.0, 0.0]),
        torch.tensor([[1, 0]]),
        ["1"],
    ],
)
def test_masks_and_other_indices_of_a_subset_are_left_to_it(indices: Any) -> None:
    assert _as_rows(indices) is None


class Marked(torch.Tensor):
    """Its class changes the values of indexed rows."""

    def __getitem__(self, index: Any) -> Any:
        row = super().__getitem__(index)
        return row.neg() if isinstance(index, int) else row


@pytest.mark.parametrize("fast_paths", [True, False])
@pytest.mark.parametrize("kind", ["rows", "channels last", "transposed", "subclass"])
def test_fast_indexing_gives_the_bits_of_the_loader(kind: str, fast_paths: bool) -> None:
    from trainstack.trainer.data.loading import Fetcher

    images = torch.randn(20, 3, 4, 5)
    datasets = {
        "rows": numbers(20),
        "channels last": TensorDataset(images.to(memory_format=torch.channels_last)),
        "transposed": TensorDataset(images.transpose(1, 3)),
        "subclass": TensorDataset(images.as_subclass(Marked)),
    }
    loader = DataLoader(datasets[kind], batch_size=4)
    fetched = list(Fetcher(loader, 0, fast_paths=fast_paths).batches(0, torch.arange(20).split(4)))

    for one, other in zip(fetched, loader, strict=True):
        assert type(one) is type(other)
        for a, b in zip(one, other, strict=True):
            assert torch.equal(a, b)
            assert (type(a), a.stride()) == (type(b), b.stride())


@pytest.mark.parametrize("kind", ["weighted", "iterable", "list", "batch_sampler"])
def test_a_custom_order_works_and_is_logged_once(kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    module = Foreign(kind)
    trainer = ts.Trainer(module, arguments(tmp_path, epochs=2, gpu_batch_size_limit=4))
    trainer.train()

    assert trainer.global_steps_finished == 2 * 3, "5 batches of 4, two a step"
    said = [record.getMessage() for record in caplog.records if "the loader's order" in record.getMessage()]
    assert len(said) == 1


@pytest.mark.spec("FN-27")
def test_drop_last_drops_the_incomplete_global_batch(tmp_path: Path) -> None:
    trainer = train(Classifier(drop_last=True), tmp_path, gpu_batch_size_limit=2)

    assert trainer.global_steps_finished == 5
    assert trainer.state.batches == 20


class Remembers(Classifier):
    """Records the samples of each step."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.samples: list[float] = []
        self._by_step: dict[int, set[float]] = {}

    @property
    def steps(self) -> list[list[float]]:
        return [sorted(self._by_step[step]) for step in sorted(self._by_step)]

    def train_step(self, global_step: int, batch: Any, device: Any) -> Any:
        values = batch[0][:, 0].tolist()
        self.samples += values
        self._by_step.setdefault(global_step, set()).update(values)
        return super().train_step(global_step, batch, device)


class InOrder(Remembers):
    def get_train_dataloader(self, sampler: Any, batch_size: int) -> Any:
        return DataLoader(self.dataset, batch_size=batch_size, shuffle=False)


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter(numbers(20))


class Foreign(Classifier):
    def __init__(self, kind: str) -> None:
        super().__init__(numbers(20))
        self.kind = kind

    def get_train_dataloader(self, sampler: Any, batch_size: int) -> Any:
        if self.kind == "weighted":
            return DataLoader(
                self.dataset, batch_size=batch_size, sampler=WeightedRandomSampler([1.0] * 20, num_samples=20)
            )
        if self.kind == "iterable":
            return DataLoader(Stream(), batch_size=batch_size)
        if self.kind == "list":
            return list(DataLoader(self.dataset, batch_size=batch_size))
        return DataLoader(self.dataset, batch_sampler=[list(range(i, i + 4)) for i in range(0, 20, 4)])
