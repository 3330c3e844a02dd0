"""Batches of samples of similar lengths."""

from __future__ import annotations

import functools
import operator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

import trainstack as ts
from tests.helpers.processes import run_world
from tests.helpers.workers.token_data import COUNT, LENGTHS, Sequences, grouped, pad, run
from trainstack.trainer.core.order import DataOrder


def steps_of(ranks: list[Any]) -> list[Any]:
    return [
        sorted(functools.reduce(operator.iadd, (rank["seen"][step] for rank in ranks), []))
        for step in range(len(ranks[0]["seen"]))
    ]


def test_each_epoch_has_each_sample_once_in_another_order() -> None:
    order = DataOrder(length=COUNT, global_batch=8, micro_batch=8, lengths=torch.tensor(LENGTHS), window=24)
    first, second = order.permutation(0), order.permutation(1)

    assert sorted(first.tolist()) == sorted(second.tolist()) == list(range(COUNT))
    assert not torch.equal(first, second)
    assert torch.equal(first, order.permutation(0))
    spread = [max(part) - min(part) for part in torch.tensor(LENGTHS)[first[:40]].view(5, 8).tolist()]
    assert max(spread) <= 16
    assert sum(spread) / 5 < 10 < max(LENGTHS) - min(LENGTHS)
    assert max(torch.tensor(LENGTHS)[first[:40]]) == LENGTHS[first[0]]


@pytest.mark.parametrize("limit", [1, 3])
def test_micro_batches_and_workers_change_neither_batches_nor_weights(limit: int, tmp_path: Path) -> None:
    whole = grouped(directory=str(tmp_path))
    split = grouped(directory=str(tmp_path), gpu_batch_size_limit=limit)

    assert split["seen"] == whole["seen"]
    assert np.allclose(split["weights"], whole["weights"], rtol=0, atol=1e-12)


@pytest.mark.long
@pytest.mark.processes
def test_workers_load_the_same_batches(tmp_path: Path) -> None:
    assert grouped(directory=str(tmp_path), workers=2) == grouped(directory=str(tmp_path))


@pytest.mark.distributed
@pytest.mark.parametrize("limit", [pytest.param(None, marks=pytest.mark.long), 2])
def test_ranks_share_global_batches_in_parts_of_similar_lengths(limit: int | None, tmp_path: Path) -> None:
    one = grouped(directory=str(tmp_path), gpu_batch_size_limit=limit)
    ranks = run_world(2, grouped, backend="ddp", gpu_batch_size_limit=limit)

    assert steps_of(ranks) == one["seen"]
    assert np.allclose(ranks[0]["weights"], one["weights"], rtol=0, atol=1e-12)
    sizes = [[sum(cells) for cells in rank["cells"]] for rank in ranks]
    assert sum(abs(mine - other) for mine, other in zip(*sizes, strict=True)) < 0.1 * sum(map(sum, sizes))


def test_there_is_less_padding_than_with_shuffled_data(tmp_path: Path) -> None:
    tokens = 2 * sum(LENGTHS)
    by_length = sum(map(sum, grouped(directory=str(tmp_path), window=None)["cells"]))
    shuffled = sum(map(sum, grouped(directory=str(tmp_path), window=0)["cells"]))

    assert by_length - tokens < 0.5 * (shuffled - tokens)


def test_a_run_resumes_within_an_epoch(tmp_path: Path) -> None:
    whole = grouped(directory=str(tmp_path / "whole"))
    options = {"directory": str(tmp_path), "every_step": 1}
    begun = grouped(stop_at=9, **options)
    rest = grouped(resume=True, **options)

    assert rest["first"] == 9
    assert begun["seen"] + rest["seen"] == whole["seen"]
    assert rest["weights"] == whole["weights"]
    options["directory"] = str(tmp_path / "other")
    grouped(stop_at=3, **options)
    with pytest.raises(ts.CheckpointMismatchError, match=r"grouped by length \(lengths .* would now come shuffled"):
        grouped(resume=True, window=0, **options)


def test_overfitting_keeps_the_samples_of_a_batch(tmp_path: Path) -> None:
    seen = grouped(directory=str(tmp_path), overfit_batches=1)["seen"]

    assert seen[0] == seen[1]
    assert len(seen[0]) == 8


def test_data_that_cannot_be_grouped_are_refused(tmp_path: Path) -> None:
    def loader(_: Any, size: int) -> Any:
        return DataLoader(Sequences(), size, sampler=ts.LengthGroupedSampler([1, 2]), collate_fn=pad)

    with pytest.raises(ts.ModuleContractError, match="was given 2 lengths for a data set of 45 samples"):
        run(loader, directory=str(tmp_path))
    with pytest.raises(ts.PrivacyError, match="cannot be grouped by length"):
        grouped("sp-dp", directory=str(tmp_path))
    for lengths in ([], [0.5, 1.0], [[1]], [-1, 2]):
        with pytest.raises(ts.ConfigurationError, match="integer of at least 0 for each sample"):
            ts.LengthGroupedSampler(lengths)  # type: ignore[arg-type]
    with pytest.raises(ts.ConfigurationError, match="window=0"):
        ts.LengthGroupedSampler([1], window=0)


def test_the_sampler_alone_gives_each_index_once() -> None:
    sampler = ts.LengthGroupedSampler(torch.tensor(LENGTHS), window=10)
    first = list(sampler)
    sampler.set_epoch(1)

    assert sorted(first) == sorted(sampler) == list(range(COUNT))
    assert first != list(sampler)
