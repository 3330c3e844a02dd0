"""Streams over ranks: the same batches for all, or a part for each."""

from __future__ import annotations

from collections import deque
from functools import cache
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Subset, TensorDataset

import trainstack as ts
from tests.helpers.modules import arguments
from tests.helpers.processes import run_world
from tests.helpers.workers import streams
from trainstack.backends import Communicator
from trainstack.trainer.data.epochs import set_epoch
from trainstack.trainer.data.presharded import PreshardedSource
from trainstack.trainer.data.sharding import StreamDigest

together = pytest.mark.distributed
CHEAP = [kind for kind in streams.STREAMS if kind != "workers"]


@together
def test_ranks_draw_different_numbers_and_rank_0_unchanged_ones() -> None:
    with torch.random.fork_rng():
        alone = streams.drawn("sp")
    ranks = run_world(2, streams.drawn)

    assert ranks[0] == alone
    assert all(
        one != other for mine, theirs in zip(*ranks, strict=True) for one, other in zip(mine, theirs, strict=True)
    )


@cache
def alone(accumulation: int) -> Any:
    with torch.random.fork_rng():
        return streams.streams(CHEAP, True, "sp", accumulation)


@together
@pytest.mark.parametrize(("size", "seeded"), [(2, True), (3, False)])
def test_all_ranks_read_the_stream_of_one_process(size: int, seeded: bool) -> None:
    ranks = run_world(size, streams.streams, kinds=CHEAP, seeded=seeded)

    for kind in CHEAP:
        parts = [rank[kind]["seen"] for rank in ranks]
        for epoch in range(2):
            steps = len(parts[0]) // 2
            seen = [batch for step in range(steps) for part in parts for batch in [part[epoch * steps + step]]]
            assert sorted(chain(*seen)) == [float(index) for index in range(24)], kind
            one = alone(1)[kind]["seen"]
            assert list(chain(*seen)) == list(chain(*one[epoch * 12 : epoch * 12 + 12])), kind
        assert all(rank[kind]["validated"] == alone(1)[kind]["validated"] for rank in ranks), kind
    orders = [list(chain(*alone(1)[kind]["seen"])) for kind in CHEAP if kind != "in the method"]
    assert all(order[:24] != order[24:] for order in orders)


@pytest.mark.long
@together
@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("seeded", [True, False])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_streams_of_all_kinds_are_read_once_by_all_ranks(size: int, seeded: bool, accumulation: int) -> None:
    ranks = run_world(size, streams.streams, kinds=list(streams.STREAMS), seeded=seeded, accumulation=accumulation)

    for kind in streams.STREAMS:
        for epoch in range(2):
            steps = len(ranks[0][kind]["seen"]) // 2
            seen = [rank[kind]["seen"][epoch * steps + step] for step in range(steps) for rank in ranks]
            assert sorted(chain(*seen)) == [float(index) for index in range(24)], kind


def reference(ends: list[int], accumulation: int, weigh: bool) -> list[float]:
    """Weights after a plain loop over the same global batches."""
    weight, bias = (torch.tensor([[start]], dtype=torch.float64, requires_grad=True) for start in (0.5, 0.0))
    size = 2 * accumulation
    rounds = max(-(-(end - begin) // size) for begin, end in pairwise(ends))
    for step in range(rounds):
        batches = [
            torch.arange(low, min(low + 2, end), dtype=torch.float64)
            for begin, end in pairwise(ends)
            for low in range(begin + step * size, min(begin + (step + 1) * size, end), 2)
        ]
        counts = [float(batch.sum()) if weigh else float(len(batch)) for batch in batches]
        loss = sum(
            (
                (batch[:, None] @ weight + bias - 1).pow(2).mean() * count
                for batch, count in zip(batches, counts, strict=True)
            ),
            torch.zeros(()),
        ) / sum(counts)
        for parameter, gradient in zip((weight, bias), torch.autograd.grad(loss, (weight, bias)), strict=True):
            parameter.data -= 1e-4 * gradient
    return [weight.item(), bias.item()]


@together
@pytest.mark.parametrize(
    ("ends", "accumulation", "weigh"),
    [
        ([0, 12, 24], 1, False),
        ([0, 15, 24], 1, True),
        ([0, 3, 24], 2, False),
        ([0, 3, 10, 24], 2, True),
        ([0, 1, 23, 24], 1, False),
    ],
)
def test_ranks_train_to_the_end_of_the_longest_part(ends: list[int], accumulation: int, weigh: bool) -> None:
    ranks = run_world(len(ends) - 1, streams.parts, ends=ends, accumulation=accumulation, weigh=weigh, length=weigh)

    expected = reference(ends, accumulation, weigh)
    assert {*chain(*(batch for rank in ranks for batch in rank["seen"]))} == {float(index) for index in range(24)}
    for rank in ranks:
        assert torch.allclose(torch.tensor(rank["weights"]), torch.tensor(expected), rtol=0, atol=1e-10)
        assert rank["validated"] == [float(index) for index in range(24)]
        assert {name: rank[name] for name in ("loss", "train", "steps", "planned", "batches")} == {
            name: ranks[0][name] for name in ("loss", "train", "steps", "planned", "batches")
        }
        assert rank["planned"] in ((rank["steps"],) if weigh else (None,))


def test_one_rank_weighs_growing_batches_of_split_data_by_their_items() -> None:
    counts = [(1.0, 3.0), (2.0, 2.0), (1.0, 9.0)]
    source = PreshardedSource(list(chain(*counts)), 2, float, Communicator())
    for step, pair in zip(source.iter_steps(), counts, strict=True):
        shares: list[float] = []
        for _, weight, _ in step.micro_batches:
            assert weight <= 1
            shares = [*(share * step.rescale for share in shares), weight]
            step.rescale = 1.0
        assert [share * step.scale for share in shares] == pytest.approx([count / sum(pair) for count in pair])


@together
@pytest.mark.parametrize("accumulation", [1, 2])
def test_a_run_over_uneven_parts_resumes_within_the_epoch(accumulation: int, tmp_path: Path) -> None:
    shape: dict[str, Any] = {"ends": [0, 3, 24], "accumulation": accumulation}
    whole = run_world(2, streams.parts, **shape)
    changes = {"every_step": True, "directory": str(tmp_path)}
    resumed = run_world(2, streams.parts, **shape, stop_at=3, **changes)

    for rank, other in zip(resumed, whole, strict=True):
        assert {**rank, "seen": None} == {**other, "seen": None}
    found = {*chain(*(batch for rank in resumed for batch in rank["seen"]))}
    assert found == {float(index) for index in range(24)}


@together
def test_a_rank_without_batches_borrows_those_of_another() -> None:
    ranks = run_world(3, streams.parts, ends=[0, 8, 8, 24])

    assert [rank["steps"] for rank in ranks] == [8, 8, 8]
    assert ranks[0]["weights"] == ranks[1]["weights"] == ranks[2]["weights"]


@together
@pytest.mark.parametrize("sharding", ["auto", "trainer"])
def test_data_split_by_rank_is_refused_without_a_declaration(sharding: str, tmp_path: Path) -> None:
    ranks = run_world(2, streams.undeclared, sharding=sharding, directory=str(tmp_path))

    for said in ranks:
        kinds = {"part", "late", "later", "mosaicml-streaming", "Hugging Face", "webdataset"}
        assert set(said) == {f"{kind} {stage}" for kind in kinds for stage in ("train", "val")}  # and not "same"
        for name, text in said.items():
            kind, stage = name.rsplit(" ", 1)
            assert f"{{'{stage}': 'loader'}}" in text
            if kind in ("part", "late", "later") or sharding == "trainer":
                assert "rank 1 read other batches than rank 0" in text
            else:
                assert (f"{{'{stage}': 'trainer'}}" in text and "its own part of the" in text) or "the data" in text
        assert said["part train"].startswith("0 steps")
        assert said["late train"].startswith("1 steps")
        assert said["later train"].startswith("6 steps")  # at the log point at step 6


@pytest.mark.parametrize("wrong", ["ranks", True, {"train": "own"}, {"fit": "loader"}, None])
def test_other_values_of_data_sharding_are_refused(wrong: Any) -> None:
    with pytest.raises(ts.ConfigurationError, match=r"write 'auto', 'trainer' or 'loader'"):
        ts.TrainerArguments(data_sharding=wrong)


class Epochs:
    """Records the epochs that it was given, and draws its order from them."""

    def __init__(self, count: int) -> None:
        self.count, self.epochs, self.orders = count, list[int](), list[list[int]]()

    def set_epoch(self, epoch: int) -> None:
        self.epochs.append(epoch)

    def __iter__(self) -> Any:
        self.orders.append(
            torch.randperm(self.count, generator=torch.Generator().manual_seed(self.epochs[-1])).tolist()
        )
        return iter(self.orders[-1])

    def __len__(self) -> int:
        return self.count


class Listening(TensorDataset):
    """A dataset that is given epochs."""

    def __init__(self, *tensors: torch.Tensor) -> None:
        super().__init__(*tensors)
        self.epochs: list[int] = []

    def set_epoch(self, epoch: int) -> None:
        self.epochs.append(epoch)


@pytest.mark.parametrize("place", ["sampler", "batch sampler", "sampler of a batch sampler", "dataset", "subset"])
def test_set_epoch_is_called_once_before_each_epoch(place: str, tmp_path: Path) -> None:
    data, epochs = Listening(torch.arange(8.0)[:, None]), Epochs(8)

    def loader(size: int) -> Any:
        if place == "sampler":
            return DataLoader(data, size, sampler=epochs)
        if place == "batch sampler":
            return DataLoader(data, batch_sampler=type("Batches", (Epochs,), {"__iter__": _batches})(4))
        if place == "sampler of a batch sampler":
            return DataLoader(data, batch_sampler=torch.utils.data.BatchSampler(epochs, size, False))
        chosen: Any = Subset(data, range(8)) if place == "subset" else data
        return DataLoader(chosen, size, shuffle=True)

    module = streams.Seen(loader)
    ts.Trainer(module, arguments(tmp_path, train_batch_size=4, epochs=3)).train()

    assert data.epochs == [0, 1, 2]
    if "sampler" in place and place != "batch sampler":
        assert epochs.epochs == [0, 1, 2]
        assert len({tuple(order) for order in epochs.orders}) == 3
    if place == "batch sampler":
        assert [batch[0] for batch in module.seen] == [0.0, 4.0, 1.0, 5.0, 2.0, 6.0]


def _batches(self: Any) -> Any:
    return iter([[self.epochs[-1] + row for row in rows] for rows in ([0, 1], [4, 5])])


def test_set_epoch_gets_the_epoch_on_resume_and_in_validation(tmp_path: Path) -> None:
    saving = ts.DefaultCheckpointerArguments(every_n_steps=1)
    options: dict[str, Any] = {"train_batch_size": 2, "epochs": 3, "checkpointer_args": saving}

    def run(stop_at: int | None = None, resume: bool = False) -> tuple[streams.Seen, Epochs, Listening]:
        data, epochs = Listening(torch.arange(8.0)[:, None]), Epochs(8)
        module = streams.Seen(lambda size: DataLoader(data, size, sampler=epochs), lambda size: DataLoader(data, size))
        module.stop_at = stop_at
        folder = tmp_path / ("cut" if stop_at or resume else "whole")
        try:
            ts.Trainer(module, arguments(folder, resume=resume, **options)).train()
        except KeyboardInterrupt:
            assert stop_at is not None
        return module, epochs, data

    whole, _, listening = run()
    run(stop_at=7)
    resumed, epochs, _ = run(resume=True)

    assert listening.epochs == [0, 0, 1, 1, 2, 2]  # training and validation
    assert epochs.epochs == [1, 2]
    assert [b for b in resumed.seen if b] == whole.seen[6:]


def test_set_epoch_is_called_once_for_a_repeated_dataset() -> None:
    data = Listening(torch.zeros(4, 1))
    set_epoch(DataLoader(Subset(torch.utils.data.ConcatDataset([data, data]), [0])), 3, in_own_order=True)

    assert data.epochs == [3]


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (torch.zeros(3), torch.zeros(4)),
        (torch.zeros(3), torch.zeros(3, dtype=torch.float64)),
        (torch.zeros(3, dtype=torch.bfloat16), torch.ones(3, dtype=torch.bfloat16)),
        ({"a": np.arange(3)}, {"a": np.arange(1, 4)}),
        ({"a": 1}, {"b": 1}),
        (["x", 1.0, None, b"2"], ["x", 1.0, None, b"3"]),
        (torch.arange(1 << 20), torch.arange(1, 1 + (1 << 20))),
        (np.array(["a", None]), np.array(["a", 1])),
        (torch.zeros(2, 4)[:, ::2], torch.eye(2, 4)[:, ::2]),
        (torch.tensor(1 + 2j), torch.tensor(1 - 2j)),
        ({1, 2}, {1, 3}),
        ({"tags": frozenset("ab")}, {"tags": frozenset("ac")}),
        ({(1, "a"), (2, "b")}, {(1, "b"), (2, "a")}),
        ({1: 2}.keys(), {2: 2}.keys()),
        (deque([1, 2]), deque([1, 3])),
        (range(3), range(4)),
        (bytearray(b"2"), bytearray(b"3")),
    ],
)
@pytest.mark.parametrize("whole", [True, False])
def test_the_digest_differs_for_different_batches(one: Any, other: Any, whole: bool) -> None:
    values = []
    for batch in (one, one, other):
        digest = StreamDigest()
        digest.add((batch, "after"), whole=whole)
        values.append(digest.value)

    assert values[0] == values[1] != values[2]


@pytest.mark.parametrize("make", [torch.zeros, np.zeros])
@pytest.mark.parametrize("whole", [True, False])
def test_the_digest_takes_all_elements_of_large_data_only_if_asked(make: Any, whole: bool) -> None:
    one, other = make(10_000), make(10_000)
    other[1] = 1.0
    digests = [StreamDigest(), StreamDigest()]
    for digest, batch in zip(digests, (one, other), strict=True):
        digest.add(batch, whole=whole)
    assert (digests[0].value == digests[1].value) is not whole


def test_the_digest_of_a_set_is_independent_of_order() -> None:
    sets = [set(items) for items in ([0, 8], [8, 0])]  # the two hashes have the same place in a table of 8
    assert list(sets[0]) != list(sets[1])
    digests = [StreamDigest(), StreamDigest()]
    for digest, one in zip(digests, sets, strict=True):
        digest.add({"ids": one})
    assert digests[0].value == digests[1].value


def test_the_digest_accepts_objects_of_any_class() -> None:
    digest = StreamDigest()
    for odd in (torch.empty(0, 3), torch.zeros(2, device="meta"), torch.eye(3).to_sparse(), {1, 2}, object(), len, []):
        digest.add(odd)

    assert digest.batches == 7


@together
def test_evaluate_on_main_validates_stateful_modules_like_one_process() -> None:
    with torch.random.fork_rng():
        alone = streams.running_sum(True, "sp")
    assert [alone] * 2 == run_world(2, streams.running_sum, on_main=True)
    assert alone != run_world(2, streams.running_sum, on_main=False)[0]


def test_evaluate_on_main_has_to_be_a_bool(tmp_path: Path) -> None:
    module = streams.Seen(lambda size: None, lambda size: DataLoader(TensorDataset(torch.zeros(2, 1))))
    module.evaluate_on_main = 1  # type: ignore[assignment]
    with pytest.raises(ts.ConfigurationError, match="evaluate_on_main is 1"):
        ts.Trainer(module, arguments(tmp_path)).validate()


@together
def test_summing_torchmetrics_count_each_input_once() -> None:
    pytest.importorskip("torchmetrics")
    with torch.random.fork_rng():
        alone = streams.summing_metrics("sp")
    assert run_world(2, streams.summing_metrics) == [alone] * 2
    assert alone["sum"] == 21.0
