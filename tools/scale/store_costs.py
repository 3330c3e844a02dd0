"""Count requests of the library to the store, in a rendezvous and after a failure; each rank is a thread."""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tools.scale.counting_store import CountingStore
from trainstack._store import TimedStore
from trainstack.backends.processes import watchdog
from trainstack.backends.processes.rendezvous import Agreement, Member
from trainstack.backends.processes.watchdog import PeerWatchdog


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreCost:
    """The costs of all ranks together.

    Attributes:
        requests, bytes: to and from the store.
        lines: lines of the messages of the ranks; 0 if they are not counted.
        seconds: the time from the arrival of the last rank to the end.
    """

    requests: int
    bytes: int
    lines: int = 0
    seconds: float = 0.0


def in_threads(size: int, call: Callable[[int], Any]) -> list[Any]:
    """The results of `call(rank)`, each in a separate thread."""
    results: list[Any] = [None] * size

    def run(rank: int) -> None:
        results[rank] = call(rank)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def rendezvous(size: int, spread_s: float = 1.0, timeout_s: float = 120.0) -> StoreCost:
    """A rendezvous of ranks that arrive one after the other within `spread_s`; each host has eight."""
    store, ends = CountingStore(), list[float]()
    begin = time.monotonic()

    def come(rank: int) -> int:
        time.sleep(spread_s * (size - rank) / size)  # rank 0 last
        host = f"node{rank // 8:04d}"
        mine = Member(
            nonce=uuid.uuid4().hex,
            run={"SLURM_JOB_ID": "123456", "SLURM_STEP_ID": "0", "world_size": str(size), "script": "train.py"},
            host=host,
            address=f"10.0.{rank // 2048}.{rank // 8 % 256}",
            store_address="10.0.0.1",
        )
        deadline = time.monotonic() + timeout_s
        agreement = Agreement(TimedStore(store, timeout_s), mine, rank, size, "", deadline)  # type: ignore[arg-type]
        _, members = agreement.follow() if rank else agreement.lead()
        ends.append(time.monotonic())
        return len(members)

    counts = in_threads(size, come)
    assert counts == [size] * size
    return StoreCost(requests=store.requests, bytes=store.bytes, seconds=max(ends) - begin - spread_s)


def failure(size: int) -> StoreCost:
    """The last rank ends without a message, and all others lose their connection to it at the same time."""
    store = CountingStore()
    before = watchdog.PAUSE_S, watchdog.ANSWER_S
    watchdog.PAUSE_S, watchdog.ANSWER_S = 0.1, 1.0
    meet = threading.Barrier(size - 1)

    def lose(rank: int) -> int:
        if rank == size - 1:
            return 0
        where = f"global step {rank % 3}"
        own = PeerWatchdog(TimedStore(store, 60.0), rank, size, 1, 0, lambda: where, lambda: None)  # type: ignore[arg-type]
        own._pause = 0.1
        meet.wait()
        own.start()
        said = str(own.resolve_error(RuntimeError("[/x/gloo/pair.cc:1] Connection closed by peer")))
        own.stop()
        return said.count("\n") + 1

    try:
        lines = in_threads(size, lose)
    finally:
        watchdog.PAUSE_S, watchdog.ANSWER_S = before
    return StoreCost(requests=store.requests, bytes=store.bytes, lines=sum(lines))
