"""Data of another length in each epoch, and streams that state a length."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import DataLoader

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
    assert "stands for" not in caplog.text


@pytest.mark.parametrize(("count", "steps"), [(12, 2), (40, 5)])
def test_other_samples_than_stated_are_reported_once(
    count: int, steps: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    result = streamed(count=count, stated=24, directory=str(tmp_path))

    assert len(result["seen"]) == 2 * steps
    assert (
        caplog.text.count(f"epoch 0 had {steps} global steps, and the length of the training loader stands for 3") == 1
    )
    assert caplog.text.count("stands for") == 1


@pytest.mark.parametrize(("end", "said"), [({}, 1), ({"max_steps": 3}, 0), ({"max_train_steps_per_epoch": 2}, 0)])
def test_a_stream_without_an_end_asks_for_one(
    end: dict[str, int], said: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        streamed(directory=str(tmp_path), **end)

    assert caplog.text.count("the training loader has no length") == said
