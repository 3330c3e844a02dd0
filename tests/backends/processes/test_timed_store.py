"""Each wait for the store has an end, and signal handlers run during the wait."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

import trainstack as ts
from tests.helpers.patience import patience
from tests.helpers.processes import ROOT
from tests.helpers.proxy import Proxy
from trainstack._store import StoreSilentError, TimedStore, run_with_clock
from trainstack.backends.processes.environment import ProcessInfo
from trainstack.backends.processes.rendezvous import rendezvous_store


@pytest.fixture
def behind_proxy() -> Iterator[tuple[TimedStore, Proxy]]:
    """A client of a store on this host, and the proxy in between."""
    server = TCPStore("127.0.0.1", 0, is_master=True)
    proxy = Proxy(server.port)
    client = TCPStore("127.0.0.1", proxy.port, timeout=timedelta(seconds=10))
    yield TimedStore(PrefixStore("test", client), patience(5)), proxy
    proxy.close()


def rank_one(port: int) -> ProcessInfo:
    return ProcessInfo(
        rank=1,
        size=2,
        local_rank=1,
        local_size=2,
        node_rank=0,
        master_addr="127.0.0.1",
        master_port=port,
        launcher="explicit",
    )


def test_a_silent_store_is_named_when_the_timeout_expires(behind_proxy: Any) -> None:
    store, proxy = behind_proxy
    store.set("a", "1")
    assert store.get("a") == "1"
    assert store.find_all(["a", "missing"]) is None
    assert store.silent_s == 0
    proxy.open.clear()

    for request in (lambda s: s.get("a"), lambda s: s.find("a"), lambda s: s.add("n", 1), lambda s: s.delete("b")):
        begin = time.monotonic()
        with pytest.raises(StoreSilentError, match=rf"the store at 127.0.0.1:{proxy.port} has not answered for \d+ s"):
            request(store.within(0.1))
        assert time.monotonic() - begin < patience(0.5)
    assert store.silent_s >= 0.4

    proxy.open.set()
    assert store.get("a") == "1"  # a timeout does not close the connection
    deadline = time.monotonic() + patience(5)
    while store.silent_s and time.monotonic() < deadline:
        time.sleep(0.01)
    assert store.silent_s == 0


def test_waiting_for_a_key_ends_at_its_timeout(behind_proxy: Any) -> None:
    with pytest.raises(TimeoutError, match=r"not there within 0\.1 s"):
        behind_proxy[0].wait_for(["never"], 0.1)


def test_a_signal_handler_runs_while_the_store_is_silent(behind_proxy: Any) -> None:
    store, proxy = behind_proxy
    proxy.open.clear()

    def handler(number: int, frame: Any) -> None:
        raise InterruptedError("handled")

    before = signal.signal(signal.SIGUSR1, handler)
    begin = time.monotonic()
    try:
        threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGUSR1)).start()
        with pytest.raises(InterruptedError, match="handled"):
            store.get("a")
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert time.monotonic() - begin < patience(2)


def test_exceptions_of_thread_and_look_reach_the_caller() -> None:
    with pytest.raises(ZeroDivisionError):
        run_with_clock(lambda: 1 // 0, 5)

    def look() -> None:
        raise LookupError("a rank has failed")

    with pytest.raises(LookupError, match="a rank"):
        run_with_clock(lambda: time.sleep(3), 30, look)


def test_a_port_without_an_answer_ends_the_rendezvous_in_time() -> None:
    """torch 2.13.0: the client of a store has no limit there (P-S10)."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        begin = time.monotonic()
        with pytest.raises(
            ts.TrainstackError, match=rf"rank 1 of 2, on .*, has not met the others at 127.0.0.1:{port}"
        ):
            rendezvous_store(rank_one(port), 0.1, {})
        assert time.monotonic() - begin < patience(1.1)


def test_a_port_that_closes_connections_ends_the_rendezvous() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def close() -> None:
            while True:
                try:
                    listener.accept()[0].close()
                except OSError:
                    return

        threading.Thread(target=close, daemon=True).start()
        begin = time.monotonic()
        with pytest.raises(ts.TrainstackError, match="has not met the others"):
            rendezvous_store(rank_one(listener.getsockname()[1]), 0.1, {})
        assert time.monotonic() - begin < patience(2)
        listener.shutdown(socket.SHUT_RDWR)


LEAVES = """
import sys, time
from datetime import timedelta
from torch.distributed import TCPStore
from tests.helpers.processes import ROOT
from tests.helpers.proxy import Proxy
from trainstack._store import StoreSilentError, TimedStore
server = TCPStore("127.0.0.1", 0, is_master=True)
proxy = Proxy(server.port)
store = TimedStore(TCPStore("127.0.0.1", proxy.port, timeout=timedelta(seconds=600)), 600)
proxy.open.clear()
for _ in range(3):
    try:
        store.within(0.1).find("a")
    except StoreSilentError:
        print("silent", flush=True)
print(time.time(), flush=True)
"""


@pytest.mark.long
@pytest.mark.processes
def test_python_exits_while_requests_wait() -> None:
    command = [sys.executable, "-c", LEAVES]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=patience(60), cwd=ROOT)
    *silent, last = done.stdout.split()
    assert silent == ["silent"] * 3
    assert time.time() - float(last) < patience(3)
