"""If a process fails or does not start, the others end within a bounded time, and each reports the cause."""

from __future__ import annotations

import re
import socket
from pathlib import Path
from typing import Any

import pytest

import trainstack as ts
from tests.helpers.modules import Classifier, train, weights
from tests.helpers.patience import patience
from tests.helpers.processes import run_world
from tests.helpers.workers import failures
from trainstack.backends.processes.environment import detect_process_info
from trainstack.backends.processes.rendezvous import rendezvous_store

pytestmark = pytest.mark.distributed

SECONDS = patience(10)  # a rank without a message waits for half an hour


@pytest.mark.spec("FN-35", "F209")
@pytest.mark.parametrize(
    ("how", "culprit"),
    [
        ("raise", 0),
        ("raise", 1),
        pytest.param("hook", 0, marks=pytest.mark.long),
        ("hook", 1),
        ("validation", 0),
        pytest.param("validation", 1, marks=pytest.mark.long),
    ],
)
def test_when_one_rank_raises_all_end_with_its_traceback(how: str, culprit: int, tmp_path: Path) -> None:
    results = run_world(2, failures.failure, fresh=True, directory=str(tmp_path), how=how, culprit=culprit)

    reason = "divides by zero" if how == "raise" else "finds nothing"
    survivor = results[1 - culprit]
    assert reason in results[culprit]["error"]
    assert survivor["error"].startswith(f"PeerError: rank {culprit} failed")
    assert reason in survivor["error"]
    assert survivor["seconds"] < SECONDS


def test_an_error_caught_on_all_ranks_leaves_later_exchanges_intact() -> None:
    for rank in run_world(2, failures.caught, fresh=True):
        assert "has no test data" in rank["said"]
        assert rank["steps"] == 4


@pytest.mark.parametrize("culprit", [0, 1])
def test_a_failure_in_an_earlier_step_reaches_ranks_ahead(culprit: int) -> None:
    results = run_world(2, failures.failure_behind, fresh=True, culprit=culprit)

    assert results[culprit]["error"] == "ZeroDivisionError: divides by zero"
    said = results[1 - culprit]["error"]
    assert said.startswith(f"PeerError: rank {culprit} failed, so rank {1 - culprit} stops too.")
    assert "divides by zero" in said


@pytest.mark.spec("FN-35")
def test_a_killed_rank_is_named() -> None:
    survivor, killed = run_world(2, failures.late, fresh=True, may_fail=True, how="killed")

    assert killed["exit"] == -9
    assert survivor["error"].startswith("PeerError: rank 0 has lost the connection to another process")
    last = r"rank 1: does not answer. Last known \d+ s ago: epoch 0, global step 3; train > train_epoch"
    assert re.search(last, survivor["error"])
    assert "memory runs out" in survivor["error"]
    assert survivor["seconds"] < SECONDS


@pytest.mark.parametrize(
    ("how", "step", "place"),
    [
        ("train_step", 3, "forward > train_step, at {file}"),
        ("on_end_val_epoch", 6, "validate > evaluate > on_end_val_epoch, at {file}"),
    ],
)
def test_a_timeout_reports_the_place_of_each_rank(how: str, step: int, place: str) -> None:
    waiting, late = run_world(2, failures.late, fresh=True, how=how)

    said = waiting["error"].splitlines()
    assert said[0].startswith("PeerError: rank 0 has lost the connection to another process (Timed out waiting 3000ms")
    assert said[1].startswith("  rank 0: epoch ")
    assert said[2].startswith(f"  rank 1: epoch 0, global step {step}; train > train_epoch > ")
    assert place.format(file=failures.__file__) in said[2]
    assert said[2].endswith(": time.sleep(seconds)")
    assert "timeout_s" in said[3]
    assert late["woken"], "by rank 0, which had its error while the other one still slept"
    assert late["error"].startswith("PeerError")


def test_an_error_names_the_different_collectives_of_ranks() -> None:
    for rank in run_world(2, failures.late, fresh=True, how="collective"):
        assert "rank 0: epoch 0, global step 4; train > train_epoch > train_steps" in rank["error"]
        assert "rank 1: epoch 0, global step 3; " in rank["error"]
        assert "> on_end_train_step > gather > " in rank["error"]
        assert "not below `if rank == 0:`" in rank["error"]


def test_a_rank_alone_at_the_rendezvous_names_the_missing_one() -> None:
    main, other = run_world(2, failures.late, fresh=True, how="main alone")

    assert other["error"] is None
    assert main["error"].startswith("TrainstackError: rank 0 of 2, on ")
    assert re.search(r"has not met the others at 127.0.0.1:\d+ within 3 s \(rank 1 did not come\)", main["error"])
    assert "if rank == 0:" in main["error"]


def test_a_port_in_use_is_named() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        variables = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}
        place = detect_process_info({**variables, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)})
        assert place is not None

        with pytest.raises(ts.TrainstackError, match=f"127.0.0.1:{port}: the port is in use.*MASTER_PORT"):
            rendezvous_store(place, 1.0, {})


@pytest.mark.spec("PMB-17", "FN-01")
@pytest.mark.parametrize("how", ["train_step", pytest.param("validate", marks=pytest.mark.long), "get_optimizers"])
def test_no_rank_waits_for_a_failed_rank_in_adopted_groups(how: str, tmp_path: Path) -> None:
    """The group stays whole: another trainer can use it."""
    survivor, failed = run_world(2, failures.adopted_failure, fresh=True, how=how)

    assert failed["said"] == "ZeroDivisionError: rank one divides by zero"
    assert survivor["said"].startswith("PeerError: rank 1 failed, so rank 0 stops too.")
    assert "rank one divides by zero" in survivor["said"]
    assert survivor["seconds"] < SECONDS
    alone: Any = Classifier()
    train(alone, tmp_path)
    for rank in (survivor, failed):
        assert rank["group"]
        assert rank["weights"] == pytest.approx(weights(alone).tolist(), abs=1e-5)
