"""Rank-dependent execution: in one process only, or in one process before the others.

The ranks are those of torch.distributed or, without a process group, of the environment variables of the launcher.
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
"""Timeout of one request to the store. After an interruption of the network of 25 s, TCP may take as long again until
it retransmits a packet."""


def global_rank() -> int:
    """The rank of this process: of the process group if there is one, else of the launcher's variables, else 0."""
    return dist.get_rank() if _has_group() else _first_number("RANK", "OMPI_COMM_WORLD_RANK", "SLURM_PROCID")


def local_rank() -> int:
    """The rank of this process on its machine, from the launcher's variables; 0 without them."""
    return _first_number("LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "SLURM_LOCALID")


def rank_zero_only(fn: Callable[P, T]) -> Callable[P, T | None]:
    """Call `fn` only on rank 0; on the other ranks the decorated function returns None immediately.

    The rank is read at each call, so a function can be decorated before the process group is initialized. The processes
    do not wait for each other: `fn` may raise, and only rank 0 needs to call the decorated function.

    Examples:
        >>> @ts.rank_zero_only
        ... def save_notes(text):
        ...     print(text)
        >>> save_notes("learning rate 0.1")
        learning rate 0.1
    """

    @functools.wraps(fn)
    def once(*args: P.args, **kwargs: P.kwargs) -> T | None:
        return fn(*args, **kwargs) if global_rank() == 0 else None

    return once


def print_once(*args: Any, once: Literal["world", "node"] = "world", **kwargs: Any) -> None:
    """`print` in one process of the job, or in one process of each machine.

    Args:
        args: as for `print`.
        once: `"world"` prints on rank 0, `"node"` on local rank 0 of each machine.
        kwargs: as for `print`.

    Examples:
        >>> ts.print_once("training begins")
        training begins
    """
    if (global_rank() if once == "world" else local_rank()) == 0:
        print(*args, **kwargs)  # noqa: T201 - the caller asked for it


@contextmanager
def main_process_first(local: bool = False, *, timeout_s: float = 3600.0) -> Iterator[bool]:
    """Run the body on rank 0 first, and then on the other ranks, for example to download a file once.

    All processes have to enter it. If the first process raises, the others raise, too, without running the body. The
    first process does not wait for the others, so an exception in them does not block it. Without a process group, and
    in a group of one process, the body is run without waiting.

    Args:
        local: run the body first on one process of each machine, for files that machines do not share.
        timeout_s: seconds that the other processes wait for the first one.

    Yields:
        Whether this process is the first one.

    Raises:
        TrainstackError: in the waiting processes, if the first one has raised, or has not left the body in time.

    Examples:
        >>> with ts.main_process_first() as first:
        ...     print("download" if first else "read the copy")
        download
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
    """The `text` of every process of the group, by rank; all processes have to call it with the same `subject`.

    It uses the store of the group, so it works with every backend, and before a device is chosen.

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
            f"rank {dist.get_rank()} has waited {timeout_s:g} s for the values of all {size} ranks for {subject!r}; "
            f"missing ranks: {missing}. All ranks have to make the same calls; look at the output of the missing ranks."
        ) from error


def host_identity() -> str:
    """A name of this machine; two agents of torchrun on one host count as two machines."""
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
