"""Ranks wait in the store while files are read or written, so that the wait does not count as time in a collective."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from weakref import WeakKeyDictionary

from trainstack.backends import Communicator, World
from trainstack.checkpointing.sharded.commit import sending_heartbeats
from trainstack.errors import PeerError

_SILENCE_S = 5.0
"""Seconds without a heartbeat, five of them, after which the others enter the collective. The collective reports
whether the rank has ended."""

_FIRST_PAUSE_S, _LAST_PAUSE_S = 0.001, 0.5
"""Seconds between two reads of the store. The pause doubles from the first to the last, because all ranks use the same
store: a short wait ends at once, and a long one costs two requests in a second."""

_DONE = "done"

_waits: WeakKeyDictionary[Communicator, int] = WeakKeyDictionary()
"""The number of waits for files of each communicator. It is the same on all ranks."""

Ask = Callable[[str], None]
"""Sends a request to all other ranks."""


@contextmanager
def wait_for_rank_zero(
    world: World, task: str, longest_s: float, answer: Callable[[str], None] | None = None
) -> Iterator[Ask]:
    """A block whose work rank 0 does, while the others wait at its end. All ranks enter it.

    In the block, rank 0 may send requests for work that all ranks do together, such as a collective. The block gives it
    a function that sends a request. The others call `answer` with each request, in the order of rank 0.

    The wait ends when rank 0 has left the block, when its heartbeat has been missing for some seconds, or when the
    store is lost. In the last two cases the next collective reports the cause, within its time limit.

    Args:
        world: the world of this rank.
        task: the work of rank 0, for the message.
        longest_s: seconds to wait, for each request, until a rank raises although rank 0 is alive.
        answer: does the requested work on the other ranks.

    Raises:
        PeerError: rank 0 is alive and has not finished after `longest_s`.
    """
    if world.size == 1:
        yield lambda request: None
        return
    key, count = _next_key(world.comm), 0
    if not world.is_main:
        yield lambda request: None
        wait = _Wait(world, 0, f"{key}/beat", task, longest_s)
        while (request := wait.text(f"{key}/{count}")) not in (None, _DONE):
            assert answer is not None
            answer(str(request))
            count += 1
        return

    def ask(request: str) -> None:
        nonlocal count
        world.comm.put(f"{key}/{count}", request)
        count += 1

    with sending_heartbeats(world.comm.put, key):
        try:
            yield ask
        finally:
            with suppress(RuntimeError):  # the next collective reports a lost store
                world.comm.put(f"{key}/{count}", _DONE)


@contextmanager
def wait_for_all_ranks(world: World, task: str, longest_s: float) -> Iterator[None]:
    """A block in which each rank reads files, and that all ranks leave together. See `wait_for_rank_zero`.

    Raises:
        PeerError: a rank failed in its block, or is alive and has not finished after `longest_s`.
    """
    if world.size == 1:
        yield
        return
    comm, key = world.comm, _next_key(world.comm)
    with sending_heartbeats(comm.put, f"{key}/{world.rank}"):
        yield
        comm.put(f"{key}/{world.rank}/{_DONE}", "")
        with wait_for_rank_zero(world, task, longest_s):
            for rank in range(1, world.size if world.is_main else 1):
                wait = _Wait(world, rank, f"{key}/{rank}/beat", task, longest_s)
                if wait.text(f"{key}/{rank}/{_DONE}") is None:
                    break
        comm.check_place(task)  # raises here, before further work, if a rank has failed in its block


def _next_key(comm: Communicator) -> str:
    number = _waits[comm] = _waits.get(comm, 0) + 1
    return f"rank-zero/{number}"


@dataclass(frozen=True, slots=True)
class _Wait:
    """Waits for another rank, which is alive while its heartbeat changes."""

    world: World
    rank: int
    beat: str
    task: str
    longest_s: float

    def text(self, key: str) -> str | None:
        """Wait for the text under `key`. None if the other rank is silent, or if a rank has failed.

        Raises:
            PeerError: the text is missing after `longest_s`.
        """
        # all ranks together read the store at most 200 times in a second
        world, longest_pause = self.world, max(_LAST_PAUSE_S, self.world.size / 200)
        began = heard = now = time.monotonic()
        last, pause = None, _FIRST_PAUSE_S
        with suppress(RuntimeError):  # the next collective reports a lost store
            while now - began <= self.longest_s:
                if (found := world.comm.get_if_all([key])) is not None:
                    return found[0]
                now, beat = time.monotonic(), world.comm.get_if_all([self.beat])
                heard, last = heard if beat == last else now, beat
                if world.comm.aborted or now - heard > _SILENCE_S + 2 * longest_pause:
                    return None
                time.sleep(pause)
                pause = min(2 * pause, longest_pause)
        if now - began <= self.longest_s:
            return None
        raise PeerError(
            f"rank {world.rank} has waited {self.longest_s:g} s for rank {self.rank}, which is alive and has not "
            f"finished {self.task}. Check its file system, or write a longer TrainerArguments(rank_zero_timeout_s=...)."
        )
