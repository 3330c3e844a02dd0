"""Rank-dependent execution: once, or on the first process before the others.

A leaf module: it asks torch.distributed, or where there is no group the launcher's variables.
"""

from __future__ import annotations

import functools
import os
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Literal, ParamSpec, TypeVar

import torch.distributed as dist

from trainstack.errors import TrainstackError

P = ParamSpec("P")
T = TypeVar("T")

_DONE = "done"


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
    machines = exchange("machine", host_identity()) if local else []
    first = machines.index(machines[dist.get_rank()]) if local else 0  # the lowest rank on this machine
    store, key = _store(), f"{_next_key('first')}/{first}"
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


def exchange(subject: str, text: str) -> list[str]:
    """What every process of the group says on `subject`, by rank; all have to call it.

    It goes through the group's store, so it works with every backend, and before a device is chosen.
    """
    store, key = _store(), _next_key(subject)
    store.set(f"{key}/{dist.get_rank()}", text)
    return [store.get(f"{key}/{rank}").decode() for rank in range(dist.get_world_size())]


def host_identity() -> str:
    """A name for this machine; two agents of torchrun on one host count as two machines."""
    return f"{os.environ.get('GROUP_RANK', '')}@{socket.gethostname()}"


def _wait_for_first(store: Any, key: str, first: int, timeout_s: float) -> None:
    try:
        store.wait([key], timedelta(seconds=timeout_s))
        said = store.get(key).decode()
    except Exception as error:
        raise TrainstackError(
            f"main_process_first: rank {dist.get_rank()} waited for rank {first}, which has not come through within "
            f"{timeout_s:g} s or is gone. Every process has to enter main_process_first; a longer wait is "
            "main_process_first(timeout_s=...)."
        ) from error
    if said != _DONE:
        raise TrainstackError(
            f"main_process_first: rank {first}, which went first, raised {said}. Rank {dist.get_rank()} stops, too."
        )


def _next_key(subject: str) -> str:
    """The same new name in every process, as long as all ask equally often. The store counts, so nothing is global.

    torch 2.13 keeps the store over torchrun's restarts: the restart is part of the name.
    """
    prefix = f"trainstack/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}/{subject}"
    return f"{prefix}/{_store().add(f'{prefix}/calls/{dist.get_rank()}', 1)}"


def _store() -> Any:
    return dist.distributed_c10d._get_default_store()  # torch 2.13.0: there is no public way


def _has_group() -> bool:
    return dist.is_available() and dist.is_initialized()


def _first_number(*names: str) -> int:
    found = (os.environ.get(name, "") for name in names)
    return next((int(text) for text in found if text.isdecimal()), 0)
