"""`fsdp` with `gather_for_evaluation=False`: evaluations equal those of one process, without the whole module."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers.processes import run_world
from tests.helpers.workers import sharded_evaluation

pytestmark = pytest.mark.distributed


@pytest.mark.parametrize("size", [pytest.param(2, marks=pytest.mark.long), 3])
def test_ranks_with_unlike_numbers_of_batches_evaluate_as_one_process(size: int, tmp_path: Path) -> None:
    expected = sharded_evaluation.evaluations(str(tmp_path / "sp"), "sp")

    for rank in run_world(size, sharded_evaluation.evaluations, directory=str(tmp_path / "fsdp"), backend="fsdp"):
        assert not rank["whole"]
        for name in expected.keys() - {"whole"}:
            assert str(rank[name])[:1] == str(expected[name])[:1]
            assert _flat(rank[name]) == pytest.approx(_flat(expected[name]), rel=0, abs=1e-10)


@pytest.mark.parametrize("function", [sharded_evaluation.evaluated_on_main, sharded_evaluation.own_batches])
def test_ranks_without_a_batch_join_the_passes_of_the_others(function: object, tmp_path: Path) -> None:
    expected = function(str(tmp_path / "sp"), "sp")  # type: ignore[operator]

    ranks = run_world(2, function, directory=str(tmp_path / "fsdp"), backend="fsdp")  # type: ignore[arg-type]
    assert ranks == pytest.approx([expected, expected], rel=0, abs=1e-10)


def test_a_signal_to_one_rank_ends_the_validation_of_all(tmp_path: Path) -> None:
    ranks = run_world(2, sharded_evaluation.interrupted, directory=str(tmp_path), backend="fsdp", fresh=True)

    assert [name for name, _ in ranks] == ["Preempted", "Preempted"]
    assert all(calls < 4 for _, calls in ranks)  # of 7 batches


def _flat(value: object) -> list[float]:
    return [number for item in value for number in _flat(item)] if isinstance(value, list) else [float(value)]  # type: ignore[arg-type]
