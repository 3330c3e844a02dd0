"""The division of tensors over the ranks that write them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from trainstack._tensor_classes import is_sharded

SMALL_BYTES = 1 << 20
"""Rank 0 writes all tensors up to this size that every rank has: more files would cost more than they save."""


@dataclass(frozen=True, slots=True)
class Rows:
    """The rows of a tensor that this rank writes.

    Attributes:
        values: of the rows, shape `(rows, ...)`; a tensor without dimensions counts as one row.
        whole: the shape of the whole tensor.
        first: the index of the first row.
    """

    values: torch.Tensor
    whole: list[int]
    first: int


def divides_rows(tensor: Any) -> bool:
    """Whether a sharded tensor is only sharded along its first dimension, into plain tensors, or only replicated.

    Then each rank writes its rows. Other tensors have to be gathered before they are written.
    """
    from torch.distributed.tensor import Replicate, Shard

    shards = [one for one in tensor.placements if not isinstance(one, Replicate)]
    along_rows = all(type(one) is Shard and one.dim == 0 for one in shards) and len(shards) <= 1
    return along_rows and type(tensor.to_local().detach()) is torch.Tensor


def own_rows(tensor: Any) -> Rows:
    """The rows of a sharded tensor that this rank writes. Ranks with the same rows write one part of them each.

    Args:
        tensor: a `DTensor` for which `divides_rows` is True.
    """
    from torch.distributed.tensor import Shard

    mesh, whole, local = tensor.device_mesh, list(tensor.shape), tensor.detach().to_local()
    first, copies, copy = 0, 1, 0
    for dimension, placement in enumerate(tensor.placements):
        if isinstance(placement, Shard):  # torch.chunk's rule: ceil(rows / ranks) rows for the first ranks
            first = min(whole[0], mesh.get_local_rank(dimension) * -(-whole[0] // mesh.size(dimension)))
        else:
            copies, copy = copies * mesh.size(dimension), copy * mesh.size(dimension) + mesh.get_local_rank(dimension)
    if not whole:
        return Rows(local if copy == 0 else local.new_empty(0), whole, 0)
    begin, end = (len(local) * number // copies for number in (copy, copy + 1))
    return Rows(local[begin:end], whole, first + begin)


def owners(tensors: Mapping[str, torch.Tensor], size: int) -> dict[str, int]:
    """The rank that writes each tensor that every rank has: rank 0 for small ones, otherwise the rank with the fewest
    bytes.

    All ranks get the same result, because it depends only on names and sizes.
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
        tensors: plain and sharded tensors, by name.
        rank: of this process.
        size: the number of ranks.
        balanced: whether all ranks write large plain tensors in turn. If not, rank 0 writes them, which is necessary if
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
