"""Under torchrun: several nodes, and a group that is restarted."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.backends.processes.test_ddp import alone, close
from tests.helpers.processes import run_agents
from tests.helpers.workers import checkpoints, training

pytestmark = pytest.mark.distributed


@pytest.mark.long
def test_two_nodes_of_two_processes_end_as_one_process() -> None:
    """Two agents on the loopback interface, which meet over c10d."""
    ranks = run_agents(2, 2, training.equality, directory="unused")

    assert len(ranks) == 4
    for rank in ranks:
        assert close(rank["weights"], alone()["weights"])
        assert rank["outputs"]["text"] == alone()["outputs"]["text"]


def test_a_restarted_group_continues_from_its_newest_checkpoint(tmp_path: Path) -> None:
    ranks = run_agents(
        1, 2, checkpoints.killed_once, "--max-restarts=1", "--monitor-interval=0.2", directory=str(tmp_path)
    )

    for rank in ranks:
        assert rank["restarts"] == 1
        assert rank["steps"] == 18
        assert close(rank["weights"], alone()["weights"])


@pytest.mark.parametrize("backend", ["ddp", pytest.param("fsdp", marks=pytest.mark.long)])
def test_the_rest_continues_exactly_when_a_node_dies(backend: str, tmp_path: Path) -> None:
    """`--nnodes=1:2`: one of two nodes is killed with its agent; the other continues with the same global batches."""
    options = {"directory": str(tmp_path), "node_dies": True, "backend": backend}
    ranks = run_agents(
        2, 1, checkpoints.killed_once, "--max-restarts=3", "--monitor-interval=0.2", elastic=True, **options
    )

    assert ranks[0]["size"] == 1
    assert ranks[0]["steps"] == 18
    assert close(ranks[0]["weights"], alone()["weights"])
