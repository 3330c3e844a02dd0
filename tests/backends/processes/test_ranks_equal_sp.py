"""Two and three ranks, of which some have no samples in a step, end as one process under `sp` does."""

from __future__ import annotations

from typing import Any

import pytest

from tests.helpers.processes import run_world
from tests.helpers.workers import uneven_tasks
from tests.helpers.workers.uneven_tasks import TASKS, train

pytestmark = pytest.mark.distributed

TASKS_OF_SP = sorted(set(TASKS) - {"Synchronised", "CountsHalf"})
LAYOUTS = [(13, None), (1, None)]
"""Samples, of which a step takes 12, and the limit of a micro-batch: the last step has one sample, or the only one."""


def assert_equal(rank: dict[str, Any], expected: dict[str, Any]) -> None:
    for name in ("weights", "states", "losses", "norms"):
        assert flat(rank[name]) == pytest.approx(flat(expected[name]), rel=0, abs=1e-10), name


def flat(values: Any) -> list[float]:
    return [item for value in values for item in flat(value)] if isinstance(values, list) else [values]


ON_TWO = {"EverySecondStep", "Experts", "Gan"}
"""Tasks for which two ranks are tried each time; three, of which two have no samples, are for all."""


def on_ranks(names: list[str]) -> list[Any]:
    """Each name with both sizes."""
    return [
        pytest.param(name, size, marks=() if size == 3 or name in ON_TWO else pytest.mark.long)
        for name in names
        for size in (2, 3)
    ]


@pytest.mark.parametrize(("name", "size"), on_ranks(TASKS_OF_SP))
def test_ranks_without_samples_change_nothing(name: str, size: int) -> None:
    ranks = run_world(size, uneven_tasks.train_all, name=name, layouts=LAYOUTS)

    for position, (samples, limit) in enumerate(LAYOUTS):
        expected = train(name, samples, backend="sp", limit=limit)
        for rank in ranks:
            assert_equal(rank[position], expected)
            assert rank[position]["calls"] == expected["calls"]


@pytest.mark.parametrize(
    ("name", "size"),
    [
        pytest.param(name, size, marks=() if size == 3 or name == "Gan" else pytest.mark.long)
        for name in ("EverySecondStep", "Experts", "CountsHalf", "Gan", "Unfreezes")
        for size in (2, 3)
    ],
)
def test_ranks_with_fewer_micro_batches_change_nothing(name: str, size: int) -> None:
    layouts = [(21, 2), (13, 1)]
    ranks = run_world(size, uneven_tasks.train_all, name=name, layouts=layouts)

    for position, (samples, limit) in enumerate(layouts):
        expected = train(name, samples, backend="sp", limit=limit)
        for rank in ranks:
            assert_equal(rank[position], expected)
            assert rank[position]["calls"] == ranks[0][position]["calls"]


@pytest.mark.parametrize("size", [pytest.param(2, marks=pytest.mark.long), 3])
def test_all_ranks_join_a_collective_in_the_forward_pass(size: int) -> None:
    layouts = [(samples, limit) for samples in (24, 23, 13, 21) for limit in (512, 2)]
    ranks = run_world(size, uneven_tasks.train_all, name="Synchronised", layouts=layouts)

    for rank in ranks:
        assert rank == ranks[0]
