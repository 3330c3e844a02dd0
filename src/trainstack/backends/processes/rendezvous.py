"""The rendezvous store of a process group."""

from __future__ import annotations

import json
import os
import time
import uuid
from collections.abc import Mapping
from datetime import timedelta

from torch.distributed import DistError, PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from trainstack.backends.processes.environment import ProcessInfo
from trainstack.errors import TrainstackError

_hosted_stores: dict[int, Store] = {}
"""Stores hosted by this process, by port; kept alive because another rank may still connect."""


def rendezvous_store(place: ProcessInfo, timeout_s: float, environ: Mapping[str, str] | None = None) -> Store:
    """The store to hand to `torch.distributed.init_process_group(store=...)`.

    It may hold what an earlier group has left: torchrun's agent keeps its store when it starts the workers again, and a
    process that hosts one keeps it from one trainer to the next. gloo would find addresses there at which nobody is,
    and wait for them for ever (seen with torch 2.13). So the processes first agree on a name that no other group has,
    and use only keys below it.

    Raises:
        TrainstackError: a process has not come within `timeout_s`.
    """
    environ = os.environ if environ is None else environ
    hosted = place.launcher == "torchrun" and environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    try:
        store: Store = TCPStore(
            place.master_addr,
            place.master_port,
            place.size,
            is_master=place.rank == 0 and not hosted,
            timeout=timedelta(seconds=timeout_s),
            multi_tenant=not hosted,
        )
    except DistError as error:
        point = f"{place.master_addr}:{place.master_port}"
        if "EADDRINUSE" in str(error):
            raise TrainstackError(
                f"rank 0 cannot host the meeting of the {place.size} processes at {point}: the port is in use, perhaps "
                "by another run. Take another one with MASTER_PORT; `torchrun --standalone` finds a free one."
            ) from error
        raise TrainstackError(
            f"rank {place.rank} of {place.size} has not met the others at {point} within {timeout_s:g} s ({error}). "
            "Every process has to come as far as the first use of its trainer: look at the output of the others, which "
            "may have failed before, and for an `if rank == 0:` around the training."
        ) from error
    if place.rank == 0 and place.size > 1 and not hosted:
        _hosted_stores[place.master_port] = store
    return PrefixStore(f"trainstack/{agree_on_group_name(store, place.rank, place.size, timeout_s)}", store)


def agree_on_group_name(store: Store, rank: int, size: int, timeout_s: float) -> str:
    """A name that all of this group have, and no other group: rank 0 invents it, the others answer to it.

    An answer to the name of an earlier group does no harm: rank 0 counts only answers to its own, and a process
    believes a name only when rank 0 has confirmed its own answer, which is new each time, too.
    """
    mine, deadline = uuid.uuid4().hex, time.monotonic() + timeout_s
    if rank == 0:
        store.set("trainstack/round", mine)
        answers = [_read(store, f"trainstack/{mine}/{other}", deadline, f"rank {other}") for other in range(1, size)]
        store.set(f"trainstack/{mine}/confirmed", json.dumps([mine, *answers]))
        return mine
    while True:
        name = _read(store, "trainstack/round", deadline, "rank 0")
        store.set(f"trainstack/{name}/{rank}", mine)
        confirmed = f"trainstack/{name}/confirmed"
        if store.check([confirmed]) and json.loads(store.get(confirmed))[rank : rank + 1] == [mine]:
            return name
        _wait(deadline, "rank 0")


def _read(store: Store, key: str, deadline: float, who: str) -> str:
    while not store.check([key]):
        _wait(deadline, who)
    return str(store.get(key).decode())


def _wait(deadline: float, who: str) -> None:
    if time.monotonic() > deadline:
        raise TrainstackError(
            f"{who} has not come to the meeting in time. Look at its output: it may have failed before, "
            "or wait longer with DistributedTrainingArguments(timeout_s=...)."
        )
    time.sleep(0.02)
