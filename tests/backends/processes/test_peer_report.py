"""The report on ranks that do not answer: their host, the time since the last answer, the likely reason first."""

from __future__ import annotations

import time
from contextlib import suppress
from typing import Any

import pytest
from torch.distributed import HashStore  # type: ignore[attr-defined]

import trainstack as ts
from tests.helpers.patience import patience
from trainstack._store import StoreSilentError, TimedStore
from trainstack.backends.processes import watchdog
from trainstack.backends.processes.peer_report import Place, decode_place, encode_place, missing_peers
from trainstack.backends.processes.watchdog import PeerWatchdog

TIMED_OUT = "Timed out waiting 3000ms for recv operation to complete"
CLOSED = "Connection closed by peer [10.0.0.2]:1234"


def place(host: str, silent: bool = False, age_s: float = 0.0, text: str = "global step 3") -> Place:
    return Place(host=host, when=time.time() - age_s, text=text, silent=silent)


def test_a_silent_host_is_named_first_with_its_ranks() -> None:
    """H-6."""
    places = {rank: place("host6") for rank in range(2)} | {rank: place("host7", True, 17) for rank in range(2, 10)}
    said = missing_peers(0, TIMED_OUT, places).splitlines()
    assert said[1] == ("  all 8 ranks of host7 are silent for 17 s (ranks 2-9). Last known: global step 3")
    assert said[2] == "  ranks 0, 1 on host6: global step 3"
    assert said[3] == "Each of these hosts is down, or the network between it and host6 is interrupted: host7."
    assert said[4].startswith("A process that does not answer has ended")
    assert len(said) == 6


def test_closed_connections_point_to_a_process_before_the_network() -> None:
    said = missing_peers(0, CLOSED, {0: place("a"), 1: place("b", True, 2)}).splitlines()
    assert said[1] == "  rank 1, the only one of b, is silent for 2 s. Last known: global step 3"
    assert said[3].startswith("A process that does not answer has ended")
    assert "network between it and a is interrupted" in said[4]


@pytest.mark.parametrize("hosts", [("a", "a"), ("a", "")], ids=["one host", "a rank without any report"])
def test_the_network_is_not_blamed_without_a_lost_host(hosts: tuple[str, str]) -> None:
    said = missing_peers(0, TIMED_OUT, {0: place(hosts[0]), 1: place(hosts[1], True, 5)})
    assert "  rank 1: does not answer. Last known 5 s ago: global step 3" in said
    assert "network" not in said


def test_a_host_of_which_one_rank_answers_is_not_lost() -> None:
    said = missing_peers(0, TIMED_OUT, {0: place("a"), 1: place("b"), 2: place("b", True, 5)})
    assert "  rank 2 on b: does not answer. Last known 5 s ago: global step 3" in said
    assert "network" not in said


def test_places_are_encoded_and_decoded() -> None:
    there = decode_place(encode_place("global step 7"), silent=True)
    assert there.text == "global step 7"
    assert there.age_s < 60
    assert decode_place(None, silent=True).answer == "does not answer. Last known 0 s ago: nothing"


def test_an_age_is_not_negative_where_clocks_differ() -> None:
    assert place("a", age_s=-3600).age_s == 0


def watchdogs(monkeypatch: pytest.MonkeyPatch, size: int) -> list[PeerWatchdog]:
    monkeypatch.setattr(watchdog, "PAUSE_S", 0.01)
    monkeypatch.setattr(watchdog, "ANSWER_S", 0.3)
    store = HashStore()
    return [
        PeerWatchdog(TimedStore(store, 5), rank, size, 1, 0, lambda: "step 3", lambda: None) for rank in range(size)
    ]


def failed() -> ZeroDivisionError:
    try:
        raise ZeroDivisionError("divides by zero\nsecond line")
    except ZeroDivisionError as error:
        return error


def test_the_failed_rank_and_rank_0_print_the_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    """P-M5: on 1,000 ranks it was 100,000 lines."""
    ranks = watchdogs(monkeypatch, 3)
    error = failed()
    assert ranks[1].resolve_error(error) is error
    main, other = (str(ranks[rank].resolve_error(RuntimeError("/gloo/ closed"))) for rank in (0, 2))
    assert main.startswith("rank 1 failed, so rank 0 stops too. There, on ")
    assert "Traceback (most recent call last)" in main
    assert other.count("\n") == 0
    assert other.endswith(": ZeroDivisionError: divides by zero (its output has the traceback)")


def test_a_pending_store_request_is_reported_without_a_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    rank = watchdogs(monkeypatch, 2)[1]
    rank._store._pending[object()] = time.monotonic() - 17
    begin = time.monotonic()
    said = rank.resolve_error(RuntimeError("[/x/gloo/y.cc:1] Timed out waiting"))
    rank.stop()
    assert time.monotonic() - begin < patience(1)
    assert isinstance(said, ts.PeerError)
    assert "has not answered for 17 s" in str(said)
    assert "It was at step 3" in str(said)


def test_a_rank_asks_for_the_places_if_the_one_that_asked_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    rank, waits, wait_for = watchdogs(monkeypatch, 2)[1], list[float](), TimedStore.wait_for
    rank._store.set("asking/1/0", "0")  # rank 0 sends no report

    def waiting(store: TimedStore, keys: list[str], seconds: float, **options: Any) -> list[str]:
        waits.append(seconds)
        return wait_for(store, keys, seconds, **options)

    monkeypatch.setattr(TimedStore, "wait_for", waiting)
    said = str(rank.resolve_error(RuntimeError("[/x/gloo/y.cc:1] Timed out waiting"))).splitlines()
    assert said[1].startswith("  rank 0: ")
    assert said[2].startswith("  rank 1: step 3; ")
    asks_for_s = rank._pause + watchdog.ANSWER_S
    assert asks_for_s < waits[0] < 3 * asks_for_s


def test_a_silent_store_is_a_peer_error(monkeypatch: pytest.MonkeyPatch) -> None:
    said = watchdogs(monkeypatch, 2)[1].resolve_error(StoreSilentError("the store at a:1 has not answered for 9 s"))
    assert isinstance(said, ts.PeerError)
    assert "the store at a:1 has not answered for 9 s" in str(said)


def test_an_abort_is_recorded_before_the_collectives_return() -> None:
    """G-8."""
    from trainstack.backends.processes.communicator import Communicator, GroupCommunicator

    Communicator().raise_if_aborted()

    class Group:
        def abort(self) -> None:
            seen.append(comm.aborted)

    comm, seen = object.__new__(GroupCommunicator), list[bool]()
    comm._group, comm._groups, comm.rank, comm.size = Group(), (), 0, 2  # type: ignore[assignment]
    with suppress(Exception):
        comm._abort_collectives()
    assert seen == [True]
    with pytest.raises(RuntimeError, match="were aborted"):
        comm.raise_if_aborted()
