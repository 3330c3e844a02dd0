"""Ranks wait in the store while files are read or written, so that this does not count as time in a collective."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from weakref import WeakKeyDictionary

from trainstack.backends import Communicator, World
from trainstack.errors import PeerError

_BEAT_S = 1.0
"""How often a rank tells the others that it is alive, while it reads or writes files."""

_SILENCE_S = 5.0
"""Without a beat for so long, the others go to the collective. There they find out whether the rank has ended."""

_FIRST_PAUSE_S, _LAST_PAUSE_S = 0.001, 0.5
"""Between two looks at the store; the pause doubles. There is one store for all ranks."""

_DONE = "done"

_waits: WeakKeyDictionary[Communicator, int] = WeakKeyDictionary()
"""How often the ranks of a communicator have waited for files; the same number on all ranks."""

Ask = Callable[[str], None]
"""Lets all other ranks begin to answer a request."""


@contextmanager
def wait_for_rank_zero(
    world: World, what: str, longest_s: float, answer: Callable[[str], None] | None = None
) -> Iterator[Ask]:
    """A block that rank 0 carries out; the others pass through it at once and wait at its end. All ranks enter it.

    Rank 0 may ask for something in the block, which all ranks do together, such as a collective. It gets a function
    that takes a request; the others call `answer` with the request, in the order of rank 0.

    The wait ends when rank 0 has left the block, when it has sent no heartbeat for some seconds, or when the store
    is gone. In the last two cases the collective that follows reports what happened, within its own time limit.

    Args:
        world: of this rank.
        what: what rank 0 does, for the message.
        longest_s: seconds after which a rank gives up although rank 0 is alive; for each request anew.
        answer: does what rank 0 asks for, on the other ranks.

    Raises:
        PeerError: rank 0 is alive, and was not done after `longest_s`.
    """
    if world.size == 1:
        yield lambda request: None
        return
    key, count = _next_key(world.comm), 0
    if not world.is_main:
        yield lambda request: None
        wait = _Wait(world, 0, f"{key}/beat", what, longest_s)
        while (request := wait.text(f"{key}/{count}")) not in (None, _DONE):
            assert answer is not None
            answer(str(request))
            count += 1
        return

    def ask(request: str) -> None:
        nonlocal count
        world.comm.put(f"{key}/{count}", request)
        count += 1

    with _beating(world.comm, key):
        try:
            yield ask
        finally:
            with suppress(RuntimeError):  # a store that is gone shows in the collective that follows
                world.comm.put(f"{key}/{count}", _DONE)


@contextmanager
def wait_for_all_ranks(world: World, what: str, longest_s: float) -> Iterator[None]:
    """A block in which each rank reads files, and which all leave together; as `wait_for_rank_zero`.

    Raises:
        PeerError: a rank failed in its block, or it is alive and was not done after `longest_s`.
    """
    if world.size == 1:
        yield
        return
    comm, key = world.comm, _next_key(world.comm)
    with _beating(comm, f"{key}/{world.rank}"):
        yield
        comm.put(f"{key}/{world.rank}/{_DONE}", "")
        with wait_for_rank_zero(world, what, longest_s):
            for rank in range(1, world.size if world.is_main else 1):
                wait = _Wait(world, rank, f"{key}/{rank}/beat", what, longest_s)
                if wait.text(f"{key}/{rank}/{_DONE}") is None:
                    break
        comm.check_place(what)  # a rank that failed in its block ends the others here, before they do anything more


def _next_key(comm: Communicator) -> str:
    number = _waits[comm] = _waits.get(comm, 0) + 1
    return f"rank-zero/{number}"


@contextmanager
def _beating(comm: Communicator, key: str) -> Iterator[None]:
    done = threading.Event()

    def beat() -> None:
        beats = 0
        with suppress(RuntimeError):
            while not done.wait(_BEAT_S):
                beats += 1
                comm.put(f"{key}/beat", str(beats))

    threading.Thread(target=beat, name="trainstack-heartbeat", daemon=True).start()
    try:
        yield
    finally:
        done.set()


@dataclass(frozen=True, slots=True)
class _Wait:
    """A wait of a rank for another one, which is alive as long as it changes its beat."""

    world: World
    rank: int
    beat: str
    what: str
    longest_s: float

    def text(self, key: str) -> str | None:
        """What lies under `key`, once it is there; None if the rank is silent, or this one has to stop.

        Raises:
            PeerError: it is not there after `longest_s`.
        """
        world, longest_pause = self.world, max(_LAST_PAUSE_S, self.world.size / 200)
        began = heard = now = time.monotonic()
        last, pause = None, _FIRST_PAUSE_S
        with suppress(RuntimeError):  # a store that is gone shows in the collective that follows
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
            f"rank {world.rank} has waited {self.longest_s:g} s for rank {self.rank}, which is alive and not done with "
            f"{self.what}. Look at the file system that it uses, or write a longer "
            "TrainerArguments(rank_zero_timeout_s=...)."
        )
