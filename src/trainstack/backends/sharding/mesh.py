"""The process groups and the mesh over which a module is sharded, and perhaps replicated."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from trainstack.errors import ConfigurationError

Rows = list[list[int]]

_numbers = itertools.count()


def check_replicas(size: int, replicas: int) -> None:
    """Refuse a number of replicas that does not divide the number of processes.

    Raises:
        ConfigurationError: the message lists the numbers that divide it.
    """
    if not isinstance(replicas, int) or isinstance(replicas, bool) or replicas < 1 or size % replicas:
        fits = ", ".join(str(count) for count in range(1, size + 1) if size % count == 0)
        raise ConfigurationError(
            f"backend_options={{'fsdp': {{'replicate': {replicas!r}}}}} with {size} processes: each replica of the "
            f"module needs the same number of them. Write one of {fits}."
        )


def make_groups(
    size: int, replicas: int, new_group: Callable[[list[int]], dist.ProcessGroup]
) -> list[dist.ProcessGroup]:
    """This process's group across the replicas, and the group of its replica. All processes call it together.

    Neighbouring ranks are in one replica, so if a host holds a replica, shards are exchanged within the host.
    """
    within = _ranks(size, replicas)
    found = []
    for rows in (list(map(list, zip(*within, strict=True))), within):
        for ranks in rows:
            made = new_group(ranks)
            if dist.get_rank() in ranks:
                found.append(made)
    return found


def make_mesh(groups: Sequence[dist.ProcessGroup], device_type: str, replicas: int) -> DeviceMesh:
    """The mesh of all processes, from one group or from the two of `make_groups`.

    Its dimensions have unique names in this process. torch 2.13.0 treats meshes of the same ranks and names as equal,
    even if their groups differ, and its caches would give a training the groups of an earlier one.
    """
    number = next(_numbers)
    names = (f"replicate-{number}", f"shard-{number}")
    if len(groups) == 1:
        return DeviceMesh.from_group(groups[0], device_type, mesh_dim_names=names[1:])
    ranks = torch.tensor(_ranks(dist.get_world_size(), replicas))
    return DeviceMesh.from_group(list(groups), device_type, mesh=ranks, mesh_dim_names=names)


def _ranks(size: int, replicas: int) -> Rows:
    """The ranks of each replica."""
    each = size // replicas
    return [list(range(first, first + each)) for first in range(0, size, each)]
