"""Ranks feed metrics with their parts and merge the states: the values are those of one process, bit for bit."""

from __future__ import annotations

import pytest

from tests.helpers.processes import run_world
from tests.helpers.workers import scale

pytest.importorskip("torchmetrics")
pytestmark = [pytest.mark.distributed, pytest.mark.processes]


@pytest.mark.parametrize(("size", "samples"), [(3, 13), pytest.param(3, 1, marks=pytest.mark.long)])
def test_values_equal_those_of_one_process_and_updates_are_shared(size: int, samples: int) -> None:
    """P-K9. With one sample two of three ranks have none."""
    alone = scale.merged_metrics(samples, backend="sp")
    ranks = run_world(size, scale.merged_metrics, samples=samples)

    batches = -(-samples // 2)
    for got in ranks:
        assert got["values"] == alone["values"]
        assert got["updates"]["mean"] == 2 * batches, "sums of floats are not merged: all batches, in two validations"
    for name in ("accuracy", "confusion", "longest"):
        if samples > 1:
            assert sum(got["updates"][name] for got in ranks) == 2 * batches, f"{name}: each batch on one rank"
    for got in ranks:
        assert got["updates"]["plain"] >= 2 * batches, "an attribute outside of the state: all batches on all ranks"
