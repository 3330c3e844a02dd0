"""`RowGrid` divides the bytes of a tensor into leaves and chunks. The boundaries depend only on its shape and dtype.

Processes hold consecutive rows, which may begin and end anywhere, so a process may hold a part of a chunk. The hash of
a chunk is the hash of the hashes of its leaves, and leaves are short: the processes that share a chunk exchange the
hashes of whole leaves and the bytes of the few divided leaves. So the hash of each chunk, and with it the root over all
chunks, is the same for any division of the rows. This is a hash tree (Merkle, 1987) with three levels.
"""

from __future__ import annotations

import base64
import binascii
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import xxhash

from trainstack.checkpointing.checksums import CHUNK_BYTES

LEAF_BYTES = 4096
"""A leaf has as many whole rows as fit into this number of bytes. A longer row is one leaf."""

WIDE_BYTES = 1 << 16
"""A longer row is divided into leaves of this length. Both numbers are constants of the format."""

_hash = xxhash.xxh3_128_digest
Span = tuple[int, int]
"""First byte and end in the row-major bytes of a whole tensor."""


@dataclass(frozen=True, slots=True)
class RowGrid:
    """The chunk and leaf boundaries of one tensor.

    Attributes:
        size: of the whole tensor in bytes.
        period: bytes after which the boundaries repeat: the size of a row, or of the rows of one leaf.
    """

    size: int
    period: int

    @classmethod
    def of(cls, shape: Sequence[int], item_size: int) -> RowGrid:
        """The grid of a tensor of this shape. A tensor without dimensions has one row."""
        row = max(1, math.prod(shape[1:]) * item_size)
        return cls(math.prod(shape) * item_size, row if row >= LEAF_BYTES else LEAF_BYTES // row * row)

    def chunks(self, start: int, end: int) -> Iterator[Span]:
        """The parts of chunks from `start` to `end`, in order; each has at most `CHUNK_BYTES`."""
        whole = CHUNK_BYTES // self.period * self.period
        return _cut(start, end, *((whole, whole) if whole else (self.period, CHUNK_BYTES)))

    def chunk_at(self, position: int) -> Span:
        """The whole chunk that contains this byte."""
        whole = CHUNK_BYTES // self.period * self.period
        return _around(position, self.size, *((whole, whole) if whole else (self.period, CHUNK_BYTES)))

    def digest(self, data: bytes | memoryview, start: int) -> str:
        """The hash of a chunk, or of a part of one, that begins at the byte `start` of the tensor."""
        leaves = self._leaves(start, start + len(data))
        return _hash(b"".join([_hash(data[first - start : end - start]) for first, end in leaves])).hex()

    def share(self, data: bytes | memoryview, start: int) -> ChunkShare:
        """The values from which other processes compute the hash of a whole chunk, for a part of it."""
        head, hashes, tail = bytearray(), bytearray(), b""
        for first, end in self._leaves(start, start + len(data)):
            piece = data[first - start : end - start]
            if self._leaf_at(first) == (first, end):
                hashes += _hash(piece)
            elif first == start:
                head += piece
            else:
                tail = bytes(piece)
        return ChunkShare(start, len(data), bytes(head), bytes(hashes), tail)

    def join(self, chunk: Span, shares: Iterable[ChunkShare]) -> str:
        """The hash of a chunk that is divided over several processes.

        Raises:
            ValueError: the shares do not form this chunk.
        """
        position, open_leaf, hashes = chunk[0], bytearray(), bytearray()
        for share in sorted(shares, key=lambda one: one.start):
            if share.start != position:
                raise ValueError(f"no process has the bytes {position} to {share.start}, or two have them")
            open_leaf += share.head
            after_head = position + len(share.head)
            if share.head and self._leaf_at(position)[1] == after_head:
                hashes += _hash(bytes(open_leaf))
                open_leaf.clear()
            hashes += share.hashes
            open_leaf += share.tail
            position += share.size
        if position != chunk[1] or open_leaf:
            raise ValueError(f"the shares end at byte {position}, but the chunk at {chunk[1]}")
        return _hash(bytes(hashes)).hex()

    def _leaves(self, start: int, end: int) -> Iterator[Span]:
        return _cut(start, end, self.period, min(WIDE_BYTES, self.period))

    def _leaf_at(self, position: int) -> Span:
        return _around(position, self.size, self.period, min(WIDE_BYTES, self.period))


@dataclass(frozen=True, slots=True)
class ChunkShare:
    """The report of one process on its part of a chunk.

    Attributes:
        start: of the part, in bytes of the whole tensor.
        size: of the part in bytes.
        head: the bytes of a leaf that begins before the part, or that contains the part.
        hashes: those of the whole leaves, one after the other.
        tail: the bytes of a leaf that ends after the part.
    """

    start: int
    size: int
    head: bytes
    hashes: bytes
    tail: bytes

    def to_json(self) -> list[Any]:
        """The share as a list for JSON."""
        return [self.start, self.size, *(base64.b64encode(one).decode() for one in (self.head, self.hashes, self.tail))]

    @classmethod
    def from_json(cls, body: Any) -> ChunkShare:
        """The share from a result of `to_json`.

        Raises:
            ValueError: `body` is not a share.
        """
        kinds = [type(one) for one in body] if type(body) is list else []
        if kinds != [int, int, str, str, str]:
            raise ValueError("the share of a chunk is not a share")
        try:
            return cls(body[0], body[1], *(base64.b64decode(one, validate=True) for one in body[2:]))
        except binascii.Error as error:
            raise ValueError(f"the share of a chunk is not a share: {error}") from error


def _cut(start: int, end: int, period: int, step: int) -> Iterator[Span]:
    """`start` to `end`, divided at each multiple of `period`, and at multiples of `step` from there."""
    while start < end:
        base = start - start % period
        stop = min(base + min((start - base) // step * step + step, period), end)
        yield start, stop
        start = stop


def _around(position: int, size: int, period: int, step: int) -> Span:
    base = position - position % period
    first = base + (position - base) // step * step
    return first, min(first + step, base + period, size)
