"""Each rank updates metrics with its share, and the states are merged: the values have the bits of one process."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.helpers.processes import run_world
from tests.helpers.workers import scale
from trainstack.backends import Communicator
from trainstack.trainer.core.state_tree import same
from trainstack.trainer.evaluation.metric_states import MergedMetrics

pytest.importorskip("torchmetrics")
from torchmetrics import Metric


@pytest.mark.distributed
@pytest.mark.processes
@pytest.mark.parametrize(("size", "samples"), [(3, 13), pytest.param(3, 1, marks=pytest.mark.long)])
def test_values_equal_one_process_and_updates_are_shared(size: int, samples: int) -> None:
    """With one sample two of three ranks have none."""
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


class Keeps(Metric):
    """Writes into an attribute outside of its state in each update."""

    def __init__(self, write: Callable[[Any], None], kept: Any) -> None:
        super().__init__()
        self.add_state("count", torch.tensor(0), dist_reduce_fx="sum")
        self.write, self.kept = write, kept

    def update(self) -> None:
        self.count += 1
        self.write(self.kept)

    def compute(self) -> Tensor:
        return self.count


class Holder:
    count = 0


def write_item(kept: Any) -> None:
    kept[500] = 1.0


def write_inner(kept: Any) -> None:
    inner = kept["rows"] if isinstance(kept, dict) else kept[0]
    inner[500] = 1.0


WRITES: dict[str, tuple[Callable[[Any], None], Callable[[], Any]]] = {
    "tensor": (write_item, lambda: torch.zeros(2000)),
    "tensor in a list": (write_inner, lambda: [torch.zeros(2000)]),
    "tensor in a dict": (write_inner, lambda: {"rows": torch.zeros(2000)}),
    "array": (write_item, lambda: np.zeros(2000)),
    "array in a list": (write_inner, lambda: [np.zeros(2000)]),
    "deque": (lambda kept: kept.append(1.0), lambda: deque([0.0])),
    "list": (lambda kept: kept.append(1.0), lambda: [0.0]),
    "object": (lambda kept: setattr(kept, "count", kept.count + 1), Holder),
}


@pytest.mark.parametrize(("write", "make"), WRITES.values(), ids=WRITES)
def test_a_metric_that_writes_into_an_attribute_is_not_merged(
    write: Callable[[Any], None], make: Callable[[], Any]
) -> None:
    metrics = {"reads": Keeps(lambda kept: None, make()), "writes": Keeps(write, make())}
    passed = MergedMetrics(metrics, used=True)
    for metric in metrics.values():
        metric.update()
    merged, _ = passed.merge(Communicator(), updates=1)
    assert merged == ({"reads"} if make is not Holder else set())
    assert same(metrics["writes"].kept, make()) or make is Holder
    assert int(metrics["writes"].count) == 0 or make is Holder, "it is reset"
