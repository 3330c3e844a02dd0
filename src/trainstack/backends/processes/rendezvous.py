"""The rendezvous of the ranks: the store, and what they agree on before they make a process group."""

from __future__ import annotations

import hashlib
import hmac
import json
import logging
import os
import socket
import sys
import time
import uuid
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

from torch.distributed import DistError, PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from trainstack._store import LOOPBACK, TOKEN, StoreSilentError, TimedStore, listen_on_loopback, run_with_clock
from trainstack.backends.processes.environment import ProcessInfo, is_on_one_host
from trainstack.backends.processes.network import local_address_to
from trainstack.errors import TrainstackError

_ROUND = "trainstack/round"

_hosted_stores: dict[int, Store] = {}
"""Stores hosted by this process, by port; kept alive because another rank may still connect."""

_log = logging.getLogger("trainstack")


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """What a rank says of itself at the rendezvous.

    Args:
        nonce: of this attempt, new each time.
        run: what all ranks of a run share, and other runs do not.
        host: the name of the host.
        address: of this host, on the way to the store.
        store_address: of the host of the store, as this rank has reached it.
    """

    nonce: str
    run: dict[str, str]
    host: str
    address: str = ""
    store_address: str = ""

    @property
    def described(self) -> str:
        """The run in words."""
        return ", ".join(f"{name}={value}" for name, value in self.run.items())

    @property
    def launched_run(self) -> dict[str, str]:
        """The run without what may change while the launcher keeps its store: trainers one after the other, and an
        elastic start with other hosts."""
        return {name: value for name, value in self.run.items() if name not in ("run_id", "world_size")}


@dataclass(frozen=True, slots=True, kw_only=True)
class Rendezvous:
    """What the ranks have agreed on.

    Args:
        store: to hand to `init_process_group`. No other group has its prefix.
        words: the same part of the store over another connection, for what ranks tell each other meanwhile.
        members: by rank.
    """

    store: Store
    words: TimedStore
    members: list[Member]


def rendezvous_store(place: ProcessInfo, timeout_s: float, environ: Mapping[str, str] | None = None) -> Store:
    """The store to hand to `torch.distributed.init_process_group(store=...)`.

    It may hold what an earlier group has left: torchrun's agent keeps its store when it starts the workers again, and a
    process that hosts one keeps it from one trainer to the next. gloo would find addresses there at which nobody is,
    and wait for them for ever (seen with torch 2.13). So the processes first agree on a name that no other group has,
    and use only keys below it.

    Raises:
        TrainstackError: a process has not come within `timeout_s`, or belongs to another run.
    """
    return rendezvous(place, timeout_s, os.environ if environ is None else environ).store


def rendezvous(
    place: ProcessInfo, timeout_s: float, environ: Mapping[str, str], run_id: str | None = None
) -> Rendezvous:
    """Connect to the store, and agree on a name for the group.

    Raises:
        TrainstackError: a process has not come within `timeout_s`, or belongs to another run.
    """
    deadline = time.monotonic() + timeout_s
    store = _connect(place, timeout_s, environ)
    mine = Member(
        nonce=uuid.uuid4().hex,
        run=run_identity(place, environ, run_id),
        host=socket.gethostname(),
        address=local_address_to(place.master_addr) or "",
        store_address=_resolved(place),
    )
    # A second more for requests, so that a rank that is missing is told from a store that is silent.
    talk = TimedStore(store, timeout_s, deadline + 1.0)
    agreement = Agreement(talk, mine, place.rank, place.size, environ.get(TOKEN, ""), deadline)
    try:
        name, members = agreement.lead() if place.rank == 0 else agreement.follow()
        clone = run_with_clock(store.clone, max(1.0, deadline - time.monotonic()))  # type: ignore[attr-defined]
    except (TimeoutError, StoreSilentError, DistError) as error:
        raise TrainstackError(_absent(place, timeout_s, f"{error}", agreement.refused)) from error
    prefix = f"trainstack/{name}"
    words = TimedStore(PrefixStore(f"{prefix}/words", clone), timeout_s)
    return Rendezvous(store=PrefixStore(prefix, store), words=words, members=members)


def run_identity(place: ProcessInfo, environ: Mapping[str, str], run_id: str | None) -> dict[str, str]:
    """What all ranks of a run share: two runs that use one port by accident differ in it.

    Of the script only the file name counts, because hosts may keep copies of it in different folders. The number of
    restarts does not count: each agent of torchrun has its own.
    """
    names = {
        "torchrun": ("TORCHELASTIC_RUN_ID",),
        "slurm": ("SLURM_JOB_ID", "SLURM_STEP_ID"),
        "openmpi": ("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid"),
    }.get(place.launcher, ())
    shared = {name: environ[name] for name in names if environ.get(name)}
    shared |= {"world_size": str(place.size), "script": Path(sys.argv[0]).name}
    return shared if run_id is None else {**shared, "run_id": run_id}


def _resolved(place: ProcessInfo) -> str:
    try:
        return str(socket.getaddrinfo(place.master_addr, place.master_port, type=socket.SOCK_STREAM)[0][4][0])
    except OSError:
        return ""


def _connect(place: ProcessInfo, timeout_s: float, environ: Mapping[str, str]) -> Store:
    """A client of the store, which rank 0 hosts where no agent of torchrun does."""
    hosted = place.launcher == "torchrun" and environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    hosts_here = place.rank == 0 and not hosted
    # Where all ranks are on this host, none needs to be reached from outside it.
    host = LOOPBACK if is_on_one_host(place, environ) and not hosted else place.master_addr
    listener = listen_on_loopback(place.master_port) if hosts_here and host == LOOPBACK else None
    options: dict[str, Any] = {} if listener is None else {"master_listen_fd": listener.detach()}

    def connect() -> Store:
        return TCPStore(
            host,
            place.master_port,
            place.size,
            is_master=hosts_here,
            timeout=timedelta(seconds=timeout_s),
            wait_for_workers=False,  # the agreement waits for them, and can say who is missing
            multi_tenant=not hosted,
            **options,
        )

    try:
        store = run_with_clock(connect, timeout_s + 1.0)  # torch 2.13.0: a client of a silent port has no limit
    except (DistError, TimeoutError) as error:
        if "EADDRINUSE" in str(error):
            raise TrainstackError(
                f"rank 0 cannot host the rendezvous of the {place.size} processes at {host}:{place.master_port}: the "
                "port is in use, perhaps by another run. Choose another one with MASTER_PORT; `torchrun --standalone` "
                "finds a free one."
            ) from error
        raise TrainstackError(_absent(place, timeout_s, f"{error}", {})) from error
    if hosts_here and place.size > 1:
        _hosted_stores[place.master_port] = store
    return store


def _absent(place: ProcessInfo, timeout_s: float, reason: str, refused: Mapping[int, str]) -> str:
    others = "".join(f" {text}" for text in refused.values())
    return (
        f"rank {place.rank} of {place.size}, on {socket.gethostname()}, has not met the others at "
        f"{place.master_addr}:{place.master_port} within {timeout_s:g} s ({reason}).{others} "
        "Every process has to come as far as the first use of its trainer: look at the output of the others, which "
        "may have failed before, and for an `if rank == 0:` around the training. Where ranks need longer until then: "
        "backend_options={'ddp': {'rendezvous_timeout_s': ...}}."
    )


class Agreement:
    """The ranks of one group find a name for it that no other group has.

    Rank 0 invents the name, the others answer to it. An answer to the name of an earlier group does no harm: rank 0
    counts only answers to its own, and a rank believes a name only when rank 0 has confirmed its answer, whose nonce is
    new each time. A rank of another run, or without the token, is refused, and its place stays free for the right one.

    Attributes:
        refused: what to say of each rank that was refused, by rank.
    """

    def __init__(
        self, store: TimedStore, mine: Member, rank: int, size: int, token: str, deadline: float = float("inf")
    ) -> None:
        self._store, self._mine, self._rank, self._size, self._token = store, mine, rank, size, token
        self._deadline = deadline
        self._pause = max(0.02, size / 5000)  # there is one store for all
        self.refused: dict[int, str] = {}

    def lead(self) -> tuple[str, list[Member]]:
        """What rank 0 does; the name, and the members by rank."""
        name, members = self._mine.nonce, {0: self._mine}
        self._store.set(_ROUND, json.dumps(asdict(self._mine)))
        while len(members) < self._size:
            for rank in set(range(1, self._size)) - members.keys():
                member = self._read_answer(name, rank)
                if member is not None:
                    members[rank] = member
            if len(members) < self._size:
                self._wait(sorted(set(range(self._size)) - members.keys()))
        said = json.dumps([asdict(members[rank]) for rank in range(self._size)])
        self._store.set(f"trainstack/{name}/confirmed", self._sign("confirmed", said))
        return name, [members[rank] for rank in range(self._size)]

    def follow(self) -> tuple[str, list[Member]]:
        """What another rank does."""
        while True:
            text = self._store.find(_ROUND)
            if text is not None:
                leader = Member(**json.loads(text))
                if leader.launched_run != self._mine.launched_run:
                    raise TrainstackError(self._foreign(leader))
                members = self._answer(leader)
                if members is not None:
                    return leader.nonce, members
            self._wait([0])

    def _answer(self, leader: Member) -> list[Member] | None:
        name = leader.nonce
        self._store.set(f"trainstack/{name}/{self._rank}", self._sign(name, json.dumps(asdict(self._mine))))
        why = self._store.find(f"trainstack/{name}/refused/{self._mine.nonce}")
        if why is not None:
            raise TrainstackError(why)
        text = self._store.find(f"trainstack/{name}/confirmed")
        said = text and self._signed("confirmed", text)
        members = [Member(**member) for member in json.loads(said)] if said else []
        return members if members[self._rank : self._rank + 1] == [self._mine] else None

    def _read_answer(self, name: str, rank: int) -> Member | None:
        """The answer of a rank, if there is one of this run."""
        key = f"trainstack/{name}/{rank}"
        text = self._store.find(key)
        if text is None:
            return None
        said = self._signed(name, text)
        member = Member(**json.loads(text.partition("\n")[2] if said is None else said))
        if said is not None and member.run == self._mine.run:
            self.refused.pop(rank, None)
            return member
        if said is None:
            why = f"A process at {member.host} that calls itself rank {rank} does not have the {TOKEN} of this run."
        else:
            why = (
                f"rank {rank} at {member.host} belongs to another run ({member.described}) "
                f"than rank 0 at {self._mine.host} ({self._mine.described}): two runs use one "
                " MASTER_ADDR and MASTER_PORT. Give each run another port."
            )
        if self.refused.get(rank) != why:
            self.refused[rank] = why
            _log.warning("refused at the rendezvous: %s", why)
        self._store.set(f"trainstack/{name}/refused/{member.nonce}", why)
        self._store.delete(key)
        return None

    def _foreign(self, leader: Member) -> str:
        return (
            f"rank {self._rank} at {self._mine.host} belongs to another run ({self._mine.described}) than rank 0 at "
            f"{leader.host} ({leader.described}), which hosts the store: two runs use one MASTER_ADDR and MASTER_PORT. "
            "Give each run another port."
        )

    def _sign(self, about: str, text: str) -> str:
        return f"{self._mac(about, text)}\n{text}"

    def _signed(self, about: str, text: str) -> str | None:
        """The text behind a valid signature, or None."""
        mac, _, said = text.partition("\n")
        return said if hmac.compare_digest(mac, self._mac(about, said)) else None

    def _mac(self, about: str, text: str) -> str:
        return hmac.new(self._token.encode(), f"{about}\n{text}".encode(), hashlib.sha256).hexdigest()

    def _wait(self, missing: list[int]) -> None:
        if time.monotonic() > self._deadline:
            names = ", ".join(map(str, missing[:8])) + (", ..." if len(missing) > 8 else "")
            raise TimeoutError(f"rank{'s' if len(missing) > 1 else ''} {names} did not come")
        time.sleep(self._pause)
