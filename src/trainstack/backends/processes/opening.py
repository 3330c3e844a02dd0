"""`Opening`: ranks make process groups together; if one fails, the others stop waiting for it."""

from __future__ import annotations

import logging
import socket
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, TypeVar

import torch
from torch.distributed import DistError

from trainstack._store import StoreSilentError, TimedStore, run_with_clock
from trainstack.backends.processes.network import VARIABLE, connections_for, interfaces, is_loopback
from trainstack.errors import PeerError, annotate

if TYPE_CHECKING:
    from trainstack.backends.processes.rendezvous import Member

T = TypeVar("T")

RENDEZVOUS_S = 600.0
"""The default timeout of the rendezvous. Ranks of a large job that import from one file server differ by minutes, and
rank 0 may prepare data first. If a rank has ended, the allocation must still not be held for `timeout_s`, half an hour.
"""

GROUP_MARGIN_S = 10.0
"""nccl's watchdog ends the process, so its timeout is later than the one of gloo, after which the library reports the
place of each rank."""

_GRACE_S = 3.0
"""Time for a rank to report a failure after it lost its connections, and for the others to read the report."""

_log = logging.getLogger("trainstack")


def group_seconds(seconds: float, backend: str) -> float:
    """The timeout of a process group for a timeout of the library of `seconds`."""
    return seconds if backend == "gloo" else seconds + GROUP_MARGIN_S


def bound_device(device: torch.device, backend: str | None) -> torch.device | None:
    """`device_id` for `init_process_group`: with it, nccl makes its communicators at once, and splits later groups."""
    return device if device.type == "cuda" and device.index is not None and backend != "gloo" else None


class Opening:
    """The time from the rendezvous until all process groups exist.

    gloo waits for its connections five times as long as its timeout, and does not notice a rank that has failed.

    Args:
        words: the store in which ranks report failures, with a prefix for this opening.
        rank: of this process.
        size: the number of ranks.
        timeout_s: the timeout of `run`.
    """

    def __init__(self, words: TimedStore, rank: int, size: int, timeout_s: float) -> None:
        self._words, self._rank, self._size, self._timeout_s = words, rank, size, timeout_s

    def run(self, call: Callable[[], T]) -> T:
        """Return `call()`, which waits for the other ranks in C++.

        Raises:
            PeerError: another rank has failed, or does not arrive in time.
        """
        try:
            with connections_for(self._size):
                return run_with_clock(call, self._timeout_s, self._look)
        except TimeoutError as error:
            raise PeerError(
                f"rank {self._rank} on {socket.gethostname()} has waited {self._timeout_s:g} s for a process group of "
                f"{self._size} ranks. All ranks have met, so one has ended since, or the network between hosts is "
                f"interrupted, or gloo listens at an address that others cannot reach ({VARIABLE}). {_own_interfaces()}"
            ) from error
        except PeerError:
            raise
        except RuntimeError as error:
            self._look_again()  # closed connections are often the first sign of another rank's failure
            if "gloo" in str(error).lower():
                annotate(error, f"If the address above is not of this host: set {VARIABLE}. {_own_interfaces()}")
            raise

    def fail(self, error: BaseException) -> None:
        """Report a failure of this rank. Rank 0, which may host the store, waits until the others have read it."""
        if isinstance(error, PeerError):
            return
        text = f"{self._rank}\n{socket.gethostname()}\n{type(error).__name__}: {error}"
        with suppress(RuntimeError, StoreSilentError):
            words = self._words.within(_GRACE_S)
            words.compare_set("failed", "", text)
            if self._rank == 0:
                with suppress(TimeoutError):
                    words.wait_for([f"heard/{rank}" for rank in range(1, self._size)], _GRACE_S)

    def _look(self) -> None:
        try:
            text = self._words.within(_GRACE_S).find("failed")
        except StoreSilentError:
            return  # the network may recover; the timeout of `run` ends the wait
        except DistError as error:
            raise PeerError(
                f"the store has closed its connection to rank {self._rank}: the process that hosts it, which is rank 0 "
                "or the agent of torchrun, has ended. Look at its output."
            ) from error
        if text is not None and int(text.partition("\n")[0]) != self._rank:
            rank, host, reason = text.split("\n", 2)
            with suppress(RuntimeError, StoreSilentError):
                self._words.within(_GRACE_S).set(f"heard/{self._rank}", "")
            raise PeerError(
                f"rank {rank} on {host} failed before its process groups were made, so rank {self._rank} stops too. "
                f"There: {reason}"
            )

    def _look_again(self) -> None:
        deadline = time.monotonic() + _GRACE_S
        while time.monotonic() < deadline:
            self._look()
            time.sleep(0.1)


def _own_interfaces() -> str:
    listed = ", ".join(" ".join([name, *addresses]) for name, addresses in interfaces().items())
    return f"Interfaces of {socket.gethostname()}: {listed}."


def reachable_address(members: Sequence[Member], rank: int) -> str:
    """The address of a rank's host on the route to the store; if that is the loopback address, the one for others."""
    mine = members[rank]
    if mine.address and not is_loopback(mine.address):
        return mine.address
    return next((m.store_address for m in members if m.host != mine.host and not is_loopback(m.store_address)), "")


def log_hosts(members: Sequence[Member]) -> None:
    """Log the host of each rank if there are several hosts."""
    if len({member.host for member in members}) > 1:
        placed = (f"{rank} {member.host} {member.address}" for rank, member in enumerate(members))
        _log.info("rendezvous of %d ranks: %s", len(members), ", ".join(placed))
