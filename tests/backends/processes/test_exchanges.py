"""Exchanges between ranks: named, without pickle, in one collective. Ranks in different exchanges raise an error."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import trainstack as ts
from tests.helpers.processes import run_world
from tests.helpers.workers import wire

pytestmark = [pytest.mark.distributed, pytest.mark.processes]


def test_values_reach_all_ranks_and_refused_ones_raise_on_all() -> None:
    ranks = run_world(3, wire.values)

    for rank, got in enumerate(ranks):
        assert got["state"]
        assert got["tied"]
        assert got["writeable"]
        assert got["bits"] == "torch.bfloat16"
        assert got["uneven"] == [
            [0, "torch.int16", 0],
            [300_000, "torch.int16", 300_000],
            [600_000, "torch.int16", 1_200_000],
        ]
        assert got["long"] == [0, 1000, 2000]
        assert got["objects"] == ["NoneType", *(["Span"] * 2 if rank else ["tuple"] * 2)]
        days, day, numbers, save = got["said"]
        assert (
            days.removeprefix("ModuleContractError: rank 1: ")
            .removeprefix("ModuleContractError: ")
            .startswith("days: the value['day'][0] is a datetime.date, which has no encoding for other processes.")
        )
        assert days.startswith("ModuleContractError: rank 1: ") == (rank != 1)
        assert "a day: the value is a datetime.date" in day
        assert "a save: the value[0] is a datetime.date" in save
        assert save.startswith("ModuleContractError: rank 1: ") == (rank != 1)
        assert numbers == "PeerError: numbers: the ranks sum different amounts of numbers: [0, 50, 100]."
    assert ranks[0]["sums"] == ranks[1]["sums"] == ranks[2]["sums"], "the same bits"
    expected = [(1e16 + -1e16 + 1.0).hex(), (0.0 + 0.2 + 0.1).hex()]
    assert ranks[0]["sums"] == [expected] * 3, "rank 0 adds the numbers of rank 2 before those of rank 1"


def test_ranks_in_different_exchanges_get_both_places() -> None:
    ranks = run_world(2, wire.apart)

    assert ranks[0] == ranks[1]
    first, kinds, places, sizes, refused, same = ranks[0]
    assert same.count("'the same name' at global step 50") == 2
    assert first.startswith(
        "PeerError: the processes are not in the same place:\n  rank 0 is in 'the losses of a log point'"
    )
    assert f"  rank 1 is in 'trainer.gather' at global step 50, called by in_a_hook at {wire.__file__}:" in first
    assert "'batch_weight'" in kinds
    assert "'loading'" in kinds
    assert "'beginning an evaluation'" in places
    assert "'saving'" in places
    assert "'much'" in sizes
    assert "'little'" in sizes
    assert "'refused'" in refused
    assert "'little'" in refused


def test_a_gather_on_one_rank_alone_fails_on_both() -> None:
    for said in run_world(2, wire.extra_gather, log_every=1):
        assert "rank 0 is in 'the losses of a log point' at epoch 0, global step 3" in said
        assert "rank 1 is in 'trainer.gather' at epoch 0, global step 3, called by on_end_train_step at" in said


@pytest.mark.long
@pytest.mark.parametrize("call", ["validate", "save_checkpoint"])
def test_a_rank_that_calls_a_method_alone_never_meets_gradients(call: str, tmp_path: Path) -> None:
    """Also with batch norm, whose buffers are broadcast: no rank is aborted, and both errors name both places."""
    for said in run_world(2, wire.alone_in, fresh=True, call=call, directory=str(tmp_path)):
        assert said.startswith("PeerError: ")
        assert ("> on_end_train_step > validate > " if call == "validate" else "> save > ") in said
        assert "rank 0: epoch 0, global step " in said


def test_pickles_that_a_rank_sends_are_not_read(tmp_path: Path) -> None:
    trace = tmp_path / "trace"

    for said in run_world(2, wire.hostile, path=str(trace)):
        assert "is not a message of this library" in said
        assert "another process sent a pickle" in said
    assert not trace.exists()


def test_outputs_that_are_dataclasses_and_named_tuples_reach_all_ranks() -> None:
    """Three samples on four ranks: one has no batch."""
    for rank, got in enumerate(run_world(4, wire.objects, allow_pickle=False)):
        kind = "Answer" if rank < 3 else "SimpleNamespace"
        assert got["answers"] == [["a", 1, kind]] * 3
        assert got["all"] == ["b"] * 3
        assert got["spans"] == [["Span", 1, 2]] * 10
        assert "outputs['days'][0] is a datetime.date, which has no encoding for other processes" in got["refused"]
        assert "allow_pickle" in got["refused"]


def test_objects_of_any_class_are_gathered_where_pickles_are_allowed() -> None:
    for got in run_world(2, wire.objects, allow_pickle=True):
        assert got == {"days": 3, "metric": 3.0}


def test_pickles_are_allowed_in_the_arguments_too() -> None:
    place = ts.DistributedTrainingArguments(local_rank=0, global_rank=0, world_size=1, allow_pickle=True)

    stack = ts.build_trainer_backend("ddp", ddp={"place": place})

    assert stack._allow_pickle  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("case", "each_step", "once"),
    [
        ("accumulated", 0, 24),
        ("log", 1, 24),
        ("weight", 1, 24),
        ("weight, accumulated", 2, 24),
        ("norm, validation", 0, 28),
    ],
)
def test_exchanges_are_single_messages_and_steps_have_none(case: str, each_step: int, once: int) -> None:
    """40 steps on 2 ranks. A gather has one collective more.

    Once a run: joining the group, five comparisons before the first step and one after the last, the generators of
    rank 0, the files that rank 0 has read and written, and requests to stop.
    """
    for counts in run_world(2, wire.collectives, case=case):
        assert counts.pop("objects") == 0
        sent = counts.pop("send")
        assert 40 * each_step <= sent <= 40 * each_step + once, (sent, counts)
        assert sum(counts.values()) <= 40 * (case == "log") + 18, (sent, counts)


def test_buffers_and_frozen_parameters_come_from_rank_0() -> None:
    one, other = run_world(2, wire.buffers)

    assert one["values"] == other["values"]
    for name, value in one["values"].items():
        source = torch.tensor([[1, 2, 0], [2, 1, 1]]).to(torch.float32).to(getattr(torch, name.partition("_")[2]))
        assert value == (source.T if name.startswith("buffer") else source).contiguous().view(torch.uint8).tolist()
    assert one["at_begin"] == other["at_begin"] == [0, 1, 2], "rank 1 adds two"
    assert one["validated_with"] == other["validated_with"] == 3
