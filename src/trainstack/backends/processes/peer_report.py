"""The report of a rank if others do not answer: the place and host of each rank, and the probable reason."""

from __future__ import annotations

import json
import re
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

_WHERE_TORCH_SAW_IT = re.compile(r"\[\S+\.cc:\d+\] ")
_CLOSED = re.compile(r"reset by peer|closed by peer|Broken pipe|Socket closed|pair closure", re.IGNORECASE)
_ENDED = (
    "A process that does not answer has ended, is stopped, or runs code that holds the GIL. One that left no "
    "traceback in its output was killed: the system does that when memory runs out."
)
_ADVICE = (
    "All processes have to call the same collectives, and equally often: train, validate, gather and "
    "save_checkpoint are called by all or by none, not below `if rank == 0:`. If one is only slow, allow it more time: "
    "backend_options={'ddp': {'timeout_s': ...}}."
)


MOST_LINES = 40
"""The largest number of places in a report; a thousand ranks may all be at different lines."""


def rank_list(ranks: Sequence[int]) -> str:
    """Ascending ranks as text, with a hyphen for more than three in a row: `0, 2, 4-9`."""
    runs = list[list[int]]()
    for rank in ranks:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    words = (f"{run[0]}-{run[-1]}" if len(run) > 3 else ", ".join(map(str, run)) for run in runs)
    return ", ".join(words)


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """The position of a rank in the run and in the code.

    Args:
        host: the name of its host.
        when: on the clock of that host, in seconds since the epoch.
        text: the place in the run and in the code.
        silent: whether the rank does not answer, so that this is its last known place.
    """

    host: str
    when: float
    text: str
    silent: bool = False

    @property
    def answer(self) -> str:
        """The place as text."""
        if not self.silent:
            return self.text
        return f"does not answer. Last known {self.age_s:.0f} s ago: {self.text}"

    @property
    def age_s(self) -> float:
        """The age of the report in seconds. The clocks of two hosts may differ."""
        return max(0.0, time.time() - self.when)


def encode_place(text: str) -> str:
    """A place of this process, for the store."""
    return json.dumps(asdict(Place(host=socket.gethostname(), when=time.time(), text=text)))


def decode_place(said: str | None, silent: bool) -> Place:
    """A place from the store; None if the rank has never written one."""
    if said is None:
        return Place(host="", when=time.time(), text="nothing", silent=silent)
    return Place(**{**json.loads(said), "silent": silent})


def short_message(error: BaseException) -> str:
    """The text of gloo's error without the position in torch's source and without gloo's hints."""
    return _WHERE_TORCH_SAW_IT.sub("", str(error)).partition(". This is typically")[0].strip()


def lost_touch(rank: int, message: str) -> str:
    """The first line of the report of a rank that has lost others; `message` is from gloo's error."""
    return f"rank {rank} has lost the connection to another process ({message})."


def missing_peers(rank: int, message: str, places: Mapping[int, Place]) -> str:
    """The report of a rank that has lost others. After its first line it is the same on all ranks.

    Args:
        rank: of this process.
        message: of gloo's error, which distinguishes a broken network from an ended process.
        places: of all ranks.
    """
    here = places[rank].host
    several = len({place.host for place in places.values() if place.host}) > 1
    silent_hosts = _silent_hosts(places) if several else {}
    lines, hidden = [], set[int]()
    for host, ranks in silent_hosts.items():
        hidden |= set(ranks)
        last = places[ranks[0]]
        who = (
            f"rank {ranks[0]}, the only one of {host}, is"
            if len(ranks) == 1
            else f"all {len(ranks)} ranks of {host} are"
        )
        numbers = "" if len(ranks) == 1 else f" (ranks {rank_list(ranks)})"
        lines.append(f"  {who} silent for {last.age_s:.0f} s{numbers}. Last known: {last.text}")
    shown: dict[str, list[int]] = {}
    for number in sorted(set(places) - hidden):
        place = places[number]
        shown.setdefault(f"{f' on {place.host}' if several else ''}: {place.answer}", []).append(number)
    lines += [f"  rank{'s' if len(ranks) > 1 else ''} {rank_list(ranks)}{what}" for what, ranks in shown.items()]
    if len(lines) > MOST_LINES:
        lines = [*lines[:MOST_LINES], f"  and {len(lines) - MOST_LINES} more places"]
    reasons = [_ENDED] if any(place.silent for place in places.values()) else []
    if silent_hosts:
        network = (
            f"Each of these hosts is down, or the network between it and {here} is interrupted: "
            f"{', '.join(silent_hosts)}."
        )
        reasons = [*reasons, network] if _CLOSED.search(message) else [network, *reasons]
    return "\n".join([lost_touch(rank, message), *lines, *reasons, _ADVICE])


def _silent_hosts(places: Mapping[int, Place]) -> dict[str, list[int]]:
    """The hosts whose ranks are all silent, with their ranks."""
    hosts: dict[str, list[int]] = {}
    for rank, place in sorted(places.items()):
        hosts.setdefault(place.host, []).append(rank)
    return {host: ranks for host, ranks in hosts.items() if host and all(places[rank].silent for rank in ranks)}
