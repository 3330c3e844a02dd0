"""The wait of other ranks for files of rank 0 is not subject to the time limit of collectives."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers.patience import patience
from tests.helpers.processes import run_world
from tests.helpers.workers import waiting

pytestmark = pytest.mark.distributed


def test_a_save_may_take_longer_than_a_collective(tmp_path: Path) -> None:
    for rank in run_world(2, waiting.slow_files, directory=str(tmp_path), how="save", seconds=3.5, timeout_s=3.0):
        assert rank["error"] is None
        assert rank["seconds"] > 3


@pytest.mark.long
@pytest.mark.parametrize("how", ["save", "export", "path"])
def test_files_may_take_longer_than_the_time_limit(how: str, tmp_path: Path) -> None:
    for rank in run_world(
        2, waiting.slow_files, directory=str(tmp_path), how=how, seconds=12.0, timeout_s=5.0, fresh=True
    ):
        assert rank["error"] is None


@pytest.mark.long
def test_three_ranks_wait_for_a_save(tmp_path: Path) -> None:
    changes = {"train_batch_size": 6, "timeout_s": 4.0}
    for rank in run_world(3, waiting.slow_files, directory=str(tmp_path), how="save", seconds=8.0, **changes):
        assert rank["error"] is None


@pytest.mark.long
def test_the_longest_wait_is_an_argument(tmp_path: Path) -> None:
    main, other = run_world(
        2,
        waiting.slow_files,
        directory=str(tmp_path),
        how="save",
        seconds=8.0,
        timeout_s=30.0,
        rank_zero_timeout_s=2.0,
        fresh=True,
    )
    assert "rank 1 has waited 2 s for rank 0, which is alive and has not finished saving a checkpoint" in other["error"]
    assert "TrainerArguments(rank_zero_timeout_s=...)" in other["error"]
    assert 2 <= other["seconds"] < patience(8)
    assert main["error"].startswith("PeerError: rank 1 failed")


@pytest.mark.long
def test_a_kill_during_a_save_is_noticed_in_time(tmp_path: Path) -> None:
    main, other = run_world(
        2,
        waiting.slow_files,
        directory=str(tmp_path),
        how="killed",
        seconds=3.0,
        timeout_s=5.0,
        fresh=True,
        may_fail=True,
    )
    assert main["exit"] == -9
    assert other["error"].startswith("PeerError: rank 1 has lost the connection to another process")
    assert other["seconds"] < 3 + 5 + 7 + 60
