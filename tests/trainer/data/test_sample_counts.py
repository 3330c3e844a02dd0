"""Counting the samples of a batch that the library does not draw itself."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.utils.rnn import pack_sequence
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, Sampler, SequentialSampler, TensorDataset

import trainstack as ts
from tests.helpers.modules import Classifier, arguments, train
from trainstack.trainer.core.samples import differing_lengths, samples_in
from trainstack.trainer.data.sample_counts import counted_batches
from trainstack.trainer.evaluation.loader_pass import evaluation_batches

X, Y = torch.zeros(4, 3), torch.zeros(4)
SCALAR = torch.tensor(1.0)
COUNTED: dict[str, tuple[Any, int, bool]] = {
    "tuple": ((X, Y), 4, False),
    "tuple of alike tensors": ((X, X), 4, False),
    "list of unlike tensors": ([X, Y], 4, False),
    "list of tables": ([X, Y[:, None]], 4, False),
    "list of one tensor": ([X], 4, False),
    "tensor": (X, 4, False),
    "dict": ({"x": X, "y": Y}, 4, False),
    "two loaders in a dict": ({"first": [X, Y], "second": [X, Y]}, 4, False),
    "dict of tuples": ({"first": (X, X)}, 4, False),
    "dict with a number": ({"temperature": 0.5, "x": X}, 4, False),
    "array": (np.zeros((6, 2)), 6, False),
    "strings and tensors": ((("a", "b", "c", "d"), X), 4, False),
    "a name and tensors": (("name", X), 4, False),
    "strings": (["a", "b"], 2, False),
    "dicts": ([{"x": X}, {"x": X}, {"x": X}], 3, False),
    "list of scalars": ([SCALAR, SCALAR], 2, False),
    "a scalar and two tensors": ((SCALAR, X, Y), 4, False),
    "nested tensor": (
        torch.nested.nested_tensor([torch.zeros(2, 3), torch.zeros(5, 3)], layout=torch.jagged),
        2,
        False,
    ),
    "time before samples": ((torch.zeros(7, 4, 3), Y), 7, True),
    "graph": ((torch.zeros(9, 2), torch.zeros(2, 20), Y), 9, True),
    "scalar first": ((SCALAR, X), 4, True),
    "one sample without a batch": ((torch.zeros(3), SCALAR), 3, True),
}
PACKED = pack_sequence([torch.zeros(3, 1), torch.zeros(2, 1)])
REFUSED: dict[str, Any] = {
    "packed sequence": PACKED,
    "packed sequence and targets": (PACKED, Y),
    "packed sequence in a dict": {"x": PACKED, "y": Y},
    "a tensor a sample": [X, X, X],
    "ragged images": [torch.zeros(3, 4, 4), torch.zeros(3, 9, 9)],
    "arrays a sample": [np.zeros((3, 2)), np.zeros((3, 2))],
    "images and targets": ([X, X], [{}, {}]),
    "fields in a field": [[X, X], Y],
    "tuple of scalars": (SCALAR, SCALAR),
    "no tensor": object(),
    "empty": [],
}


@pytest.mark.parametrize("name", COUNTED)
def test_a_batch_has_a_count_that_may_be_doubtful(name: str) -> None:
    batch, count, doubtful = COUNTED[name]
    assert samples_in(batch) == count
    assert (differing_lengths(batch) is not None) == doubtful


@pytest.mark.parametrize("name", REFUSED)
def test_a_batch_of_unknown_size_is_refused(name: str) -> None:
    with pytest.raises(ts.ModuleContractError, match=r"Override ModuleInterface\.batch_weight"):
        samples_in(REFUSED[name])


def test_lists_of_torchs_collate_have_an_item_for_each_field() -> None:
    assert samples_in([X, X], lists_are_fields=True) == samples_in([[X, X], Y], lists_are_fields=True) == 4


class Sequences(IterableDataset[Tensor]):
    def __iter__(self) -> Iterator[Tensor]:
        yield from torch.arange(10.0)[:, None]


DATA = TensorDataset(torch.arange(10.0)[:, None], torch.arange(10.0)[:, None])
LOADERS: dict[str, tuple[Any, list[int | None]]] = {
    "batch sampler": (lambda **k: DataLoader(DATA, batch_sampler=[[0, 1, 2], [5]], **k), [3, 1]),
    "lists as indices": (
        lambda **k: DataLoader(DATA, sampler=BatchSampler(SequentialSampler(DATA), 4, False), batch_size=None, **k),
        [4, 4, 2],
    ),
    "batches of the dataset": (lambda **k: DataLoader([(X, X), (Y, Y)], batch_size=None, **k), [None, None]),  # type: ignore[arg-type]
    "iterable": (lambda **k: DataLoader(Sequences(), batch_size=5, **k), [None, None]),
    "list": (lambda **k: [(X, Y)], [None]),
}


@pytest.mark.parametrize("fast_paths", [True, False])
@pytest.mark.parametrize("name", LOADERS)
def test_samples_are_counted_by_their_indices(name: str, fast_paths: bool) -> None:
    make, counts = LOADERS[name]
    loader = make()
    for _ in range(2):
        read = list(counted_batches(loader, fast_paths=fast_paths))
        assert [count for _, count in read] == counts
        for (batch, _), expected in zip(read, loader, strict=True):
            assert all(torch.equal(one, other) for one, other in zip(batch, expected, strict=True))


class Eager(Sampler[int]):
    """Draws its order when its iterator is made, before the loader draws the seed of its workers."""

    def __iter__(self) -> Iterator[int]:
        return iter(torch.randperm(10).tolist())


@pytest.mark.parametrize("of_batches", [True, False])
def test_an_order_is_drawn_when_the_iterator_is_created(of_batches: bool) -> None:
    sampler = Eager()
    batches: Any = BatchSampler(sampler, 4, False)
    loader = DataLoader(DATA, sampler=batches, batch_size=None) if of_batches else DataLoader(DATA, 4, sampler=sampler)
    torch.manual_seed(0)
    expected = [batch[0] for batch in loader]
    after = torch.get_rng_state()
    torch.manual_seed(0)
    read = [batch[0] for batch, _ in counted_batches(loader, fast_paths=True)]
    assert all(torch.equal(one, other) for one, other in zip(read, expected, strict=True))
    assert torch.equal(torch.get_rng_state(), after)


class EagerBatches(BatchSampler):
    def __iter__(self) -> Iterator[list[int]]:
        return iter([torch.randperm(10)[:3].tolist()])


def test_a_batch_sampler_may_draw_at_once() -> None:
    loader = DataLoader(DATA, batch_sampler=EagerBatches(SequentialSampler(DATA), 3, False))
    torch.manual_seed(0)
    expected = next(iter(loader))[0]
    torch.manual_seed(0)
    (batch, count), *_ = counted_batches(loader, fast_paths=True)
    assert torch.equal(batch[0], expected)
    assert count == 3


@pytest.mark.processes
@pytest.mark.parametrize("persistent", [True, False])
def test_batches_of_workers_are_counted_in_their_order(persistent: bool) -> None:
    loader = DataLoader(DATA, batch_sampler=[[0, 1, 2], [5], [6, 7]], num_workers=2, persistent_workers=persistent)
    for _ in range(2):
        read = list(counted_batches(loader, fast_paths=True))
        assert [(len(batch[0]), count) for batch, count in read] == [(3, 3), (1, 1), (2, 2)]


def packed(samples: list[Any]) -> Any:
    return pack_sequence([sample[0] for sample in samples], enforce_sorted=False)


class OnSequences(Classifier):
    """Sequences of several lengths, in packed batches of a batch sampler: the loss is a mean over samples."""

    batches = ([0, 1, 2], [3])

    def __init__(self, by_sampler: bool) -> None:
        super().__init__()
        self.by_sampler = by_sampler
        self.rows = [(torch.full((length, 1), float(length)),) for length in (5, 4, 3, 1)]

    def get_train_dataloader(self, sampler: Any, batch_size: int) -> Any:
        loader = DataLoader(self.rows, batch_sampler=self.batches, collate_fn=packed)  # type: ignore[arg-type]
        return loader if self.by_sampler else list(loader)

    get_val_dataloaders = get_train_dataloader

    def train_step(self, global_step: int, batch: Any, device: Any) -> Any:
        lengths = torch.nn.utils.rnn.pad_packed_sequence(batch)[1]
        return lengths.float().mean() + 0 * self.net[0].weight.sum()

    val_step = train_step


def test_packed_sequences_count_by_their_indices_or_are_refused(tmp_path: Path) -> None:
    trainer = train(OnSequences(True), tmp_path, train_batch_size=2, gpu_batch_size_limit=1)
    assert {trainer.history.get_latest_metric(name) for name in ("train/loss_epoch", "val/loss")} == {13 / 4}
    with pytest.raises(ts.ModuleContractError, match="a PackedSequence has time steps"):
        train(OnSequences(False), tmp_path)


def test_doubtful_batches_cause_one_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class TimeFirst(Classifier):
        def get_train_dataloader(self, sampler: Any, batch_size: int) -> Any:
            return [(torch.zeros(6, 2), torch.zeros(2))] * 3

        def get_val_dataloaders(self, sampler: Any, batch_size: int) -> Any:
            return self.get_train_dataloader(sampler, batch_size)

        def train_step(self, global_step: int, batch: Any, device: Any) -> Any:
            return self.net[0].weight.mean()

        val_step = train_step

    class Weighed(TimeFirst):
        def batch_weight(self, batch: Any) -> float:
            return batch[0].shape[1]

    with caplog.at_level(logging.WARNING):
        train(Weighed(), tmp_path, epochs=2)
        assert "first dimensions" not in caplog.text
        train(TimeFirst(), tmp_path, epochs=2)
    said = [record.getMessage() for record in caplog.records if "first dimensions" in record.getMessage()]
    assert said == [said[0]] * 2, "once in training and once in validation"
    assert "(6, 2): the first of them is used, so the batch counts as 6 samples" in said[0]


@pytest.mark.parametrize("weight", [-1, float("nan"), float("inf")])
def test_an_evaluation_refuses_a_weight_other_than_a_count(weight: float, tmp_path: Path) -> None:
    module = Classifier(validate=True)
    trainer = ts.Trainer(module, arguments(tmp_path))
    module.batch_weight = lambda batch: weight  # type: ignore[method-assign]
    with pytest.raises(ts.ModuleContractError, match=r"batch_weight returned .* finite number >= 0"):
        trainer.validate()


def test_the_last_batch_of_an_evaluation_counts_by_its_samples() -> None:
    loader = DataLoader(DATA, batch_sampler=[[0, 1, 2], [5]])
    pairs, in_parts = evaluation_batches(loader, seed=0, world=ts.backends.World())
    assert [count for _, count in pairs] == [3, 1]
    assert not in_parts
