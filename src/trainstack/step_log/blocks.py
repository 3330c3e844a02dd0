"""The blocks of a step log. Each is compared with its chain."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from trainstack._files import open_for_reading
from trainstack.step_log.format import CHAIN_BYTES, HEAD, MAGIC, MAX_PAYLOAD, Kind, first_chain, next_chain

_KINDS = frozenset(map(int, Kind))


class Block(NamedTuple):
    """A block with a valid chain.

    Attributes:
        kind: of the payload.
        place: of the payload in the file.
        payload: its bytes.
        chain: after the block.
    """

    kind: int
    place: int
    payload: bytes
    chain: bytes

    @property
    def end(self) -> int:
        """The place in the file after the block."""
        return self.place + len(self.payload) + CHAIN_BYTES


def read_blocks(path: Path, report: Callable[[str], None] = lambda problem: None) -> Iterator[Block]:
    """The blocks of the intact part of a step log, from the first one on.

    Args:
        path: of the log.
        report: called with the reason if the intact part ends before the file does.

    Raises:
        OSError: the file cannot be read, or is not a regular file.
    """
    with open_for_reading(path) as file:
        size, chain, place = os.fstat(file.fileno()).st_size, first_chain(), len(MAGIC)
        if file.read(len(MAGIC)) != MAGIC:
            report("it does not begin as a step log does")
            return
        while place < size:
            head = file.read(HEAD.size)
            if len(head) < HEAD.size:
                report(f"the block at byte {place} is cut off")
                return
            kind, length = HEAD.unpack(head)
            if kind not in _KINDS or length > MAX_PAYLOAD:
                report(f"at byte {place} no block begins")
                return
            if place + HEAD.size + length + CHAIN_BYTES > size:
                report(f"the block at byte {place} is cut off")
                return
            payload = file.read(length)
            chain = next_chain(chain, head, payload)
            if file.read(CHAIN_BYTES) != chain:
                report(f"the block at byte {place} is damaged, or is not the one that was written there")
                return
            block = Block(kind, place + HEAD.size, payload, chain)
            yield block
            place = block.end
