"""`Header`, the message of a rank at the beginning of an exchange, merged over all ranks.

The merge is recursive doubling: in round k a rank exchanges messages of a fixed size with the rank whose number differs
in bit k. So each rank sends log2(ranks) messages, and all ranks compute the same bits.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from operator import add

import torch
import torch.distributed as dist
from torch import Tensor

SIZE = 256
"""Bytes of a header: large enough for a few sums or a short text, and still one network packet."""

_FIXED = struct.Struct("<4sBB2xiIQQQQ")
_MAGIC = b"ts02"
_APART, _REFUSED = 1, 2
INLINE = SIZE - _FIXED.size - 2
"""Bytes of data that fit into the header."""

_TAG = 0x7574
"""The tag of the messages of a merge. Other messages between two ranks use other tags."""


@dataclass(slots=True, kw_only=True)
class Header:
    """The header of one rank, or the merged header of several.

    Attributes:
        kind, number, name: of the exchange; the name as a hash.
        longest, total: of the messages of the ranks, in bytes.
        refused: whether a rank refuses to send its message.
        apart: whether ranks are in different exchanges.
        foreign: a rank that sent other data than a header; -1 if there is none.
        values: the sums of the ranks' numbers.
        text: of the one rank with a short message for all.
    """

    kind: int
    number: int
    name: int
    longest: int = 0
    total: int = 0
    refused: bool = False
    apart: bool = False
    foreign: int = -1
    values: list[float] = field(default_factory=list)
    text: bytes = b""

    def merged(self, other: Header) -> Header:
        """The merged header of both."""
        differ = (self.kind, self.number, self.name) != (other.kind, other.number, other.name)
        return Header(
            kind=self.kind,
            number=self.number,
            name=self.name,
            longest=max(self.longest, other.longest),
            total=self.total + other.total,
            refused=self.refused or other.refused,
            apart=self.apart or other.apart or differ,
            foreign=max(self.foreign, other.foreign),
            values=list(map(add, self.values, other.values)),
            text=self.text or other.text,
        )

    def packed(self) -> Tensor:
        """The bytes, uint8 of shape `(SIZE,)`."""
        flags = self.apart * _APART + self.refused * _REFUSED
        body = struct.pack(f"<{len(self.values)}d", *self.values) if self.values else self.text
        fixed = (flags, self.kind, self.foreign, self.number, self.name, self.longest, self.total, len(self.values))
        data = bytearray(_FIXED.pack(_MAGIC, *fixed) + struct.pack("<H", len(body)) + body)
        return torch.frombuffer(data.ljust(SIZE, b"\0"), dtype=torch.uint8)

    @classmethod
    def unpacked(cls, data: Tensor, sender: int) -> Header:
        """The header in the bytes of the rank `sender`."""
        raw = data.numpy().tobytes()
        magic, flags, kind, foreign, number, name, longest, total, count = _FIXED.unpack_from(raw)
        (length,) = struct.unpack_from("<H", raw, _FIXED.size)
        if magic != _MAGIC or length > INLINE or 8 * count > INLINE:
            return cls(kind=0, number=0, name=0, foreign=sender)
        body = raw[_FIXED.size + 2 :]
        return cls(
            kind=kind,
            number=number,
            name=name,
            longest=longest,
            total=total,
            refused=bool(flags & _REFUSED),
            apart=bool(flags & _APART),
            foreign=foreign,
            values=list(struct.unpack_from(f"<{count}d", body)),
            text=b"" if count else body[:length],
        )


def merge_over_ranks(mine: Tensor, merge: Callable[[Tensor, Tensor, int], Tensor], group: dist.ProcessGroup) -> Tensor:
    """`mine` of all ranks, merged in pairs, with the same bits on all ranks.

    The ranks beyond the largest power of two send their data to a partner below it, and receive the result.

    Args:
        mine: on the CPU, contiguous, of one size and dtype on all ranks.
        merge: a function of the result so far, the received data and the rank that sent it; symmetric in the first two.
        group: a gloo group.
    """
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    power = 1 << (size.bit_length() - 1)
    if rank >= power:
        _send(mine, rank - power, group)
        return _receive(mine, rank - power, group)
    if rank + power < size:
        mine = merge(mine, _receive(mine, rank + power, group), rank + power)
    for bit in range(int(math.log2(power))):
        peer = rank ^ (1 << bit)
        sending = dist.isend(mine, group=group, group_dst=peer, tag=_TAG)
        theirs = _receive(mine, peer, group)
        assert sending is not None
        sending.wait()
        mine = merge(mine, theirs, peer)
    if rank + power < size:
        _send(mine, rank + power, group)
    return mine


def merge_headers(header: Header, group: dist.ProcessGroup) -> Header:
    """The merged header of all ranks."""
    rank = dist.get_rank(group)

    def merge(mine: Tensor, theirs: Tensor, sender: int) -> Tensor:
        return Header.unpacked(mine, rank).merged(Header.unpacked(theirs, sender)).packed()

    return Header.unpacked(merge_over_ranks(header.packed(), merge, group), rank)


def _send(data: Tensor, to: int, group: dist.ProcessGroup) -> None:
    sending = dist.isend(data, group=group, group_dst=to, tag=_TAG)
    assert sending is not None
    sending.wait()


def _receive(like: Tensor, sender: int, group: dist.ProcessGroup) -> Tensor:
    data = torch.empty_like(like)
    receiving = dist.irecv(data, group=group, group_src=sender, tag=_TAG)
    assert receiving is not None
    receiving.wait()
    return data
