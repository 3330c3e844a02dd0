"""Data whose length changes by epoch, and streams that state a length."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import ConcatDataset, DataLoader, default_collate

import trainstack as ts
from tests.helpers.processes import run_world
from tests.helpers.workers.token_data import Sequences, growing, pad, run, streamed


@pytest.mark.parametrize("schedule", [None, "epoch"])
def test_epochs_are_as_long_as_their_data(schedule: Any, tmp_path: Path) -> None:
    result = growing(directory=str(tmp_path), schedule=schedule)

    assert [len(step) for step in result["seen"]] == [8, 2, 8, 8, 4, 8, 8, 8, 6]
    assert (result["plan"]["samples_per_epoch"], result["plan"]["steps_per_epoch"]) == (30, 4)


def test_schedules_of_updates_need_the_number_of_steps(tmp_path: Path) -> None:
    with pytest.raises(ts.ModuleContractError, match=r"data set of 20 samples; .* planned for 10, .*max_steps=\.\.\."):
        growing(directory=str(tmp_path), schedule="step")
    result = growing(directory=str(tmp_path), schedule="step", max_steps=8)

    assert [len(step) for step in result["seen"]] == [8, 2, 8, 8, 4, 8, 8, 8]


@pytest.mark.parametrize("stop_at", [2, pytest.param(3, marks=pytest.mark.long), 5])
def test_a_run_over_growing_data_resumes_exactly(stop_at: int, tmp_path: Path) -> None:
    whole = growing(directory=str(tmp_path / "whole"), schedule="epoch")
    options = {"directory": str(tmp_path), "every_step": 1, "schedule": "epoch"}
    begun, rest = growing(stop_at=stop_at, **options), growing(resume=True, **options)

    assert begun["seen"] + rest["seen"] == whole["seen"]
    assert rest["weights"] == whole["weights"]


def test_a_resume_within_an_epoch_refuses_data_of_another_length(tmp_path: Path) -> None:
    def of(count: int) -> Any:
        return lambda sampler, size: DataLoader(
            Sequences(count), size, sampler=sampler(Sequences(count)), collate_fn=pad
        )

    run(of(20), directory=str(tmp_path), stop_at=3, every_step=1)
    with pytest.raises(ts.CheckpointMismatchError, match=r"within epoch 0 of a data set of 20 samples; .* now has 24"):
        run(of(24), directory=str(tmp_path), resume=True, every_step=1)


@pytest.mark.distributed
def test_ranks_train_on_growing_data(tmp_path: Path) -> None:
    one = growing(directory=str(tmp_path))
    ranks = run_world(2, growing, backend="ddp")

    assert [sorted(a + b) for a, b in zip(*(rank["seen"] for rank in ranks), strict=True)] == one["seen"]


@pytest.mark.parametrize("backend", ["sp", pytest.param("ddp", marks=pytest.mark.distributed)])
def test_a_stated_length_is_the_plans(backend: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    options = {"count": 24, "stated": 24, "gpu_batch_size_limit": 4}
    if backend == "ddp":
        results = run_world(2, streamed, backend="ddp", **options)
    else:
        results = [streamed(directory=str(tmp_path), **options)]

    for result in results:
        assert result["plan"]["steps_per_epoch"] == 3
        assert len(result["seen"]) == 6
    assert "schedules and progress are planned for" not in caplog.text


@pytest.mark.parametrize(("count", "steps"), [(12, 2), (40, 5)])
def test_other_samples_than_stated_are_reported_once(
    count: int, steps: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    result = streamed(count=count, stated=24, directory=str(tmp_path))

    assert len(result["seen"]) == 2 * steps
    assert caplog.text.count(f"epoch 0 had {steps} global steps, but schedules and progress are planned for 3") == 1
    assert caplog.text.count("schedules and progress are planned for") == 1


@pytest.mark.parametrize(("end", "said"), [({}, 1), ({"max_steps": 3}, 0), ({"max_train_steps_per_epoch": 2}, 0)])
def test_a_stream_without_a_limit_causes_a_warning(
    end: dict[str, int], said: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        streamed(directory=str(tmp_path), **end)

    assert caplog.text.count("the training loader has no length") == said


class Lists:
    """Tokens of another data set, in the form that a packed one needs."""

    def __init__(self, samples: Any) -> None:
        self.samples = samples

    def set_epoch(self, epoch: int) -> None:
        self.samples.set_epoch(epoch)

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> Any:
        return [index] * (1 + index)

    @staticmethod
    def masked(rows: list[Any]) -> Any:
        """A batch of rows or of sequences."""
        if isinstance(rows[0], tuple):
            return pad(rows)
        batch = default_collate(rows)
        tokens = batch["input_ids"].double()
        return {"index": tokens[:, 0].long(), "tokens": tokens, "mask": torch.ones_like(tokens, dtype=torch.bool)}


class Curriculum(Sequences):
    """4 samples in the first epoch, 8 in the next, 12 in the third; their tokens depend on the epoch."""

    def __init__(self) -> None:
        super().__init__(4)
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch, self.count = epoch, 4 * (epoch + 1)

    def __getitem__(self, index: int) -> Any:
        return self.begin + index, super().__getitem__(index)[1] + self.epoch


def of_curriculum(kind: str, *, kept: bool, workers: int = 0) -> Any:
    """Makes loaders over data that grow, with the same data sets in each epoch or with new ones."""
    sets = [Curriculum(), Curriculum()]
    options: dict[str, Any] = {"collate_fn": pad, "num_workers": workers, "persistent_workers": workers > 0}

    def make(sampler: Any, size: int) -> Any:
        one, two = sets if kept else (Curriculum(), Curriculum())
        if kind == "grouped":
            return DataLoader(one, size, sampler=ts.LengthGroupedSampler([1 + i for i in range(len(one))]), **options)
        if kind == "concatenated":
            joined: Any = ConcatDataset([one, two])
            return DataLoader(joined, size, sampler=sampler(joined), **options)
        return {
            name: DataLoader(each, size, sampler=sampler(each), **options) for name, each in (("a", one), ("b", two))
        }

    return make


@pytest.mark.parametrize("kept", [True, False])
@pytest.mark.parametrize("kind", ["several", "grouped", "concatenated"])
def test_arrays_for_an_epoch_have_its_length(kind: str, kept: bool, tmp_path: Path) -> None:
    options: Any = {"directory": str(tmp_path), "train_batch_size": 4, "epochs": 3}
    make = of_curriculum(kind, kept=kept)
    if kind != "several" and not kept:
        with pytest.raises(ts.ModuleContractError, match=r"[Cc]reate (it|the sampler) in get_train_dataloader"):
            run(make, **options)
        return
    seen = run(make, combine_loaders="min" if kind == "several" else None, **options)["seen"]
    times = {"several": 1, "grouped": 1, "concatenated": 2}[kind]
    assert len(seen) == times * (1 + 2 + 3)
    last = sorted(index for step in seen[-3 * times :] for name, index in step if name != "b")
    assert last == sorted([*range(12)] * times)


@pytest.mark.processes
def test_persistent_workers_see_several_loaders_grow(tmp_path: Path) -> None:
    options: Any = {"train_batch_size": 4, "epochs": 3, "combine_loaders": "min"}
    plain = run(of_curriculum("several", kept=True), directory=str(tmp_path / "a"), **options)
    worked = run(of_curriculum("several", kept=True, workers=1), directory=str(tmp_path / "b"), **options)
    assert (worked["seen"], worked["weights"]) == (plain["seen"], plain["weights"])


def test_rows_and_concatenations_of_another_length_are_refused(tmp_path: Path) -> None:
    grows = Curriculum()
    fixed: Any
    for fixed in (ConcatDataset([grows, Sequences(4)]), ts.PackedDataset(Lists(grows), 30)):
        grows.set_epoch(0)
        with pytest.raises(ts.ModuleContractError, match="Create it in get_train_dataloader"):
            run(
                lambda sampler, size, data=fixed: DataLoader(
                    data, size, sampler=sampler(data), collate_fn=Lists.masked
                ),
                directory=str(tmp_path),
                train_batch_size=2,
            )


@pytest.mark.parametrize("stop_at", [2, 6])
def test_samples_that_depend_on_the_epoch_cause_no_warning(
    stop_at: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    options: Any = {"directory": str(tmp_path), "every_step": 1, "train_batch_size": 2, "combine_loaders": "min"}
    whole = run(of_curriculum("several", kept=True), **{**options, "directory": str(tmp_path / "whole")})
    run(of_curriculum("several", kept=True), stop_at=stop_at, **options)
    rest = run(of_curriculum("several", kept=True), resume=True, **options)
    assert rest["weights"] == whole["weights"]
    assert "data.sample " not in caplog.text
