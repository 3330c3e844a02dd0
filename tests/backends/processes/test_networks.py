"""Ranks over a network: each rank ends in time when it is cut, and on one host no port is open to other hosts."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

import trainstack as ts
from tests.helpers.modules import Classifier, arguments
from tests.helpers.patience import patience
from tests.helpers.processes import run_world
from tests.helpers.workers import networks

pytestmark = pytest.mark.processes

LOOPBACK = {"0100007F", "0000000000000000FFFF00000100007F", "00000000000000000000000001000000"}


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_on_one_host_all_sockets_listen_on_loopback_only() -> None:
    """Sec-2: torch's store and gloo have no authentication."""
    for rank, found in enumerate(run_world(2, networks.sockets, fresh=True)):
        assert set(found["listens"]) <= LOOPBACK
        assert len(found["listens"]) >= 1 + (rank == 0), "gloo, and in rank 0 the store"
        assert found["during"] == "lo"
        assert found["after"] is None


@pytest.mark.long
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("restarts", [0, 1])  # with restarts rank 0 hosts the store, without them the agent does
def test_launch_listens_on_loopback_only_and_shares_a_token(restarts: int) -> None:
    """Sec-2."""
    for found in ts.launch(networks.launched, nproc=2, max_restarts=restarts):
        assert found["listens"]
        assert set(found["listens"]) <= LOOPBACK
        assert found["token"] == 32
    assert "TRAINSTACK_TOKEN" not in os.environ


@pytest.mark.parametrize(("culprit", "how"), [(0, "device"), (1, "device"), (1, "interface")])
def test_a_rank_that_fails_in_open_is_not_awaited(culprit: int, how: str) -> None:
    """H-4, P-M3: gloo would wait for it five times as long as its time-out."""
    results = run_world(2, networks.fails_in_open, fresh=True, culprit=culprit, how=how)

    reason = "device='cuda': torch finds no accelerator" if how == "device" else "GLOO_SOCKET_IFNAME=eth99"
    assert results[culprit]["error"].startswith(f"ConfigurationError: {reason}")
    said = results[1 - culprit]["error"]
    assert said.startswith(f"PeerError: rank {culprit} on ")
    assert reason in said
    assert all(rank["seconds"] < patience(5) for rank in results)


def test_ranks_check_for_stop_requests_twice_a_second() -> None:
    """T-16."""
    for rank in run_world(2, networks.stop_requests, steps=200):
        assert rank["steps"] == 200
        assert rank["looks"] <= 2 + 2 * rank["seconds"]


def test_ddp_without_a_launcher_says_how_to_start_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """T-8."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "OMPI_COMM_WORLD_RANK", "SLURM_PROCID"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(ts.ConfigurationError) as refused:
        ts.Trainer(Classifier(), arguments(tmp_path, backend="ddp")).train()
    assert "torchrun --nproc-per-node" in str(refused.value)
    assert "trainstack.launch(" in str(refused.value)


TIMEOUT_S = 3.0


def check_cut_off(how: str) -> None:
    _, cut = run_world(
        2, networks.cut_off, fresh=True, may_fail=True, timeout=40, how=how, timeout_s=TIMEOUT_S, sleep_s=TIMEOUT_S + 9
    )
    assert "the store at 127.0.0.1:" in cut["error"]
    assert "the network between 127.0.0.1 and" in cut["error"]
    assert cut["seconds"] < patience(TIMEOUT_S + 7)
    assert cut["closed"] < patience(TIMEOUT_S + 7)


@pytest.mark.long
@pytest.mark.parametrize("how", ["backward", "gather", "save", "stop", "first"])
def test_a_rank_cut_off_from_the_store_ends_in_time(how: str) -> None:
    """H-1: it waited until the network was back, or for 16 minutes."""
    check_cut_off(how)


@pytest.mark.long
def test_signal_handlers_run_in_a_rank_that_is_cut_off() -> None:
    """H-1."""
    _, cut = run_world(
        2, networks.cut_off, fresh=True, may_fail=True, timeout=60, how="sigterm", timeout_s=20.0, sleep_s=8.0
    )
    assert cut["error"].startswith("InterruptedError: a handler has run")
    assert cut["seconds"] < patience(2) + 8


@pytest.mark.long
def test_a_rank_killed_in_open_is_awaited_until_the_timeout() -> None:
    main, killed = run_world(2, networks.fails_in_open, fresh=True, may_fail=True, culprit=1, how="killed")
    assert killed["exit"] == -9
    assert "has waited 2 s for a process group of 2 ranks" in main["error"] or "closed" in main["error"]
    assert main["seconds"] < patience(2 + 7)
