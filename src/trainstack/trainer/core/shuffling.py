"""Permutations without memory: the index at a position is computed from a key."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from math import isqrt
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trainstack.errors import CheckpointMismatchError

ORDER_VERSION = 1
"""Version of the shuffle of more than `LARGEST_IN_MEMORY` samples in new runs. 0: `torch.randperm`; 1:
`KeyedPermutation`."""
LARGEST_IN_MEMORY = 2**20
"""Up to this number of samples (8 MiB of int64), a permutation is a tensor of `torch.randperm` in every version."""
BLOCK = 4096
"""Positions that are computed together, so that the overhead of numpy, about 1 us a call, is small."""

ROUNDS = 6
"""Rounds of the network. Neighbours of 257 samples are measurably dependent after 4 rounds, and not after 6."""


def check_order_version(version: int) -> int:
    """Return `version` if this release supports it.

    Raises:
        CheckpointMismatchError: the version is unknown.
    """
    if version not in range(ORDER_VERSION + 1):
        raise CheckpointMismatchError(
            f"the checkpoint's run shuffles its data with version {version} of the order, and this release of "
            f"trainstack has versions 0 to {ORDER_VERSION}: it would train on other samples. Resume with the release "
            "that wrote the checkpoint, or a later one."
        )
    return version


class KeyedPermutation:
    """A permutation of `range(length)` as a sequence of indices: a Feistel network over pairs of numbers.

    A position is written as a pair (left, right) with `left < rows` and `right < columns`. Each of 6 rounds adds a
    keyed hash of one number to the other one, modulo `rows` or `columns`, so each round is a bijection of the pairs.
    Results beyond `length` are permuted again until they are in range (cycle walking), which preserves the bijection
    (Black, Rogaway: Ciphers with Arbitrary Finite Domains, 2002). `rows * columns` exceeds `length` by less than the
    square root, so few positions need it; powers of two would need up to 4 passes for each position.

    The permutation is a shuffle, not a cipher: it does not keep the key secret. A change of any constant here needs a
    new `ORDER_VERSION`.

    Args:
        length: from 1 to 2**63.
        keys: 64 random bits for each of the `ROUNDS` rounds.
    """

    def __init__(self, length: int, keys: Sequence[int]) -> None:
        self._length = length
        root = isqrt(length - 1) + 1
        # Both numbers stay near the root, because with 1 column the permutation would only be a rotation. 64 candidates
        # are enough to find one with a small excess.
        candidates = range(root, root + 1 + min(63, root // 16))
        rows = min(candidates, key=lambda one: (-length % one, one))
        self._rows, self._columns = np.uint64(rows), np.uint64(-(-length // rows))
        self._keys = [np.uint64(key) for key in keys]
        self._block, self._values = -1, list[int]()

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, at: int) -> int:
        """Return the index at one position; fast for successive positions."""
        block, place = divmod(range(self._length)[at], BLOCK)
        if block != self._block:
            span = slice(block * BLOCK, min((block + 1) * BLOCK, self._length))
            self._values = next(self.parts([span])).tolist()
            self._block = block
        return self._values[place]

    def parts(self, spans: Iterable[slice]) -> Iterator[Tensor]:
        """Yield the indices at each of `spans`, int64 of shape `(stop - start,)`, computed in blocks."""
        waiting, size = list[Any](), 0
        for span in spans:
            waiting.append(np.arange(span.start, span.stop, dtype=np.uint64))
            size += max(1, len(waiting[-1]))
            if size >= BLOCK:
                yield from self._together(waiting)
                waiting, size = [], 0
        if waiting:
            yield from self._together(waiting)

    def _together(self, parts: list[Any]) -> Iterable[Tensor]:
        return torch.split(self._at(np.concatenate(parts)), [len(part) for part in parts])

    def _at(self, positions: Any) -> Tensor:
        found = self._permuted(positions)
        outside = np.flatnonzero(found >= self._length)
        while len(outside):
            found[outside] = self._permuted(found[outside])
            outside = outside[found[outside] >= self._length]
        return torch.from_numpy(found.view(np.int64))

    def _permuted(self, positions: Any) -> Any:
        left = positions // self._columns
        right = positions - left * self._columns
        for even, odd in zip(self._keys[::2], self._keys[1::2], strict=True):
            left = _shifted(left, right, even, self._rows)
            right = _shifted(right, left, odd, self._columns)
        left *= self._columns
        left += right
        return left


class DataSetOrder:
    """The indices of `range(length)` in ascending order, with the methods of `KeyedPermutation`."""

    def __init__(self, length: int) -> None:
        self._length = length

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, at: int) -> int:
        return range(self._length)[at]

    def parts(self, spans: Iterable[slice]) -> Iterator[Tensor]:
        """Yield the indices at each of `spans`, int64 of shape `(stop - start,)`."""
        return (torch.arange(span.start, span.stop) for span in spans)


def _shifted(value: Any, other: Any, key: Any, size: Any) -> Any:
    """Return `value` plus a hash of `other`, modulo `size`; uint64 below 2**32, so `size` times the hash fits 64 bits.

    The hash is uniform up to `size / 2**32`, and the sum is a bijection of `value` for any hash.
    """
    drawn = other ^ key
    drawn *= _FIRST
    drawn ^= drawn >> _HALF
    drawn *= _SECOND
    drawn >>= _HALF
    drawn *= size
    drawn >>= _HALF
    drawn += value
    return np.minimum(drawn, drawn - size)  # a negative difference wraps around to a large number


# Odd constants of SplitMix64: a product spreads each bit over the upper half of the number.
_FIRST, _SECOND, _HALF = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB), np.uint64(32)
