"""Sharded checkpoints that one process writes, in the place of several ranks."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from trainstack.checkpointing import Checkpoint
from trainstack.checkpointing.sharded.commit import ShardedDirectory
from trainstack.checkpointing.sharded.parts import Layout, write_part
from trainstack.checkpointing.tensorfile import TensorPart
from trainstack.checkpointing.writing import Payload, encode, payload_of

Borders = Callable[[str, torch.Tensor], Sequence[int]]
"""The first row of each rank but the first one, of a tensor of this name; ascending."""

_PARTS = {"model.safetensors": "model", "state.safetensors": "state"}


def as_chunked(size: int) -> Borders:
    """The borders of `torch.chunk`, and so those of `fully_shard`."""

    def borders(name: str, tensor: torch.Tensor) -> list[int]:
        rows = len(tensor) if tensor.dim() else 1
        return [min(rows, rank * -(-rows // size)) for rank in range(1, size)]

    return borders


def write_sharded(
    checkpoint: Checkpoint, directory: Path, name: str, size: int, borders: Borders | None = None
) -> Path:
    """Write `checkpoint` as `size` ranks would that hold rows of all its tensors."""
    tensors, texts = encode(checkpoint)
    layout: Layout = {key: (one.dtype, list(one.shape)) for found in tensors.values() for key, one in found.items()}
    made = ShardedDirectory(directory, name, 0)
    reports, payloads = [], list[Payload]()
    for rank in range(size):
        parts = {}
        for file, found in tensors.items():
            if file in _PARTS:
                own = {key: _rows(key, one, rank, size, borders or as_chunked(size)) for key, one in found.items()}
                own = {
                    key: rows for key, rows in own.items() if rows[0].numel() or (rank == 0 and not found[key].numel())
                }
                file = f"{_PARTS[file]}.rank-{rank + 1:05d}-of-{size:05d}.safetensors"
            elif rank == 0:
                own = {key: (one, list(one.shape), 0) for key, one in found.items()}
            else:
                continue
            if own:
                places = {key: (whole, first) for key, (_, whole, first) in own.items()}
                parts[file] = TensorPart.of({key: rows for key, (rows, _, _) in own.items()}, places)
        payloads.append(payload_of(checkpoint, parts, texts))
        reports.append(write_part(made.path, parts, rank, threading.Event()))
    try:
        from trainstack.checkpointing.directory import scan

        return made.commit(payloads[0], reports, layout, scan(directory).highest + 1, None)
    finally:
        made.discard()


def _rows(
    name: str, tensor: torch.Tensor, rank: int, size: int, borders: Borders
) -> tuple[torch.Tensor, list[int], int]:
    whole = list(tensor.shape)
    if not tensor.dim() or not tensor.numel():
        return (tensor if rank == 0 else tensor.new_empty(0)), whole, 0
    cuts = [0, *borders(name, tensor), len(tensor)]
    return tensor[cuts[rank] : cuts[rank + 1]], whole, cuts[rank]
