"""`ddp`: results do not depend on the number of processes."""

from __future__ import annotations

from contextlib import nullcontext
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch

import trainstack as ts
from tests.helpers.modules import Classifier, arguments, numbers, weights
from tests.helpers.processes import run_agent, run_world
from tests.helpers.workers import checkpoints, collectives, evaluation, failures, training
from tests.helpers.workers.training import equality, picky
from trainstack.backends.ddp import DDP
from trainstack.backends.processes.collectives import TrainingPass
from trainstack.backends.single_process import SingleProcess

pytestmark = pytest.mark.distributed


@cache
def alone(limit: int = 512) -> dict[str, Any]:
    """The same run in one process under `sp`."""
    return equality("unused", backend="sp", limit=limit)


def close(one: Any, other: Any, tolerance: float = 1e-10) -> bool:
    return bool(
        (torch.tensor(one, dtype=torch.float64) - torch.tensor(other, dtype=torch.float64)).abs().max() <= tolerance
    )


@pytest.mark.spec("PMB-17", "PMB-21", "F111", "F112", "PA-21", "PMT-05")
@pytest.mark.parametrize("limit", [512, 2])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_weights_order_and_evaluation_are_those_of_one_process(size: int, limit: int) -> None:
    """101 samples, global batch 12, in float64, without and with accumulation."""
    ranks = run_world(size, training.equality, directory="unused", limit=limit)

    expected = alone()
    for rank in ranks:
        assert close(rank["weights"], expected["weights"])
        assert rank["outputs"]["text"] == expected["outputs"]["text"]
        assert close(rank["outputs"]["outputs"], expected["outputs"]["outputs"])
        assert rank["steps"] == expected["steps"] == 18
    for step, values in enumerate(expected["seen"]):
        parts = [value for rank in ranks for value in (rank["seen"][step] if step < len(rank["seen"]) else [])]
        assert sorted(parts) == sorted(values)
    for name in ("train/loss", "val/loss"):
        assert close(ranks[0]["history"][name], expected["history"][name], 1e-12)


def test_evaluation_uses_the_running_statistics_that_are_saved(tmp_path: Path) -> None:
    for rank in run_world(2, evaluation.statistics, directory=str(tmp_path), shared=True):
        assert rank["used"] == rank["resumed"] == rank["predicted"] == [rank["saved"]] * 16


def test_processes_evaluate_with_local_buffers_if_they_are_not_shared(tmp_path: Path) -> None:
    for rank in run_world(2, evaluation.statistics, directory=str(tmp_path), shared=False):
        assert rank["used"][:8] == [rank["saved"]] * 8
        assert rank["saved"] not in rank["used"][8:]


@pytest.mark.spec("HZ-12", "PA-06")
def test_plateau_schedules_agree_and_device_batches_multiply_by_ranks() -> None:
    one, other = run_world(2, training.plateau, directory="unused")

    assert one == other
    assert one["rate"] == 0.1 * 0.5**2
    assert one["batch"] == [12, 6, 6]


@pytest.mark.spec("F111", "PA-26")
@pytest.mark.parametrize(("size", "count"), [(2, 5), (3, 1), (3, 2)])
def test_few_samples_on_many_processes(size: int, count: int) -> None:
    for rank in run_world(size, training.few, count=count):
        assert rank["loss"] == rank["metric"] == (count - 1) / 2
        assert rank["collected"] == list(range(count))


def test_a_sampler_that_shards_the_data_is_refused() -> None:
    """A sampler of torch, a batch sampler over it and a batch sampler of a user, for each use of a loader."""
    for rank in run_world(2, evaluation.own_sampler):
        assert len(rank) == 9
        for said in rank:
            assert "among 2 processes" in said
            assert "sampler=sampler(dataset)" in said


def test_a_padding_loader_is_reported_once_with_its_count() -> None:
    (said,), others = run_world(2, evaluation.own_order, count=5)

    assert others == []
    assert said.startswith("val loader 'default': 6 samples were evaluated and the data set has 5")
    assert "sampler=sampler(dataset)" in said


@pytest.mark.spec("PA-31")
def test_a_loss_over_tokens_counts_by_tokens_over_processes() -> None:
    from tests.trainer.run.test_loss_weighting import Tokens

    reference = Tokens()
    ts.Trainer(reference, arguments("unused", train_batch_size=6, clip_grads=False)).train()
    for size in (2, 3):
        for rank in run_world(size, training.tokens):
            assert close(rank, weights(reference).tolist())


@pytest.mark.parametrize("limit", [512, 1])
def test_samples_of_weight_zero_leave_unused_parameters_unchanged(limit: int) -> None:
    """Weight decay changes no unused parameter, and no parameter in a step without items on all processes."""
    expected = picky(backend="sp")

    for rank in run_world(2, training.picky, limit=limit, find_unused_parameters=True):
        assert close(rank, expected)


def test_a_static_graph_is_refused_with_several_micro_batches() -> None:
    several = run_world(2, training.picky, limit=1, static_graph=True)

    assert all("steps of several micro-batches" in said for said in several)
    for rank in run_world(2, training.picky, static_graph=True):
        assert close(rank, picky(backend="sp"))


def test_static_graphs_and_bucket_views_give_the_same_bits() -> None:
    for plain, static, view, accumulated, accumulated_view in run_world(2, training.ways_to_reduce):
        assert plain == static == view
        assert accumulated == accumulated_view


def test_without_a_trainer_a_step_uses_all_ranks_batches() -> None:
    one, other = run_world(2, training.driven, shares=[[4, 2], [6]], accumulation=2)

    assert one["weights"] == other["weights"]
    assert close(one["weights"], whole_steps([12]))
    assert (one["steps"], one["losses"], other["losses"]) == (1, 2, 1)


def test_without_a_trainer_ranks_without_batches_join_further_steps() -> None:
    ranks = run_world(3, training.driven, shares=[[2], [2, 3, 5], []])

    assert [rank["steps"] for rank in ranks] == [3, 3, 3]
    assert [rank["losses"] for rank in ranks] == [1, 3, 0]
    assert ranks[0]["weights"] == ranks[1]["weights"] == ranks[2]["weights"]
    assert close(ranks[0]["weights"], whole_steps([4, 3, 5]))


def whole_steps(sizes: list[int]) -> list[float]:
    """Weights after plain steps of SGD on 12 samples, in batches of these sizes."""
    data = numbers(12, dtype=torch.float64)
    module = Classifier(data, dtype=torch.float64)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    for batch in zip(*(tensor.split(sizes) for tensor in data.tensors), strict=True):
        optimizer.zero_grad()
        module.train_step(0, batch, "cpu").backward()
        optimizer.step()
    return weights(module).tolist()


@pytest.mark.spec("FN-52", "F105")
@pytest.mark.parametrize("accumulation", [1, 4])
def test_gradients_are_the_only_collective_of_a_step(accumulation: int) -> None:
    for spent in run_world(2, collectives.all_reduces, accumulation=accumulation):
        assert spent["steps"] == 40
        assert spent["buckets"] == 40
        assert spent.get("all_reduce", 0) == 40, "those of the hook that counts"
        others = sum(spent.get(name, 0) for name in ("all_gather_object", "all_gather", "broadcast", "barrier"))
        assert others <= 20, f"comparing, setting up, one epoch's end and saving, not steps: {spent}"


@pytest.mark.spec("FN-46", "HZ-28")
@pytest.mark.parametrize(("before", "after"), [(2, 1), (2, 3), pytest.param(1, 2, marks=pytest.mark.long)])
def test_a_run_continues_over_another_number_of_processes(before: int, after: int, tmp_path: Path) -> None:
    cut = run_world(before, training.equality, directory=str(tmp_path), every_n_steps=1, module={"stop_at": 6})
    resumed = run_world(after, training.equality, directory=str(tmp_path), every_n_steps=1, resume=True)

    expected = alone()
    assert [rank["steps"] for rank in cut] == [5] * before
    for rank in resumed:
        assert close(rank["weights"], expected["weights"])
    for step in range(5, 18):
        parts = [value for rank in resumed for value in (rank["seen"][step] if step < len(rank["seen"]) else [])]
        assert sorted(parts) == sorted(expected["seen"][step])


@pytest.mark.parametrize("backend", [pytest.param("ddp", marks=pytest.mark.long), "ddp-amp"])
def test_a_resume_on_the_same_processes_has_the_same_bits(backend: str, tmp_path: Path) -> None:
    unbroken = run_world(2, checkpoints.noisy, directory=str(tmp_path / "unbroken"), backend=backend)
    run_world(2, checkpoints.noisy, directory=str(tmp_path / "cut"), backend=backend, stop_at=8)
    resumed = run_world(2, checkpoints.noisy, directory=str(tmp_path / "cut"), backend=backend, resume=True, seed=50)

    assert unbroken[0] == unbroken[1] == resumed[0] == resumed[1]


@pytest.mark.spec("PMB-21", "F111", "F112")
def test_successive_trainers_each_join_a_new_group(tmp_path: Path) -> None:
    for runs in run_world(2, training.in_sequence, directory=str(tmp_path)):
        assert runs == runs[:1] * 5


@pytest.fixture(scope="module")
def gathered() -> list[dict[str, Any]]:
    return run_world(3, collectives.gathered)


def test_uneven_empty_and_nested_values_are_gathered(gathered: list[dict[str, Any]]) -> None:
    for rank in gathered:
        assert rank["rows"] == [[10.0, 11.0, 12.0], [20.0, 21.0, 22.0], [23.0, 24.0, 25.0]]
        assert rank["flags"] == [False, False, True]
        assert rank["scalar"] == [0, 1, 2]
        assert rank["text"] == [0, 1, 2]
        assert rank["nothing"] == [[1.0, 1.0], ["a"]]
        assert rank["pair"] == [[0, 1, 2], [3, 0]]


def test_mismatched_outputs_are_refused_on_all_processes(gathered: list[dict[str, Any]]) -> None:
    for rank in gathered:
        widths, keys, dtypes = rank["refused"]
        assert "rows of shape (3,), torch.float32 on ranks [0, 2]" in widths
        assert "rows of shape (4,), torch.float32 on ranks [1]" in widths
        assert "{'b': ...} with rows of shape (3,)" in keys
        assert "torch.float64 on ranks [2]" in dtypes


@pytest.mark.parametrize(
    ("option", "said"),
    [
        ("find_unused_paramters", "Did you mean 'find_unused_parameters'?"),
        ("process_group", "sets this option"),
        ("xyz", "The options are "),
    ],
)
def test_a_wrong_option_of_ddp_is_refused_with_a_correction(option: str, said: str) -> None:
    with pytest.raises(ts.ConfigurationError) as raised:
        ts.build_trainer_backend("ddp", ddp={option: True})

    assert said in str(raised.value)


@pytest.mark.spec("F209")
def test_a_checkpoint_that_fails_in_the_background_ends_all_processes(tmp_path: Path) -> None:
    # under torchrun, whose agent keeps the report that rank 0 leaves in the store when it ends
    main, other = run_agent(2, failures.background_failure, directory=str(tmp_path))

    assert main["error"].startswith("CheckpointError: ")
    assert "the disk is gone" in main["error"]
    assert main["steps"] == 4, "the next step boundary"
    assert other["error"].startswith("PeerError: rank 0 failed")
    assert "the disk is gone" in other["error"]


def test_a_loader_with_a_state_continues_over_processes(tmp_path: Path) -> None:
    """Each process reads all batches and trains on every second one: 21 batches, 4 a step, 6 steps an epoch."""
    start = ts.export_model(Classifier(seed=9), tmp_path / "start")
    made = {"init_weights_from": str(start)}
    whole = run_world(2, checkpoints.streams, directory=str(tmp_path / "whole"), **made)
    cut = run_world(2, checkpoints.streams, directory=str(tmp_path / "cut"), stop_at=4, **made)
    again = run_world(2, checkpoints.streams, directory=str(tmp_path / "cut"), **made)

    for rank in range(2):
        assert whole[rank]["taken"] == ["net.0.weight", "net.0.bias", "net.3.weight", "net.3.bias"]
        assert {**cut[rank]["seen"], **again[rank]["seen"]} == whole[rank]["seen"]
        assert again[rank]["weights"] == whole[rank]["weights"]
        assert again[rank]["reads"] == whole[rank]["reads"] - 3 * 4
        assert again[rank]["taken"] == []


def test_weights_that_differ_are_never_saved(tmp_path: Path) -> None:
    for rank in run_world(2, failures.diverged, directory=str(tmp_path)):
        assert "weights are not the same on all processes" in rank["error"]
    assert not (tmp_path / "checkpoints").exists() or not ts.list_checkpoints(tmp_path / "checkpoints")


@pytest.mark.spec("PA-25", "PA-26")
def test_gathering_and_printing_by_the_trainer() -> None:
    ranks = run_world(2, collectives.together)

    assert [rank["rows"] for rank in ranks] == [[0.0, 1.0, 1.0]] * 2
    assert [rank["printed"] for rank in ranks] == ["said 1\nnode\n", ""]


def test_explain_names_the_collectives() -> None:
    told = " ".join(ts.explain("ddp-amp").split())

    assert "open ddp > sp" in told
    assert "forward ddp > amp > sp" in told
    assert "ddp one all-reduce a gradient bucket each global step" in told
    assert "collective operations:" not in ts.explain("sp-amp")


def test_gradients_are_bucket_views_unless_zero_grad_is_overridden() -> None:
    """G-5, P-M8: otherwise each gradient is kept twice."""
    assert run_world(2, training.bucket_views) == [[True, False, False]] * 2


@pytest.mark.parametrize("weight", [0.0, 0.5])
def test_a_pass_counts_if_its_loss_has_a_weight(weight: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DDP, "_reducer", lambda self, work: None)
    layer, current = DDP(SingleProcess()), TrainingPass(None, nullcontext())
    layer.inner = Mock()
    with current:
        layer.backward(Mock(world=Mock(size=1)), torch.ones(()), weight)
    assert current.counts == (weight > 0)
