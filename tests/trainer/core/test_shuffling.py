"""Keyed permutations are bijections, and as random as shuffling needs."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from trainstack.errors import CheckpointMismatchError
from trainstack.trainer.core import order as order_module
from trainstack.trainer.core.order import DataOrder, OrderCursor, RankSlice
from trainstack.trainer.core.shuffling import BLOCK, LARGEST_IN_MEMORY, ORDER_VERSION, DataSetOrder, KeyedPermutation
from trainstack.trainer.core.state import RunState

LENGTHS = [*range(1, 70), 97, 251, 255, 256, 257, 1000, 1021, 1023, 1024, 1025, 4093, 65_535, 65_536, 65_537, 99_991]
HUGE = [LARGEST_IN_MEMORY + 1, 10**9, 10**12, 2**62]


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give small data sets the order of large ones."""
    monkeypatch.setattr(order_module, "LARGEST_IN_MEMORY", 0)


def whole(length: int, seed: int = 0, epoch: int = 0) -> Tensor:
    found = DataOrder(length=length, global_batch=1, micro_batch=1, seed=seed).indices(epoch)
    assert isinstance(found, KeyedPermutation)
    return next(found.parts([slice(0, length)]))


def many(length: int, count: int) -> Any:
    """Permutations of `count` seeds, int64 of shape `(count, length)`."""
    return np.stack([whole(length, seed).numpy() for seed in range(count)])


def excess(counts: Any, *, freedom: int) -> float:
    """The statistic of chi-square for equally likely cells, in standard deviations above its mean."""
    expected = counts.mean()
    return (float(((counts - expected) ** 2 / expected).sum()) - freedom) / math.sqrt(2 * freedom)


@pytest.mark.usefixtures("few")
@pytest.mark.parametrize("length", LENGTHS)
def test_each_index_has_one_position(length: int) -> None:
    for seed in range(20 if length < 1000 else 2):
        assert torch.equal(whole(length, seed).sort().values, torch.arange(length))


@pytest.mark.parametrize(
    ("length", "pinned"),
    [(10**9, [529431629, 345324548, 471913093]), (10**12, [479740059643, 25447949292, 974015752310])],
)
def test_the_order_of_version_1_is_pinned(length: int, pinned: list[int]) -> None:
    """If this fails, increase `ORDER_VERSION`, and keep this order for version 1 in `DataOrder.indices`."""
    order = DataOrder(length=length, global_batch=4, micro_batch=4, seed=3).indices(2)
    assert ORDER_VERSION == 1
    assert [order[at] for at in (0, 1, length - 1)] == pinned


@pytest.mark.usefixtures("few")
@pytest.mark.parametrize(("length", "seeds"), [(16, 5000), (100, 3000), (257, 3000)])
def test_each_position_has_each_index_equally_often(length: int, seeds: int) -> None:
    found = many(length, seeds)
    counts = np.stack([np.bincount(column, minlength=length) for column in found.T])
    assert abs(excess(counts, freedom=(length - 1) ** 2)) < 4


def neighbours(found: Any) -> float:
    """The unevenness of the differences of neighbouring positions, as of `excess`."""
    length = found.shape[1]
    differences = (found[:, 1:] - found[:, :-1]) % length
    return excess(np.bincount(differences.ravel(), minlength=length)[1:], freedom=length - 2)


@pytest.mark.usefixtures("few")
def test_neighbouring_positions_are_independent(monkeypatch: pytest.MonkeyPatch) -> None:
    assert abs(neighbours(many(257, 3000))) < 4
    assert abs(neighbours(many(1025, 1000))) < 4
    monkeypatch.setattr(order_module, "ROUNDS", 4)
    assert neighbours(many(257, 3000)) > 20, "the statistic detects a permutation with fewer rounds"


@pytest.mark.usefixtures("few")
def test_orders_of_epochs_and_seeds_are_independent() -> None:
    length, seeds = 1000, 400
    epochs = np.stack([[whole(length, seed, epoch).numpy() for epoch in (0, 1)] for seed in range(seeds)])
    for one, other in ((epochs[:, 0], epochs[:, 1]), (epochs[:-1, 0], epochs[1:, 0])):
        pairs = len(one)
        correlations = [np.corrcoef(a, b)[0, 1] for a, b in zip(one, other, strict=True)]
        assert abs(np.mean(correlations)) < 5 / math.sqrt(length * pairs)
        assert abs(np.std(correlations) * math.sqrt(length) - 1) < 5 / math.sqrt(2 * pairs)
        # In independent permutations about one index has the same position in both.
        assert abs((one == other).sum() / pairs - 1) < 5 / math.sqrt(pairs)


@pytest.mark.parametrize("length", HUGE)
def test_samples_of_a_large_order_are_uniform_and_different(length: int) -> None:
    order = DataOrder(length=length, global_batch=1, micro_batch=1, seed=1).indices(0)
    assert isinstance(order, KeyedPermutation)
    for begin in (0, length // 2, length - 10**5):
        part = next(order.parts([slice(begin, begin + 10**5)]))
        assert len(part.unique()) == 10**5
        assert int(part.min()) >= 0
        assert int(part.max()) < length
        assert abs(excess(np.bincount((part.double() / length * 1000).long(), minlength=1000), freedom=999)) < 5


@pytest.mark.parametrize("length", HUGE)
def test_single_positions_and_parts_give_the_same_indices(length: int) -> None:
    order = DataOrder(length=length, global_batch=1, micro_batch=1).indices(5)
    assert isinstance(order, KeyedPermutation)
    begin = length - 3 * BLOCK
    once = next(order.parts([slice(begin, length)]))
    spans = [slice(begin + at, min(begin + at + 1000, length)) for at in range(0, 3 * BLOCK, 1000)]
    assert torch.equal(torch.cat(list(order.parts(spans))), once)
    assert [order[at] for at in range(begin, length, 999)] == once[::999].tolist()
    assert [len(part) for part in order.parts([slice(3, 3)] * 5000)] == [0] * 5000
    with pytest.raises(IndexError):
        order[length]


def shares(order: DataOrder, start: int = 0) -> list[RankSlice]:
    return list(order.local_batches(1, start))


def flat(share: RankSlice) -> list[list[int]]:
    return [index.tolist() for index in (*share.borrowed, *share.micro_batches)]


@pytest.mark.usefixtures("few")
@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("drop_last", [True, False])
@pytest.mark.parametrize("size", [1, 2, 3, 11])
def test_large_orders_are_shared_like_those_in_memory(
    size: int, drop_last: bool, shuffle: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Uneven windows, ranks without samples and borrowed micro-batches included, from any position on."""
    together: list[list[int]] = [[] for _ in range(10 if drop_last else 11)]
    for rank in range(size):
        order = DataOrder(
            length=107,
            global_batch=10,
            micro_batch=2,
            world_size=size,
            rank=rank,
            shuffle=shuffle,
            drop_last=drop_last,
        )
        assert isinstance(order.indices(1), KeyedPermutation if shuffle else DataSetOrder)
        seen = [flat(share) for share in shares(order)]
        again = [flat(share) for share in shares(order, 30)]
        assert again == seen[3:]
        for step, share in zip(together, shares(order), strict=True):
            step += torch.cat([torch.empty(0), *share.micro_batches]).tolist()
        memory = whole(107, epoch=1) if shuffle else torch.arange(107)
        with monkeypatch.context() as patch:
            patch.setattr(order_module, "LARGEST_IN_MEMORY", 1000)
            patch.setattr(DataOrder, "permutation", lambda *_, memory=memory: memory)
            assert [flat(share) for share in shares(order)] == seen
    assert together == [part.tolist() for part in memory.split(10)][: len(together)]


def test_small_data_sets_keep_the_permutation_of_torch() -> None:
    order = DataOrder(length=LARGEST_IN_MEMORY, global_batch=256, micro_batch=256, seed=5)
    assert torch.equal(order.indices(1), order.permutation(1))


@pytest.mark.parametrize("length", [10**9, 10**12])
def test_a_cursor_finds_any_position_of_a_large_order(length: int) -> None:
    order = DataOrder(length=length, global_batch=256, micro_batch=64, world_size=3, rank=1)
    cursor, start = OrderCursor(order), length // 2 // 256 * 256
    share = cursor.share(4, start)
    following = order.local_batches(4, start)
    assert share is not None
    assert flat(share) == flat(next(following))
    last = cursor.share(4, start + 256)
    assert last is not None
    assert flat(last) == flat(next(following))


def test_a_run_without_an_order_version_keeps_its_order() -> None:
    state, length = RunState(), LARGEST_IN_MEMORY + 1
    assert state.order_version == ORDER_VERSION
    old = RunState(seed=3).get_state()
    del old["order_version"]
    state.update_state(old)
    assert state.order_version == 0
    state.update_state(state.get_state())
    assert state.order_version == 0
    order = DataOrder(length=length, global_batch=2, micro_batch=2, seed=3, version=0)
    first = next(order.local_batches(0)).micro_batches[0]
    assert torch.equal(first, order.permutation(0)[:2])


def test_an_unknown_version_is_refused() -> None:
    newer = {**RunState().get_state(), "order_version": ORDER_VERSION + 1}
    with pytest.raises(CheckpointMismatchError, match=r"with version 2 of the order.*has versions 0 to 1"):
        RunState().update_state(newer)
