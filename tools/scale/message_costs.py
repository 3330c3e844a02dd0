"""Formulas for the messages of a rank in an exchange; tests compare them with calls of gloo on 2, 4 and 8 ranks.

"Before" is commit 24724a0. gloo's all-gather is a ring: a rank sends a block to its neighbour for each other rank.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from trainstack.backends.processes.headers import SIZE


@dataclass(frozen=True, slots=True, kw_only=True)
class Sent:
    """The messages of the rank that sends most.

    Attributes:
        messages: their number. They are sequential, so the exchange takes this number of network latencies.
        bytes: their total size.
    """

    messages: int
    bytes: int

    def __add__(self, other: Sent) -> Sent:
        return Sent(messages=self.messages + other.messages, bytes=self.bytes + other.bytes)


def merge(size: int, width: int = SIZE) -> Sent:
    """Recursive doubling of `width` bytes; with more ranks than a power of two, one rank sends once more."""
    power = int(math.log2(size))
    messages = power + (size > 1 << power)
    return Sent(messages=messages, bytes=messages * width)


def all_gather(size: int, width: int) -> Sent:
    """A ring, of `width` bytes of each rank."""
    return Sent(messages=size - 1, bytes=(size - 1) * width)


def gather(size: int, length: int) -> Sent:
    """`Communicator.gather` of messages of one length, up to 4096 bytes."""
    return merge(size) + all_gather(size, length + 16)


def gather_before(size: int, length: int) -> Sent:
    """The same in 24724a0: headers by an all-gather, and a second one for more than 224 bytes."""
    first = all_gather(size, SIZE)
    return first if length <= SIZE - 32 else first + all_gather(size, length)


def sum_before(size: int) -> Sent:
    """`Communicator.sum` in 24724a0."""
    return all_gather(size, SIZE)
