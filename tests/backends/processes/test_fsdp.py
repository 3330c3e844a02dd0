"""`fsdp`: 1, 2 and 3 ranks end as one process under `sp` does, or refuse the module by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.backends.processes.test_ranks_equal_sp import LAYOUTS, TASKS_OF_SP, assert_equal
from tests.helpers.processes import run_world
from tests.helpers.workers import sharded, uneven_tasks
from tests.helpers.workers.uneven_tasks import train

pytestmark = pytest.mark.distributed

REFUSED_TASKS = {"Sparse": "it has sparse gradients", "HooksGradient": "it has a hook on its gradient"}


IN_PARTS = ["EverySecondStep", "Experts", "Gan", "Unfreezes"]
"""Tasks that are tried on three ranks with other numbers of micro-batches."""


@pytest.mark.parametrize(
    ("name", "size"),
    [
        pytest.param(name, size, marks=() if size == 2 and name not in IN_PARTS else pytest.mark.long)
        for name in sorted(set(TASKS_OF_SP) - set(REFUSED_TASKS))
        for size in (2, 3)
    ],
)
def test_sharded_ranks_end_as_one_process(name: str, size: int) -> None:
    ranks = run_world(size, uneven_tasks.train_all, name=name, layouts=LAYOUTS, backend="fsdp")

    for position, (samples, limit) in enumerate(LAYOUTS):
        expected = train(name, samples, backend="sp", limit=limit)
        for rank in ranks:
            assert_equal(rank[position], expected)
            assert rank[position]["calls"] == expected["calls"]


@pytest.mark.parametrize("name", IN_PARTS)
def test_sharded_ranks_with_fewer_micro_batches_change_nothing(name: str) -> None:
    layouts = [(21, 2), (13, 1)]
    ranks = run_world(3, uneven_tasks.train_all, name=name, layouts=layouts, backend="fsdp")

    for position, (samples, limit) in enumerate(layouts):
        expected = train(name, samples, backend="sp", limit=limit)
        for rank in ranks:
            assert_equal(rank[position], expected)


def test_a_run_continues_under_another_backend_and_number_of_ranks(tmp_path: Path) -> None:
    """fsdp x 3 -> fsdp x 2 -> sp -> ddp x 2 -> fsdp x 3, with moments of AdamW and an average of the weights."""
    whole = sharded.resumed(str(tmp_path / "whole"), "sp", 24)

    ranks: list[dict[str, Any]] = []
    for backend, size, steps in (("fsdp", 3, 5), ("fsdp", 2, 9), ("sp", 1, 13), ("ddp", 2, 17), ("fsdp", 3, 24)):
        options = {"directory": str(tmp_path / "run"), "backend": backend, "max_steps": steps}
        ranks = [sharded.resumed(**options)] if backend == "sp" else run_world(size, sharded.resumed, **options)

    for rank in ranks:
        assert rank["weights"] == pytest.approx(whole["weights"], rel=0, abs=1e-10)
        assert rank["losses"][-1] == pytest.approx(whole["losses"][-1], rel=0, abs=1e-10)
    assert sum(rank["own"] for rank in ranks) == whole["elements"] == ranks[0]["elements"]
    assert max(rank["own"] for rank in ranks) <= 0.5 * whole["elements"]  # rows of 7, 3 and 1 over three ranks


def test_a_resume_on_the_same_ranks_has_the_same_bits(tmp_path: Path) -> None:
    unbroken = run_world(2, sharded.resumed, directory=str(tmp_path / "one"), backend="fsdp", max_steps=12)
    for steps in (1, 7, 12):
        broken = run_world(2, sharded.resumed, directory=str(tmp_path / "two"), backend="fsdp", max_steps=steps)

    assert [rank["weights"] for rank in broken] == [rank["weights"] for rank in unbroken]


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("scalar", ["cannot shard extra: it has no dimension", "nn.Parameter(torch.zeros(1))"]),
        ("complex", ["cannot shard extra: it is complex", "view_as_real"]),
        ("strided", ["cannot shard extra: its memory is not contiguous", "contiguous()"]),
        ("sparse", ["cannot shard extra: it has sparse gradients", "sparse=False"]),
        ("hook", ["cannot shard model.0.weight: it has a hook on its gradient", "'ddp'"]),
        ("late hook", ["model.0.weight has a hook on its gradient", "on_end_backward"]),
        ("adds a parameter", ["'late' was added after backend 'fsdp' had sharded the module"]),
        ("skips a unit", ["did not call 'model.2', which is a separate unit", "units=[]"]),
        ("unused", ["extra.weight, extra.bias took no part in the loss", "find_unused_parameters"]),
        ("returns a parameter", ["returns a parameter or a view of one", "clone()"]),
        ("unknown unit", ["no module has this name or class", "Sequential"]),
    ],
)
def test_modules_that_cannot_be_sharded_are_refused(kind: str, words: list[str]) -> None:
    for rank in run_world(2, sharded.refusal, kind=kind):
        for text in words:
            assert text in rank


def test_evaluations_of_ranks_with_unlike_numbers_of_batches_agree(tmp_path: Path) -> None:
    """A hook that asks for the state in the middle of an evaluation does not shard the weights again."""
    expected = sharded.evaluated(str(tmp_path), "sp")

    for rank in run_world(3, sharded.evaluated, directory=str(tmp_path), backend="fsdp"):
        assert rank == pytest.approx(expected, rel=0, abs=1e-10)


def test_an_export_has_whole_tensors(tmp_path: Path) -> None:
    run_world(2, sharded.exported, directory=str(tmp_path / "fsdp"), backend="fsdp")
    sharded.exported(str(tmp_path / "sp"), "sp")

    one, other = (sharded.read_export(tmp_path / name) for name in ("fsdp", "sp"))
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        assert tensor.shape == other[name].shape
        assert (tensor - other[name]).abs().max() <= 1e-10


def test_successive_trainings_share_an_adopted_process_group() -> None:
    for first, second in run_world(2, sharded.trained_twice):
        assert first == second


def test_a_save_never_gathers_all_parameters(tmp_path: Path) -> None:
    assert run_world(2, sharded.gathers, directory=str(tmp_path)) == [0, 0]


def test_reducing_each_pass_keeps_no_whole_gradient(tmp_path: Path) -> None:
    kept = {
        each: run_world(2, sharded.whole_gradients, directory=str(tmp_path), reduce_each_pass=each)
        for each in (False, True)
    }
    assert kept == {False: [6, 6], True: [0, 0]}
