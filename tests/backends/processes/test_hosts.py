"""Several hosts, each a network namespace: wrong names, wrong interfaces, pulled cables."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.hosts import Hosts, can_make_hosts
from tests.helpers.patience import patience
from tests.helpers.workers import networks

pytestmark = [pytest.mark.long, pytest.mark.hosts, pytest.mark.processes]

TIMEOUT_S = 6.0


@pytest.fixture
def make() -> Iterator[Callable[..., Hosts]]:
    if not can_make_hosts():
        pytest.skip("it needs root, and `ip netns add`")
    made: list[Hosts] = []

    def hosts(*args: Any, **options: Any) -> Hosts:
        made.append(Hosts(*args, **options))
        return made[-1]

    yield hosts
    for each in made:
        each.close()


def test_a_host_name_that_resolves_to_loopback_is_harmless(make: Callable[..., Hosts], tmp_path: Path) -> None:
    """H-3: on Debian and Ubuntu gloo listened on 127.0.1.1."""
    weights = {}
    for own in (None, "127.0.1.1"):
        folder = tmp_path / str(own)
        folder.mkdir()
        hosts = make(2, own)
        hosts.start(folder, networks.over_hosts)
        results = hosts.results(folder, 30)
        hosts.close()
        assert [rank["error"] for rank in results] == ["", ""]
        assert [rank["interface"] for rank in results] == [None if own is None else "eth0"] * 2
        weights[own] = [rank["weights"] for rank in results]
    assert weights[None] == weights["127.0.1.1"]


def test_a_missing_interface_ends_both_ranks_at_once(make: Callable[..., Hosts], tmp_path: Path) -> None:
    """H-8, H-4."""
    hosts = make(2)
    hosts.start(tmp_path, networks.over_hosts, timeout_s=60.0, interface_of_rank_1="eth9")
    other, wrong = hosts.results(tmp_path, 30)
    assert wrong["error"].startswith("ConfigurationError: GLOO_SOCKET_IFNAME=eth9: host1 has no interface 'eth9'")
    assert "eth0 10.77.0.2" in wrong["error"]
    assert other["error"].startswith("PeerError: rank 1 on host1 failed before its process groups were made")
    assert other["seconds"] < patience(10)


def cut(make: Callable[..., Hosts], folder: Path, lost: int, count: int = 2) -> list[Any]:
    hosts = make(count)
    hosts.start(folder, networks.over_hosts, timeout_s=TIMEOUT_S, how="cut")
    deadline = time.monotonic() + patience(30)
    while not all((folder / f"{rank}.step").exists() for rank in range(count)):
        assert time.monotonic() < deadline, (folder / "0.stderr").read_text()[-3000:]
        time.sleep(0.05)
    hosts.pull(lost)
    (folder / "cut").touch()
    return hosts.results(folder, TIMEOUT_S + 10)


@pytest.mark.parametrize("lost", [0, 1])
def test_ranks_name_the_network_when_a_cable_is_pulled(lost: int, make: Callable[..., Hosts], tmp_path: Path) -> None:
    """H-1: the rank without the store waited for 16 minutes. H-6: no message named the network."""
    main, other = cut(make, tmp_path, lost)
    assert "  rank 1, the only one of host1, is silent for" in main["error"]
    assert "the network between it and host0 is interrupted: host1" in main["error"]
    assert "the store at 10.77.0.1:" in other["error"]
    assert "the network between 10.77.0.1 and host1 is interrupted, or 10.77.0.1 is down" in other["error"]
    for rank in (main, other):
        assert rank["error"].startswith("PeerError: ")
        assert rank["after_cut"] < patience(TIMEOUT_S + 7)


def test_of_three_hosts_the_lost_one_is_named(make: Callable[..., Hosts], tmp_path: Path) -> None:
    results = cut(make, tmp_path, 2, 3)
    for rank in results[:2]:
        assert "host2, is silent for" in rank["error"] or "rank 2" in rank["error"] or "rank 0 failed" in rank["error"]
    assert any("host2, is silent for" in rank["error"] for rank in results[:2])
    assert all(rank["after_cut"] < patience(TIMEOUT_S + 7) for rank in results)
