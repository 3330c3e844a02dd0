"""Each rank has a step log with its share of the loss, its samples and its random states."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

import trainstack as ts
from tests.helpers.modules import Classifier, arguments, numbers
from tests.helpers.processes import run_world
from tests.helpers.workers.recording import recorded
from trainstack.step_log import contradicting_checkpoints, ranks_of, read_step_log

pytestmark = pytest.mark.distributed


def test_two_ranks_record_their_parts_and_one_rank_continues(tmp_path: Path) -> None:
    assert run_world(2, recorded, directory=str(tmp_path / "two")) == [8, 8]
    recorded(str(tmp_path / "one"), backend="sp")

    run = tmp_path / "two"
    assert ranks_of(run) == [0, 1]
    first, second = (read_step_log(run, rank) for rank in (0, 1))
    whole = read_step_log(tmp_path / "one")
    assert (first.entries["step"] == second.entries["step"]).all()
    assert (first.entries["norm"] == second.entries["norm"]).all()
    assert (first.entries["rates"] == second.entries["rates"]).all()
    assert not (first.entries["samples"] == second.entries["samples"]).any()
    assert not (first.entries["samples"] == whole.entries["samples"]).any()
    assert [start.rank for log in (first, second) for start in log.segments] == [0, 1]
    assert first.segments[0].run_id == second.segments[0].run_id
    assert (first.damage, second.damage, contradicting_checkpoints(run)) == (None, None, [])

    mine, theirs = first.details(1), second.details(1)
    assert mine is not None
    assert theirs is not None
    assert mine.generators["torch"] != theirs.generators["torch"]
    assert mine.batch != theirs.batch

    # Continued from step 6 on one rank: later steps of the second rank did not lead to the newest state.
    checkpoint = next(info for info in ts.list_checkpoints(run / "checkpoints") if info.global_step == 6)
    module = Classifier(numbers(24), dropout=0.2, optimizer=torch.optim.Adam)
    ts.Trainer(
        module, arguments(run, train_batch_size=6, epochs=2, log_every=2, writers=["csv"], resume=str(checkpoint.path))
    ).train()
    first, second = (read_step_log(run, rank) for rank in (0, 1))
    assert [start.world_size for start in first.segments] == [2, 1]
    assert first.entries["step"].tolist() == list(range(1, 9))
    assert second.entries["step"].tolist() == list(range(1, 7))
    assert (first.repeated, first.contradictions) == ({}, [])


def test_the_shares_of_the_ranks_add_up_to_the_loss(tmp_path: Path) -> None:
    """Without dropout the two shares add up to the loss of the whole batch."""
    run_world(2, recorded, directory=str(tmp_path / "two"), dropout=0.0)
    recorded(str(tmp_path / "one"), backend="sp", dropout=0.0)
    shares = [read_step_log(tmp_path / "two", rank).entries["loss"] for rank in (0, 1)]
    np.testing.assert_allclose(shares[0] + shares[1], read_step_log(tmp_path / "one").entries["loss"], rtol=1e-5)


def test_sharded_parameters_are_recorded_by_the_rows_of_each_rank(tmp_path: Path) -> None:
    run_world(2, recorded, directory=str(tmp_path), backend="fsdp", record="full")
    first, second = (read_step_log(tmp_path, rank) for rank in (0, 1))
    mine, theirs = first.details(3), second.details(3)
    assert mine is not None
    assert theirs is not None
    assert list(mine.parameters) == list(theirs.parameters)
    assert len(mine.weights) == 4
    assert not (mine.weights == theirs.weights).any()
    assert not (mine.gradients == theirs.gradients).any()
