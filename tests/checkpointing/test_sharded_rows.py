"""The rows that each rank writes: each row once, and large copies by all ranks in turn."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from torch.distributed.tensor import Partial, Replicate, Shard

from trainstack.checkpointing.sharded.rows import SMALL_BYTES, divides_rows, own_rows, owners


class Mesh:
    """A mesh of ranks, seen from one of them."""

    def __init__(self, sizes: tuple[int, ...], place: tuple[int, ...]) -> None:
        self._sizes, self._place = sizes, place

    def size(self, dimension: int) -> int:
        return self._sizes[dimension]

    def get_local_rank(self, dimension: int) -> int:
        return self._place[dimension]


class Divided:
    """The attributes of a DTensor that `own_rows` reads."""

    def __init__(self, whole: torch.Tensor, mesh: Mesh, placements: list[Any]) -> None:
        self.device_mesh, self.placements, self.shape, self._local = mesh, placements, whole.shape, whole
        for dimension, placement in enumerate(placements):
            if isinstance(placement, Shard):
                parts = whole.chunk(mesh.size(dimension))
                rank = mesh.get_local_rank(dimension)
                self._local = parts[rank] if rank < len(parts) else whole[:0]

    def detach(self) -> Divided:
        return self

    def to_local(self) -> torch.Tensor:
        return self._local


@pytest.mark.parametrize("placements", [[Replicate(), Shard(0)], [Shard(0), Replicate()], [Replicate(), Replicate()]])
@pytest.mark.parametrize("sizes", list(product((1, 2, 3), (1, 2, 4))))
def test_each_row_is_written_once(sizes: tuple[int, int], placements: list[Any]) -> None:
    for rows in (1, 2, 3, 5, 8, 13):
        whole = torch.arange(2.0 * rows).reshape(rows, 2)
        written: list[int] = []
        for place in product(*(range(size) for size in sizes)):
            tensor = Divided(whole, Mesh(sizes, place), placements)
            assert divides_rows(tensor)
            found = own_rows(tensor)
            assert torch.equal(found.values, whole[found.first : found.first + len(found.values)])
            assert found.whole == [rows, 2]
            written += range(found.first, found.first + len(found.values))
        assert sorted(written) == list(range(rows))


def test_a_tensor_without_dimensions_is_written_once() -> None:
    places = product(range(2), range(3))
    found = [own_rows(Divided(torch.tensor(3.0), Mesh((2, 3), place), [Replicate()] * 2)) for place in places]
    assert [rows.values.numel() for rows in found] == [1, 0, 0, 0, 0, 0]


@pytest.mark.parametrize("placements", [[Shard(1)], [Partial()], [Shard(0), Shard(0)]])
def test_a_tensor_that_is_divided_otherwise_has_to_be_whole(placements: list[Any]) -> None:
    sizes = (2,) * len(placements)
    tensor = Divided(torch.ones(4, 4), Mesh(sizes, (0,) * len(placements)), [Replicate()] * len(placements))
    tensor.placements = placements
    assert not divides_rows(tensor)


def test_ranks_share_large_copies_and_rank_0_writes_small_ones() -> None:
    large = {f"large.{n}": torch.empty(SMALL_BYTES // 4 * (n + 2)) for n in range(7)}
    small = {f"small.{n}": torch.empty(10) for n in range(3)}

    chosen = owners({**large, **small}, 3)

    assert chosen == owners(dict(reversed({**small, **large}.items())), 3)
    assert {chosen[name] for name in small} == {0}
    loads = [sum(large[name].nbytes for name in large if chosen[name] == rank) for rank in range(3)]
    assert max(loads) <= 1.5 * min(loads)
