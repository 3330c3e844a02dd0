"""Which rows of which tensors each rank writes."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from trainstack._tensor_classes import is_sharded

SMALL_BYTES = 1 << 20
"""Rank 0 writes all tensors up to this size that every rank has."""


@dataclass(frozen=True, slots=True)
class Rows:
    """The rows of a tensor that this rank writes.

    Attributes:
        values: of the rows, shape `(rows, ...)`; a tensor without dimensions is its own only row.
        whole: the shape of the whole tensor.
        first: the first of the rows.
    """

    values: torch.Tensor
    whole: list[int]
    first: int


def divides_rows(tensor: Any) -> bool:
    """Whether a sharded tensor is divided along its first dimension alone, into plain tensors, or has copies only.

    Then each rank writes its rows. Other tensors have to be whole before they are written.
    """
    from torch.distributed.tensor import Replicate, Shard

    shards = [one for one in tensor.placements if not isinstance(one, Replicate)]
    along_rows = all(type(one) is Shard and one.dim == 0 for one in shards) and len(shards) <= 1
    return along_rows and type(tensor.to_local().detach()) is torch.Tensor


def own_rows(tensor: Any) -> Rows:
    """The rows of a sharded tensor that this rank writes: of ranks with the same rows, each writes its share of them.

    Args:
        tensor: a `DTensor` of which `divides_rows` is True.
    """
    from torch.distributed.tensor import Shard

    mesh, whole, local = tensor.device_mesh, list(tensor.shape), tensor.detach().to_local()
    first, copies, copy = 0, 1, 0
    for dimension, placement in enumerate(tensor.placements):
        if isinstance(placement, Shard):  # as torch.chunk divides: the first ranks have the most rows
            first = min(whole[0], mesh.get_local_rank(dimension) * -(-whole[0] // mesh.size(dimension)))
        else:
            copies, copy = copies * mesh.size(dimension), copy * mesh.size(dimension) + mesh.get_local_rank(dimension)
    if not whole:
        return Rows(local if copy == 0 else local.new_empty(0), whole, 0)
    begin, end = (len(local) * number // copies for number in (copy, copy + 1))
    return Rows(local[begin:end], whole, first + begin)


def owners(tensors: Mapping[str, torch.Tensor], size: int) -> dict[str, int]:
    """The rank that writes each of the tensors that every rank has: small ones rank 0, others the one with the least.

    All ranks get the same answer, since it depends on names and sizes alone.
    """
    loads, chosen = [0] * size, dict[str, int]()
    plain = {name: one.nbytes for name, one in tensors.items() if not is_sharded(one)}
    for name, count in sorted(plain.items(), key=lambda item: (-item[1], item[0])):
        rank = 0 if count <= SMALL_BYTES else loads.index(min(loads))
        loads[rank] += count
        chosen[name] = rank
    return chosen


def rows_of_rank(
    tensors: Mapping[str, torch.Tensor], rank: int, size: int, *, balanced: bool
) -> tuple[dict[str, Rows], dict[str, tuple[torch.dtype, list[int]]]]:
    """The rows that this rank writes, and dtype and shape of all tensors by name.

    Args:
        tensors: by name, plain and sharded ones.
        rank: this one.
        size: how many ranks there are.
        balanced: let large plain tensors be written by all ranks in turn. Else rank 0 writes them, as it has to where
            they may differ between ranks.
    """
    chosen, found = owners(tensors, size) if balanced else {}, dict[str, Rows]()
    for name, tensor in tensors.items():
        if is_sharded(tensor) and tensor.numel():
            found[name] = own_rows(tensor)
        elif chosen.get(name, 0) == rank:
            plain = torch.empty(tensor.shape, dtype=tensor.dtype) if is_sharded(tensor) else tensor  # without elements
            found[name] = Rows(plain, list(tensor.shape), 0)
    layout = {name: (tensor.dtype, list(tensor.shape)) for name, tensor in tensors.items()}
    return {name: rows for name, rows in found.items() if rows.values.numel() or not math.prod(rows.whole)}, layout
