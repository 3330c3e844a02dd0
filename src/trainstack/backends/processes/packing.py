"""Packing of many tensors of all dtypes into one buffer of bytes, for one broadcast or one copy."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate

import torch
from torch import Tensor

from trainstack._tensor_bytes import bytes_of
from trainstack.backends.processes.world import World

_BUCKET_BYTES = 32 << 20
"""The most memory of a broadcast in addition to the tensors themselves, unless one of them is larger."""


def broadcast_coalesced(world: World, tensors: Sequence[Tensor]) -> None:
    """Broadcast the values of rank 0 to `tensors`, in place. All processes call it together, with equal shapes.

    The data is sent as bytes, so that gloo and nccl accept every dtype, and in large buffers, because models may have
    hundreds of small tensors. A tensor that is not dense may have another size on another process, so each of these is
    sent separately.
    """
    tensors = [tensor for tensor in tensors if not tensor.is_meta]  # those have no values yet
    if world.size == 1:
        return
    for bucket in in_buckets([tensor for tensor in tensors if is_dense(tensor)], _BUCKET_BYTES):
        packed = pack(bucket).to(world.device)
        world.comm.broadcast_(packed)
        if not world.is_main:
            for tensor, values in zip(bucket, unpack(packed, bucket), strict=True):
                tensor.data.copy_(values)
    with torch.no_grad():  # `tensor.data` of a sparse tensor has its own indices and values
        for tensor in tensors:
            if not is_dense(tensor):
                tensor.copy_(world.comm.broadcast_object(tensor.detach().cpu(), "sharing a sparse buffer"))


def is_dense(tensor: Tensor) -> bool:
    """Whether a tensor is strided, and neither quantized nor nested, so that `pack` can copy its bytes."""
    return tensor.layout is torch.strided and not tensor.is_quantized and not tensor.is_nested


def pack(tensors: Sequence[Tensor]) -> Tensor:
    """The bytes of dense tensors on one device, as one new uint8 tensor."""
    return torch.cat([bytes_of(tensors[i].detach().resolve_conj().resolve_neg()) for i in _by_size(tensors)])


def unpack(packed: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """Views of `packed`, a result of `pack`, with the shapes and dtypes of `like`, in the order of `like`."""
    order = _by_size(like)
    ends = accumulate(like[i].numel() * like[i].element_size() for i in order)
    found, begin = list(like), 0
    for i, end in zip(order, ends, strict=True):
        found[i] = packed[begin:end].view(like[i].dtype).view(like[i].shape)
        begin = end
    return found


def _by_size(tensors: Sequence[Tensor]) -> list[int]:
    """Indices, large elements first: each tensor then begins at a multiple of its element size, as `view` requires."""
    return sorted(range(len(tensors)), key=lambda i: -tensors[i].element_size())


def in_buckets(tensors: Sequence[Tensor], limit: int) -> Iterator[list[Tensor]]:
    """`tensors` in their order, in groups of one device and at most `limit` bytes; a larger tensor is a group alone."""
    bucket: list[Tensor] = []
    size = 0
    for tensor in tensors:
        if bucket and (size + tensor.nbytes > limit or tensor.device != bucket[0].device):
            yield bucket
            bucket, size = [], 0
        bucket.append(tensor)
        size += tensor.nbytes
    if bucket:
        yield bucket
