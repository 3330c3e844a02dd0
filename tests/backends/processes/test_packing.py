"""Many tensors as one buffer of bytes."""

from __future__ import annotations

import pytest
import torch

from tests.helpers.processes import run_world
from tests.helpers.workers import collectives
from trainstack.backends.processes.packing import in_buckets, pack, unpack


def test_every_dtype_and_shape_comes_back() -> None:
    names = (
        "float32",
        "float64",
        "int64",
        "int16",
        "uint8",
        "bool",
        "bfloat16",
        "float8_e4m3fn",
        "complex64",
        "uint16",
    )
    given = [torch.arange(1, 6).to(getattr(torch, name)) for name in names]
    given += [
        torch.tensor(3.0),
        torch.ones(0, 4),
        torch.ones(2, 3).t(),
        torch.ones(4)[::2],
        torch.ones(2).mul(1j).conj(),
    ]
    packed = pack(given)
    assert packed.dtype is torch.uint8
    for one, other in zip(given, unpack(packed, given), strict=True):
        assert (one.dtype, one.shape) == (other.dtype, other.shape)
        assert torch.equal(one.to(torch.complex128), other.to(torch.complex128))


def test_buckets_keep_the_order_and_the_limit() -> None:
    tensors = [torch.ones(n) for n in (1, 1, 5, 1, 1, 1)] + [torch.ones(1, device="meta"), torch.ones(1)]
    assert [[len(one) for one in bucket] for bucket in in_buckets(tensors, 12)] == [[1, 1], [5], [1, 1, 1], [1], [1]]
    assert list(in_buckets([], 12)) == []


@pytest.mark.distributed
@pytest.mark.parametrize("size", [2, 3])
def test_buffers_of_all_kinds_are_sent_in_few_broadcasts(size: int) -> None:
    for rank in run_world(size, collectives.coalesced):
        assert rank["sent"] == ["torch.uint8"] * 2  # the last does not fit into the first bucket
        assert rank["equal"] == [True] * 50
        assert rank["strides"]


@pytest.mark.distributed
def test_an_evaluation_begins_with_one_broadcast_of_buffers() -> None:
    one, other = run_world(2, collectives.evaluation_broadcasts)
    assert one["sent"] == other["sent"] == 1
    assert one["total"] == other["total"]
