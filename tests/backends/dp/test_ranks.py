"""Private training over processes: one mechanism for any number of processes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.helpers.private_runs import by_hand
from tests.helpers.processes import run_world
from tests.helpers.workers import private
from trainstack.backends.dp import epsilon_of

NOISY = {"noise_multiplier": 0.7}


@pytest.mark.spec("PMB-22")
@pytest.mark.parametrize("size", [pytest.param(2, marks=pytest.mark.long), 3])
@pytest.mark.processes
def test_processes_run_the_mechanism_of_one_process(size: int, tmp_path: Path) -> None:
    batch = 8  # 3 processes cannot divide it evenly, but they share samples of random size
    runs = {
        "plain": {"epochs": 2, "train_batch_size": batch},
        "chunks": {"epochs": 2, "train_batch_size": batch, "gpu_batch_size_limit": 1},
        "empty parts": {"train_batch_size": size, "promise": {**NOISY, "debug_seed": 3}},
        "seeded": {"train_batch_size": batch, "promise": NOISY},
        "secure": {"train_batch_size": batch, "promise": {**NOISY, "secure": True}},
        "stopped": {"train_batch_size": batch, "epochs": 9, "promise": {**NOISY, "max_epsilon": 8.0}},
    }
    ranks = run_world(size, private.private_ranks, directory=str(tmp_path), runs=runs)

    for name in ("plain", "chunks"):
        for rank in ranks:
            reached = torch.tensor(rank[name]["weights"], dtype=torch.float64)
            assert (reached - by_hand(batch=batch)).abs().max() <= 1e-6
    for name in runs:
        assert all(rank[name] == ranks[0][name] for rank in ranks)  # the same weights, to the bit, and the same account
    for name in ("seeded", "secure", "empty parts"):
        assert ranks[0][name]["steps"] == ranks[0][name]["planned"]
    assert ranks[0]["seeded"]["epsilon"] == ranks[0]["secure"]["epsilon"] is not None
    assert ranks[0]["seeded"]["weights"] != ranks[0]["secure"]["weights"]
    stopped, q = ranks[0]["stopped"], batch / 41
    assert stopped["steps"] < stopped["planned"]
    assert stopped["epsilon"] <= 8.0 < epsilon_of([(0.7, q, stopped["steps"] + 1)], 1e-4, "rdp")


@pytest.mark.processes
def test_a_run_resumes_on_ranks_that_cannot_divide_its_batch(tmp_path: Path) -> None:
    for size, steps in ((2, 3), (3, 6)):
        run = {"train_batch_size": 20, "gpu_batch_size_limit": 5, "max_steps": steps, "resume": "auto", "saves": True}
        ranks = run_world(size, private.private_ranks, directory=str(tmp_path), runs={"moved": run})
        assert all(rank["moved"] == ranks[0]["moved"] for rank in ranks)
        assert ranks[0]["moved"]["steps"] == steps

    reached = torch.tensor(ranks[0]["moved"]["weights"], dtype=torch.float64)
    assert (reached - by_hand(batch=20)).abs().max() <= 1e-6


@pytest.mark.processes
def test_a_failed_settlement_still_leaves_the_process_group(tmp_path: Path) -> None:
    main, other = run_world(2, private.closed_on_a_full_disk, directory=str(tmp_path))
    assert "No space left on device" in main["error"]
    assert other["error"] is None
    assert not main["open"]
    assert not other["open"]
    assert main["steps"] == other["steps"] == 6 + 6  # steps that could not be refunded stay spent: the planned ones


@pytest.mark.processes
def test_a_refusal_on_another_process_reaches_the_ledger(tmp_path: Path) -> None:
    main, other = run_world(2, private.carries_records, directory=str(tmp_path))
    assert "kept changed in the course of training" in other["error"]
    assert "changed on another process" in main["error"]
    assert "changed on another process" in main["void"][0]
