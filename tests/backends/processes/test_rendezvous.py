"""Only ranks of this run with its secret may join, and no rank waits for a failed one."""

from __future__ import annotations

import logging
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.distributed import HashStore, TCPStore  # type: ignore[attr-defined]

import trainstack as ts
from tests.helpers.patience import patience
from trainstack._store import LOOPBACK, TimedStore
from trainstack.backends.processes import network
from trainstack.backends.processes.environment import ProcessInfo, detect_process_info, is_on_one_host
from trainstack.backends.processes.opening import (
    GROUP_MARGIN_S,
    Opening,
    bound_device,
    group_seconds,
    log_hosts,
    reachable_address,
)
from trainstack.backends.processes.rendezvous import Agreement, Member, packed_members, run_identity


def member(name: str, nonce: str, **changes: Any) -> Member:
    return replace(Member(nonce=nonce, run={"run_id": name, "script": "train.py"}, host=f"host{name}"), **changes)


class Meeting:
    """Agreements of several processes over one store."""

    def __init__(self) -> None:
        self._store = HashStore()
        self._pool = ThreadPoolExecutor(8)

    def come(self, who: Member, rank: int, size: int = 2, token: str = "", seconds: float = 20.0) -> Any:
        agreement = Agreement(
            TimedStore(self._store, patience(30)), who, rank, size, token, time.monotonic() + patience(seconds)
        )
        return self._pool.submit(agreement.lead if rank == 0 else agreement.follow)


class TestRuns:
    def test_a_rank_of_another_run_is_refused_on_both_sides(self, caplog: pytest.LogCaptureFixture) -> None:
        meeting = Meeting()
        with caplog.at_level(logging.WARNING, logger="trainstack"):
            main = meeting.come(member("A", "a0"), 0)
            with pytest.raises(ts.TrainstackError) as refused:
                meeting.come(member("B", "b1"), 1).result(patience(10))
            right = meeting.come(member("A", "a1"), 1)
            name, members = main.result(patience(10))

        assert right.result(patience(10)) == (name, members)
        assert [m.nonce for m in members] == ["a0", "a1"]
        for said in (str(refused.value), caplog.text):
            assert "rank 1 at hostB belongs to another run (run_id=B, script=train.py)" in said
            assert "rank 0 at hostA (run_id=A, script=train.py)" in said
            assert "Give each run another port" in said

    def test_a_different_launcher_id_is_refused_before_rank_0_looks(self) -> None:
        meeting = Meeting()
        meeting._store.set("trainstack/round", '{"nonce": "n", "run": {"SLURM_JOB_ID": "77"}, "host": "h"}')
        mine = Member(nonce="m", run={"SLURM_JOB_ID": "78"}, host="here")
        with pytest.raises(ts.TrainstackError, match=r"\(SLURM_JOB_ID=78\) than rank 0 at h \(SLURM_JOB_ID=77\)"):
            meeting.come(mine, 1).result(patience(10))

    def test_a_rank_of_an_earlier_start_is_refused(self) -> None:
        meeting = Meeting()
        main = meeting.come(member("A", "a0"), 0)
        earlier = {"run_id": "A", "script": "train.py", "world_size": "3"}
        with pytest.raises(ts.TrainstackError, match="belongs to another run"):
            meeting.come(member("A", "old", run=earlier), 1).result(patience(10))
        meeting.come(member("A", "a1"), 1).result(patience(10))
        assert main.result(patience(10))[1][1].nonce == "a1"

    def test_rank_0_at_localhost_may_serve_other_hosts(self) -> None:
        """As under Kubeflow's first operator. LOCAL_WORLD_SIZE states that all ranks are on this host."""
        variables = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}
        for more, one_host in (({}, False), ({"LOCAL_WORLD_SIZE": "2"}, True)):
            environ = {**variables, **more}
            place = detect_process_info(environ)
            assert place is not None
            assert is_on_one_host(place, environ) is one_host

    def test_entries_of_an_earlier_group_are_ignored(self) -> None:
        meeting = Meeting()
        for number in range(3):
            late = meeting.come(member("A", f"{number}-1"), 1)  # it reads the earlier round
            main = meeting.come(member("A", f"{number}-0"), 0)
            assert late.result(patience(10))[0] == main.result(patience(10))[0] == f"{number}-0"

    def test_missing_ranks_are_named(self) -> None:
        meeting = Meeting()
        store = TimedStore(meeting._store, 5)
        with pytest.raises(TimeoutError, match=r"ranks 1, 2, 3, 4, 5, 6, 7, 8, \.\.\. did not come"):
            Agreement(store, member("A", "a0"), 0, 32, "", time.monotonic()).lead()
        with pytest.raises(TimeoutError, match="rank 0 did not come"):
            Agreement(TimedStore(HashStore(), 5), member("A", "a1"), 1, 32, "", time.monotonic()).follow()

    @pytest.mark.parametrize(
        ("launcher", "environ", "found"),
        [
            ("torchrun", {"TORCHELASTIC_RUN_ID": "r", "SLURM_JOB_ID": "1"}, {"TORCHELASTIC_RUN_ID": "r"}),
            ("slurm", {"SLURM_JOB_ID": "1", "SLURM_STEP_ID": "2"}, {"SLURM_JOB_ID": "1", "SLURM_STEP_ID": "2"}),
            ("openmpi", {"PMIX_NAMESPACE": "p"}, {"PMIX_NAMESPACE": "p"}),
            ("explicit", {"TORCHELASTIC_RUN_ID": "r"}, {}),
        ],
    )
    def test_the_launcher_names_the_run(
        self, launcher: Any, environ: dict[str, str], found: dict[str, str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("sys.argv", ["/some/where/train.py", "--lr=1"])
        place = ProcessInfo(
            rank=0, size=2, local_rank=0, local_size=2, node_rank=0, master_addr="a", master_port=1, launcher=launcher
        )
        common = {"world_size": "2", "script": "train.py"}
        assert run_identity(place, environ, None) == {**found, **common}
        assert run_identity(place, environ, "mine") == {**found, **common, "run_id": "mine"}


class TestTokens:
    def test_a_process_without_the_token_is_refused(self) -> None:
        meeting = Meeting()
        main = meeting.come(member("A", "a0"), 0, token="secret")
        for token in ("", "guessed"):
            with pytest.raises(ts.TrainstackError, match="does not have the TRAINSTACK_TOKEN of this run"):
                meeting.come(member("A", "stranger"), 1, token=token).result(patience(10))
        meeting.come(member("A", "a1"), 1, token="secret").result(patience(10))
        assert main.result(patience(10))[1][1].nonce == "a1"

    def test_rank_0_without_the_token_is_ignored(self) -> None:
        meeting = Meeting()
        stranger = Agreement(TimedStore(meeting._store, 5), member("A", "a0"), 0, 2, "guessed")
        meeting._store.set("trainstack/round", '{"nonce": "a0", "run": {"script": "train.py"}, "host": "h"}')
        mine = member("A", "a1")
        meeting._store.set(
            "trainstack/a0/confirmed", stranger._sign("confirmed", packed_members({0: member("A", "a0"), 1: mine}))
        )
        meeting._store.set(f"trainstack/reply/{mine.nonce}", "")
        with pytest.raises(TimeoutError, match="rank 0 did not come"):
            meeting.come(mine, 1, token="secret", seconds=0.05).result(patience(10))

    def test_an_answer_to_one_name_does_not_answer_another(self) -> None:
        agreement = Agreement(TimedStore(HashStore(), 5), member("A", "a0"), 0, 2, "secret")
        signed = agreement._sign("one name", "text")
        assert agreement._signed("one name", signed) == "text"
        assert agreement._signed("another", signed) is None
        assert agreement._signed("one name", signed + "!") is None


class TestOpening:
    def openings(self, seconds: float = 30.0) -> list[Opening]:
        store = HashStore()
        return [Opening(TimedStore(store, 5).under("words"), rank, 2, seconds) for rank in range(2)]

    @pytest.mark.parametrize("culprit", [0, 1])
    def test_a_failure_reaches_a_rank_that_waits_in_torch(self, culprit: int) -> None:
        both, over = self.openings(), threading.Event()
        waiting = ThreadPoolExecutor(1).submit(lambda: both[1 - culprit].run(over.wait))
        both[culprit].fail(ts.ConfigurationError("device='cuda': torch finds no accelerator"))
        try:
            with pytest.raises(ts.PeerError) as heard:
                waiting.result(patience(5))
        finally:
            over.set()
        assert f"rank {culprit} on {socket.gethostname()} failed before its process groups were made" in str(
            heard.value
        )
        assert "ConfigurationError: device='cuda'" in str(heard.value)

    def test_a_rank_that_hears_of_a_failure_confirms_it(self) -> None:
        store, over = HashStore(), threading.Event()
        both = [Opening(TimedStore(store, 5).under("words"), rank, 2, 30) for rank in range(2)]
        both[1].fail(OSError("no space left"))
        try:
            with pytest.raises(ts.PeerError, match="no space left"):
                both[0].run(over.wait)
        finally:
            over.set()
        assert TimedStore(store, 5).under("words").find("heard/0") == ""

    def test_a_rank_that_ends_without_report_is_awaited_until_timeout(self) -> None:
        over = threading.Event()
        try:
            with pytest.raises(
                ts.PeerError, match=r"has waited 0.1 s for a process group of 2 ranks.*GLOO_SOCKET_IFNAME"
            ):
                self.openings(0.1)[1].run(over.wait)
        finally:
            over.set()

    def test_a_lost_store_ends_the_wait(self) -> None:
        over = threading.Event()
        server = TCPStore(LOOPBACK, 0, is_master=True)
        client = TCPStore(LOOPBACK, server.port)
        waiting = ThreadPoolExecutor(1).submit(lambda: Opening(TimedStore(client, 5), 1, 2, 30).run(over.wait))
        del server
        try:
            with pytest.raises(ts.PeerError, match="the store has closed its connection to rank 1"):
                waiting.result(patience(5))
        finally:
            over.set()

    def test_a_broken_connection_is_explained_by_a_reported_failure(self) -> None:
        both = self.openings()
        both[1].fail(OSError("no space left"))

        def broken() -> None:
            raise RuntimeError("Gloo connectFullMesh failed: Connection reset by peer")

        with pytest.raises(ts.PeerError, match="OSError: no space left"):
            both[0].run(broken)

    def test_only_accelerators_are_bound_and_their_groups_have_more_time(self) -> None:
        """G-13, G-19."""
        assert bound_device(torch.device("cuda:1"), "nccl") == torch.device("cuda:1")
        assert bound_device(torch.device("cuda:1"), "gloo") is None
        assert bound_device(torch.device("cpu"), "gloo") is None
        assert bound_device(torch.device("mps"), "gloo") is None
        assert group_seconds(30, "gloo") == 30
        assert group_seconds(30, "nccl") == 30 + GROUP_MARGIN_S


class TestInterfaces:
    @pytest.fixture(autouse=True)
    def host(self, monkeypatch: pytest.MonkeyPatch) -> None:
        here = {"lo": ["127.0.0.1"], "eth0": ["10.77.0.1"], "eth1": ["10.78.0.1"]}
        monkeypatch.setattr(network, "interfaces", lambda: here)

    def choose(self, monkeypatch: pytest.MonkeyPatch, own: str | None, address: str, **environ: str) -> str | None:
        monkeypatch.setattr(network, "_address_of_own_name", lambda: own)
        return network.choose_interface(["host0", "host1"], False, address, environ)

    def test_on_one_host_gloo_listens_on_the_loopback_device(self) -> None:
        assert network.choose_interface(["h", "h"], True, "", {}) == "lo"

    @pytest.mark.parametrize("own", ["127.0.1.1", None, "10.78.0.1"])
    def test_over_hosts_gloo_uses_the_interface_of_the_store(
        self, own: str | None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        with caplog.at_level(logging.INFO, logger="trainstack"):
            assert self.choose(monkeypatch, own, "10.77.0.1") == "eth0"
        assert f"listens on eth0 (10.77.0.1), not on {own}" in caplog.text

    def test_a_correct_host_name_needs_no_interface(self, monkeypatch: pytest.MonkeyPatch) -> None:
        assert self.choose(monkeypatch, "10.77.0.1", "10.77.0.1") is None

    def test_a_loopback_name_is_refused_without_a_usable_interface(self, monkeypatch: pytest.MonkeyPatch) -> None:
        with pytest.raises(
            ts.ConfigurationError,
            match=r"resolves to 127.0.1.1.*Set GLOO_SOCKET_IFNAME .*lo 127.0.0.1, eth0 10.77.0.1, eth1 10.78.0.1",
        ):
            self.choose(monkeypatch, "127.0.1.1", "")

    def test_a_wrong_interface_variable_is_answered_with_existing_ones(self, monkeypatch: pytest.MonkeyPatch) -> None:
        with pytest.raises(ts.ConfigurationError, match=r"GLOO_SOCKET_IFNAME=eth0,eth9: .* no interface 'eth9'.*eth1"):
            self.choose(monkeypatch, "10.77.0.1", "10.77.0.1", GLOO_SOCKET_IFNAME="eth0,eth9")
        assert self.choose(monkeypatch, "127.0.1.1", "10.77.0.1", GLOO_SOCKET_IFNAME="eth1") is None

    def test_rank_0_is_reached_where_another_host_has_reached_it(self) -> None:
        members = [
            member("A", "0", host="h0", address="127.0.0.1", store_address="127.0.1.1"),
            member("A", "1", host="h0", address="127.0.0.1", store_address="127.0.1.1"),
            member("A", "2", host="h1", address="10.77.0.2", store_address="10.77.0.1"),
        ]
        assert [reachable_address(members, rank) for rank in range(3)] == ["10.77.0.1", "10.77.0.1", "10.77.0.2"]
        assert reachable_address(members[:2], 0) == ""

    def test_hosts_are_logged_if_there_are_several(self, caplog: pytest.LogCaptureFixture) -> None:
        members = [member("A", "0", host="h0", address="10.0.0.1"), member("A", "1", host="h1", address="10.0.0.2")]
        with caplog.at_level(logging.INFO, logger="trainstack"):
            log_hosts([members[0], members[0]])
            log_hosts(members)
        assert [record.getMessage() for record in caplog.records] == [
            "rendezvous of 2 ranks: 0 h0 10.0.0.1, 1 h1 10.0.0.2"
        ]


def test_the_interfaces_of_this_host_are_found() -> None:
    assert LOOPBACK in {address for addresses in network.interfaces().values() for address in addresses}
    assert network.local_address_to("127.0.0.1") == LOOPBACK
    assert network.local_address_to("no.such.host.invalid") is None
