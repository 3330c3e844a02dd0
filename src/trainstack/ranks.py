"""Rank-dependent execution: once, or on the first process before the others.

A leaf module: it asks torch.distributed, or where there is no group the launcher's variables.
"""

from __future__ import annotations

import functools
import os
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal, ParamSpec, TypeVar

import torch.distributed as dist

from trainstack._store import StoreSilentError, TimedStore
from trainstack.errors import TrainstackError

P = ParamSpec("P")
T = TypeVar("T")

_DONE = "done"

_REQUEST_S = 120.0
"""For one answer of the store. After an interruption of 25 s TCP may need as long again until it repeats a packet."""


def global_rank() -> int:
    """This process among all: from the process group if there is one, else from the launcher's variables, else 0."""
    return dist.get_rank() if _has_group() else _first_number("RANK", "OMPI_COMM_WORLD_RANK", "SLURM_PROCID")


def local_rank() -> int:
    """This process among those of its machine, from the launcher's variables; 0 without them."""
    return _first_number("LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "SLURM_LOCALID")


def rank_zero_only(fn: Callable[P, T]) -> Callable[P, T | None]:
    """Call `fn` in the process of rank 0 and nowhere else; the others get None at once.

    The rank is looked up at each call, so decorating at import, before there is a group, is fine. Nobody waits
    for anybody: `fn` may raise, and the decorated function may be called by rank 0 alone.
    """

    @functools.wraps(fn)
    def once(*args: P.args, **kwargs: P.kwargs) -> T | None:
        return fn(*args, **kwargs) if global_rank() == 0 else None

    return once


def print_once(*args: Any, once: Literal["world", "node"] = "world", **kwargs: Any) -> None:
    """`print`, by one process of the world or one of each machine."""
    if (global_rank() if once == "world" else local_rank()) == 0:
        print(*args, **kwargs)  # noqa: T201 - the caller asked for it


@contextmanager
def main_process_first(local: bool = False, *, timeout_s: float = 3600.0) -> Iterator[bool]:
    """Let rank 0 go through the body first, and the others after it: one downloads, all read.

    All processes have to enter it. It cannot hang: when the first one raises, the others raise, too, without entering
    the body; when another one raises, the first has long gone on, because it waits for nobody. Without a process
    group, or in a group of one, the body is simply run.

    Args:
        local: one process of each machine goes first, for files that machines do not share.
        timeout_s: seconds after which those who wait give up.

    Yields:
        Whether this process is the one that goes first.

    Raises:
        TrainstackError: in those who wait, when the first has raised or has not come in time.
    """
    if not _has_group() or dist.get_world_size() == 1:
        yield True
        return
    machines = exchange("machine", host_identity(), timeout_s=timeout_s) if local else []
    first = machines.index(machines[dist.get_rank()]) if local else 0  # the lowest rank on this machine
    store, key = own_part("first", timeout_s), str(first)
    if dist.get_rank() != first:
        _wait_for_first(store, key, first, timeout_s)
        yield False
        return
    try:
        yield True
    except BaseException as error:
        store.set(key, f"{type(error).__name__}: {error}")
        raise
    store.set(key, _DONE)


def exchange(subject: str, text: str, *, timeout_s: float = 600.0) -> list[str]:
    """What every process of the group says on `subject`, by rank; all have to call it.

    It goes through the group's store, so it works with every backend, and before a device is chosen.

    Raises:
        TrainstackError: a process has not called it within `timeout_s`, or the store does not answer.
    """
    store, size = own_part(subject, timeout_s), dist.get_world_size()
    keys = [str(rank) for rank in range(size)]
    store.set(keys[dist.get_rank()], text)
    if store.add("count", 1) == size:
        store.set("complete", "")
    try:
        store.wait_for(["complete"], timeout_s, readers=size)
        return store.get_all(keys)
    except TimeoutError as error:
        missing = ", ".join(map(str, store.within(_REQUEST_S).missing(keys)))
        raise TrainstackError(
            f"rank {dist.get_rank()} has waited {timeout_s:g} s for what all {size} ranks say about {subject!r}; ranks "
            f"without a word: {missing}. All have to make the same calls; look at the output of the missing ones."
        ) from error


def host_identity() -> str:
    """A name for this machine; two agents of torchrun on one host count as two machines."""
    return f"{os.environ.get('GROUP_RANK', '')}@{socket.gethostname()}"


def _wait_for_first(store: TimedStore, key: str, first: int, timeout_s: float) -> None:
    try:
        said = store.wait_for([key], timeout_s, readers=dist.get_world_size())[0]
    except (TimeoutError, RuntimeError, StoreSilentError) as error:
        raise TrainstackError(
            f"main_process_first: rank {dist.get_rank()} waited for rank {first}, which has not come through within "
            f"{timeout_s:g} s or is gone ({error}). Every process has to enter main_process_first; a longer wait is "
            "main_process_first(timeout_s=...)."
        ) from error
    if said != _DONE:
        raise TrainstackError(
            f"main_process_first: rank {first}, which went first, raised {said}. Rank {dist.get_rank()} stops, too."
        )


def own_part(subject: str, timeout_s: float = _REQUEST_S) -> TimedStore:
    """A part of the group's store that no other call uses, the same in every process that calls equally often.

    A request to it ends within `timeout_s`. The store counts, so nothing is global.
    """
    # torch 2.13.0: there is no public way to the store
    store = TimedStore(dist.distributed_c10d._get_default_store(), min(timeout_s, _REQUEST_S))
    prefix = f"trainstack/{_restart()}/{subject}"
    return store.under(f"{prefix}/{store.add(f'{prefix}/calls/{dist.get_rank()}', 1)}")


def _restart() -> str:
    """A part of keys that keeps those of torchrun's starts apart, where these share a store.

    torch 2.13.0: they share the store of the first start, unless TORCH_DISABLE_SHARE_RDZV_TCP_STORE is 1, which a host
    needs to join a running job. The agent of that host counts its own starts, so ranks have different numbers.
    """
    if os.environ.get("TORCH_DISABLE_SHARE_RDZV_TCP_STORE") == "1":
        return "0"
    return os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")


def _has_group() -> bool:
    return dist.is_available() and dist.is_initialized()


def _first_number(*names: str) -> int:
    found = (os.environ.get(name, "") for name in names)
    return next((int(text) for text in found if text.isdecimal()), 0)
