"""The rendezvous of the ranks: they agree on a store and a name before they make a process group."""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import logging
import os
import socket
import sys
import time
import uuid
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

from torch.distributed import DistError, PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from trainstack._store import LOOPBACK, TOKEN, KeyWait, StoreSilentError, TimedStore, listen_on_loopback, run_with_clock
from trainstack.backends.processes.environment import ProcessInfo, is_on_one_host
from trainstack.backends.processes.network import local_address_to
from trainstack.errors import TrainstackError

_ROUND = "trainstack/round"

_FIRST_WAIT_S = 0.02
"""The first pause of a rank that waits for a reply, after which it reads the round again. Later pauses are longer."""

_LONGEST_S = 7 * 86400.0  # a week in place of infinity, which a socket timeout cannot represent

_hosted_stores: dict[int, Store] = {}
"""Stores hosted by this process, by port; kept alive because another rank may still connect."""

_log = logging.getLogger("trainstack")


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """The message of a rank about itself at the rendezvous.

    Args:
        nonce: a random name of this attempt.
        run: facts that all ranks of a run share, and that other runs do not have.
        host: the name of the host.
        address: of this host, on the route to the store.
        store_address: of the host of the store, as this rank reached it.
    """

    nonce: str
    run: dict[str, str]
    host: str
    address: str = ""
    store_address: str = ""

    @property
    def described(self) -> str:
        """The run as text."""
        return ", ".join(f"{name}={value}" for name, value in self.run.items())

    @property
    def launched_run(self) -> dict[str, str]:
        """The run without the facts that may change while the launcher keeps its store: several trainers of a process
        differ in `run_id`, and an elastic start with other hosts in `world_size`."""
        return {name: value for name, value in self.run.items() if name not in ("run_id", "world_size")}


@dataclass(frozen=True, slots=True, kw_only=True)
class Rendezvous:
    """The result of the rendezvous.

    Args:
        store: for `init_process_group`. No other group has its prefix.
        words: the same part of the store over another connection, for messages of ranks while the first one waits.
        members: by rank.
    """

    store: Store
    words: TimedStore
    members: list[Member]


def rendezvous_store(place: ProcessInfo, timeout_s: float, environ: Mapping[str, str] | None = None) -> Store:
    """The store for `torch.distributed.init_process_group(store=...)`.

    The store may contain keys of an earlier group: torchrun's agent keeps its store when it restarts the workers, and a
    process that hosts a store keeps it for its next trainers. gloo would read addresses of ended processes there and
    wait for them without limit (seen with torch 2.13). So the processes first agree on a new name, and then use only
    keys with this prefix.

    Args:
        place: rank, world size and address of the process that hosts the store.
        timeout_s: seconds in which all processes have to arrive.
        environ: variables that contain the store of torchrun's agent; by default those of the process.

    Raises:
        TrainstackError: a process has not arrived within `timeout_s`, or belongs to another run.
    """
    return rendezvous(place, timeout_s, os.environ if environ is None else environ).store


def rendezvous(
    place: ProcessInfo, timeout_s: float, environ: Mapping[str, str], run_id: str | None = None
) -> Rendezvous:
    """Connect to the store, and agree on a name for the group.

    Raises:
        TrainstackError: a process has not arrived within `timeout_s`, or belongs to another run.
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
    # Requests get a second more, so that a missing rank is distinguished from a store that does not answer.
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
    """The facts that all ranks of a run share. Two runs that use one port by accident differ in them.

    The script is given by its file name only, because hosts may keep copies in different folders. The number of
    restarts is omitted, because each agent of torchrun counts separately.
    """
    names = {
        "torchrun": ("TORCHELASTIC_RUN_ID",),
        "slurm": ("SLURM_JOB_ID", "SLURM_STEP_ID"),
        "openmpi": ("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid"),
        "submitit": ("SUBMITIT_LOCAL_JOB_ID",),
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
    """Connect to the store. Rank 0 hosts it, unless an agent of torchrun does."""
    hosted = place.launcher == "torchrun" and environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    hosts_here = place.rank == 0 and not hosted
    # If all ranks are on this host, the store does not have to be reachable from other hosts.
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
            wait_for_workers=False,  # the agreement waits for them, and can name the missing ones
            multi_tenant=not hosted,
            **options,
        )

    try:
        store = run_with_clock(connect, timeout_s + 1.0)  # torch 2.13.0: no timeout for a port that does not answer
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
        "Every process has to reach the first use of its trainer: look at the output of the others, which "
        "may have failed before, and for an `if rank == 0:` around the training. If ranks need longer until then: "
        "backend_options={'ddp': {'rendezvous_timeout_s': ...}}."
    )


class Agreement:
    """The ranks of one group agree on a name that no other group has.

    Rank 0 makes the name, and the others answer to it. An answer to the name of an earlier group has no effect: rank 0
    counts only answers to its name, and a rank accepts a name only after rank 0 has confirmed its answer, whose nonce
    is new for each attempt. A rank of another run, or without the token, is refused, and its place remains free.

    Attributes:
        refused: a message for each refused rank, by rank.
    """

    def __init__(
        self, store: TimedStore, mine: Member, rank: int, size: int, token: str, deadline: float = float("inf")
    ) -> None:
        self._store, self._mine, self._rank, self._size, self._token = store, mine, rank, size, token
        self._deadline = deadline
        self.refused: dict[int, str] = {}

    def lead(self) -> tuple[str, list[Member]]:
        """The part of rank 0. Returns the name, and the members by rank."""
        name, members, seen = self._mine.nonce, {0: self._mine}, 0
        self._store.set(_ROUND, json.dumps(asdict(self._mine)))
        with self._waiting_for(f"trainstack/{name}/all") as pauses:
            while len(members) < self._size:
                next(pauses)
                answers = self._store.add(f"trainstack/{name}/answers", 0)
                if answers != seen:
                    members |= self._read_answers(name, [rank for rank in range(self._size) if rank not in members])
                seen = answers
                if len(members) < self._size:
                    self._check_clock([rank for rank in range(self._size) if rank not in members])
        self._store.set(f"trainstack/{name}/confirmed", self._sign("confirmed", packed_members(members)))
        self._store.set_all({_reply_to(member): "" for member in members.values()})
        return name, [members[rank] for rank in range(self._size)]

    def follow(self) -> tuple[str, list[Member]]:
        """The part of the other ranks. Returns the name, and the members by rank."""
        name = ""
        with self._waiting_for(_reply_to(self._mine)) as pauses:
            while True:
                text = self._store.find(_ROUND)
                leader = None if text is None else Member(**json.loads(text))
                if leader is not None and leader.launched_run != self._mine.launched_run:
                    raise TrainstackError(self._foreign(leader))
                if leader is not None and leader.nonce != name:
                    name = leader.nonce
                    self._answer(name)
                if next(pauses) and name:
                    members = self._read_reply(name)
                    if members is not None:
                        return name, members
                self._check_clock([0])

    @contextmanager
    def _waiting_for(self, key: str) -> Iterator[Iterator[bool]]:
        """A block with pauses, each longer than the one before. They yield whether the key exists, and end with it.

        If the key exists without being valid, because a foreign process set it, the next pauses sleep.
        """
        waiting = KeyWait(self._store, key, max(0.0, min(self._deadline - time.monotonic(), _LONGEST_S)) + 5.0)

        def pauses() -> Iterator[bool]:
            # longer for more ranks, which share one store: about 2,000 requests a second at first
            pause, woken = max(_FIRST_WAIT_S, self._size / 2000), False
            while True:
                seconds = min(pause, max(0.001, self._deadline - time.monotonic()))
                if woken:
                    time.sleep(seconds)
                else:
                    woken = waiting.wait(seconds)
                yield woken
                pause = min(2 * pause, max(0.1, self._size / 400))  # and about 400 later

        try:
            yield pauses()
        finally:
            waiting.end()

    def _answer(self, name: str) -> None:
        self._store.set(f"trainstack/{name}/{self._rank}", self._sign(name, json.dumps(asdict(self._mine))))
        if self._store.add(f"trainstack/{name}/answers", 1) >= self._size - 1:
            self._store.set(f"trainstack/{name}/all", "")

    def _read_reply(self, name: str) -> list[Member] | None:
        """The members, after rank 0 has confirmed this one; None before."""
        why = self._store.find(_reply_to(self._mine))
        if why:
            raise TrainstackError(why)
        text = self._store.find(f"trainstack/{name}/confirmed")
        said = text and self._signed("confirmed", text)
        members = unpacked_members(said, self._mine.run) if said else []
        return members if members[self._rank : self._rank + 1] == [self._mine] else None

    def _read_answers(self, name: str, ranks: list[int]) -> dict[int, Member]:
        """The valid answers of `ranks` so far. Ranks of other runs are refused."""
        keys = [f"trainstack/{name}/{rank}" for rank in ranks]
        missing = set(self._store.missing(keys))
        ranks = [rank for at, rank in enumerate(ranks) if at not in missing]
        texts = self._store.get_all([f"trainstack/{name}/{rank}" for rank in ranks]) if ranks else []
        read = ((rank, self._read_answer(name, rank, text)) for rank, text in zip(ranks, texts, strict=True))
        return {rank: member for rank, member in read if member is not None}

    def _read_answer(self, name: str, rank: int, text: str) -> Member | None:
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
                "MASTER_ADDR and MASTER_PORT. Give each run another port."
            )
        if self.refused.get(rank) != why:
            self.refused[rank] = why
            _log.warning("refused at the rendezvous: %s", why)
        self._store.delete(f"trainstack/{name}/{rank}")
        self._store.set(_reply_to(member), why)
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
        """The text with a valid signature, or None."""
        mac, _, said = text.partition("\n")
        return said if hmac.compare_digest(mac, self._mac(about, said)) else None

    def _mac(self, about: str, text: str) -> str:
        return hmac.new(self._token.encode(), f"{about}\n{text}".encode(), hashlib.sha256).hexdigest()

    def _check_clock(self, missing: list[int]) -> None:
        if time.monotonic() > self._deadline:
            names = ", ".join(map(str, missing[:8])) + (", ..." if len(missing) > 8 else "")
            raise TimeoutError(f"rank{'s' if len(missing) > 1 else ''} {names} did not come")


def _reply_to(member: Member) -> str:
    """The key of rank 0's reply: an empty text confirms, another one is the reason of a refusal."""
    return f"trainstack/reply/{member.nonce}"


def packed_members(members: Mapping[int, Member]) -> str:
    """Members of one run as text. Hosts and addresses repeat, so compression leaves about 30 bytes for each."""
    facts = [[m.nonce, m.host, m.address, m.store_address] for _, m in sorted(members.items())]
    return base64.b64encode(zlib.compress(json.dumps(facts).encode())).decode()


def unpacked_members(text: str, run: dict[str, str]) -> list[Member]:
    """The members by rank. They share `run`."""
    facts = json.loads(zlib.decompress(base64.b64decode(text)))
    return [
        Member(nonce=nonce, run=run, host=host, address=address, store_address=store)
        for nonce, host, address, store in facts
    ]
