"""Messages and requests of ranks as their number grows."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

import trainstack as ts
from tests.helpers.modules import CLASSES, Classifier, arguments, numbers
from tests.helpers.workers import RANK


@contextmanager
def counting() -> Iterator[dict[str, int]]:
    """Counts messages to one rank, their bytes, and collectives, by name."""
    counts = {"send": 0, "bytes": 0, "allgather": 0, "allreduce": 0, "broadcast": 0}

    def counted(name: str) -> Any:
        called = getattr(dist.ProcessGroup, name)

        def call(group: Any, tensors: Any, *args: Any, **kwargs: Any) -> Any:
            counts[name] += 1
            if name == "send":
                counts["bytes"] += sum(tensor.nbytes for tensor in tensors)
            return called(group, tensors, *args, **kwargs)

        return mock.patch.object(dist.ProcessGroup, name, call)

    with ExitStack() as patches:
        for name in ("send", "allgather", "allreduce", "broadcast"):
            patches.enter_context(counted(name))
        yield counts


def exchanges() -> dict[str, dict[str, int]]:
    """The cost of each kind of exchange for this rank."""
    stack = ts.build_trainer_backend("ddp")
    comm = stack.open("cpu").comm
    rows = {"a": torch.ones(100, 8), "b": torch.ones(100), "c": torch.ones(100, 3)}
    calls: dict[str, Callable[[], Any]] = {
        "sum": lambda: comm.sum([1.0], "tokens"),
        "text": lambda: comm.broadcast_object("text", "a text"),
        "place": lambda: comm.check_place("a place"),
        "errors": lambda: comm.raise_if_any(None, "nothing"),
        "gather": lambda: comm.gather(RANK, "numbers"),
        "skewed": lambda: comm.gather(torch.zeros(3_000_000 * (RANK == 0), dtype=torch.uint8), "skewed"),
        "outputs": lambda: stack.gather(rows),
        "states": lambda: comm.merge_tensors([torch.ones(10, dtype=torch.int64)], ["sum"], "states"),
    }
    found = {}
    for name, call in calls.items():
        with counting() as counts:
            call()
        found[name] = dict(counts)
    assert comm.sum([float(RANK), 0.5])[0] == comm.size * (comm.size - 1) / 2
    stack.close()
    return found


def merged_metrics(samples: int, backend: str = "ddp") -> dict[str, Any]:
    """Values of metrics over one validation, as text, and the updates that each metric took on this rank."""
    from torchmetrics import MeanMetric, Metric
    from torchmetrics.classification import MulticlassAccuracy, MulticlassConfusionMatrix

    class Longest(Metric):
        """The largest and the smallest sample, and its labels one after the other."""

        def __init__(self) -> None:
            super().__init__()
            self.add_state("most", torch.tensor(-1e9), dist_reduce_fx="max")
            self.add_state("least", torch.tensor(1e9), dist_reduce_fx="min")
            self.add_state("seen", [], dist_reduce_fx="cat")

        def update(self, preds: Tensor, target: Tensor) -> None:
            self.most = torch.maximum(self.most, preds.max())
            self.least = torch.minimum(self.least, preds.min())
            self.seen.append(target)

        def compute(self) -> Any:
            order = torch.cat(list(self.seen)).double()
            return {"most": self.most, "least": self.least, "order": (order * torch.arange(len(order))).sum()}

    class Plain(Longest):
        """Has an attribute outside of the state: not merged."""

        batches = 0

        def update(self, preds: Tensor, target: Tensor) -> None:
            self.batches += 1
            super().update(preds, target)

        def compute(self) -> Any:
            return self.batches

    class Measured(Classifier):
        def val_step(self, global_step: int, batch: Any, device: Any) -> Any:
            return self.net(batch[0]).softmax(-1), batch[1]

        def metric_inputs(self, outputs: Any, batch: Any) -> Any:
            return {"preds": outputs[0], "target": outputs[1], "value": outputs[0]}

    torch.manual_seed(0)
    metrics: dict[str, Any] = {
        "accuracy": MulticlassAccuracy(CLASSES),
        "confusion": MulticlassConfusionMatrix(CLASSES),
        "longest": Longest(),
        "mean": MeanMetric(),
        "plain": Plain(),
    }
    counts = dict.fromkeys(metrics, 0)

    def counted(name: str, metric: Any) -> None:
        update = metric.update

        def call(*args: Any, **kwargs: Any) -> None:
            counts[name] += 1
            update(*args, **kwargs)

        call.__signature__ = inspect.signature(update)  # type: ignore[attr-defined]
        metric.update = call

    for name, metric in metrics.items():
        counted(name, metric)
    module = Measured(numbers(samples), validate=True)
    trainer = ts.Trainer(module, arguments("unused", backend=backend, val_batch_size=2), metrics=metrics)
    found = trainer.validate(keep_outputs=False).metrics
    values = {
        name: value.tolist() if isinstance(value, Tensor) else float(value).hex() for name, value in found.items()
    }
    confusion = found["val/confusion"]
    assert torch.equal(trainer.validate(keep_outputs=False).metrics["val/confusion"], confusion), "twice in a row"
    return {"values": values, "updates": counts}


def kept_outputs(samples: int) -> dict[str, Any]:
    """The part of a prediction that each rank gets, by its request."""

    class Predicts(Classifier):
        def predict_step(self, global_step: int, batch: Any, device: Any) -> Any:
            return {
                "x": batch[0],
                "y": batch[1].to(torch.int16),
                "names": [f"n{float(row[0]):.3f}" for row in batch[0]],
            }

    dataset = numbers(samples)
    trainer = ts.Trainer(Predicts(dataset), arguments("unused", backend="ddp", val_batch_size=2))
    found: dict[str, Any] = {}
    for kept in (True, "main", "own"):
        with counting() as counts:
            got = trainer.predict(dataset, keep_outputs=kept)
        rows = None if got is None or not got else len(got["x"])
        same = None
        if rows is not None and kept != "own":
            names = [name for part in got["names"] for name in part]
            same = torch.equal(got["x"], dataset.tensors[0]) and names == [f"n{float(row[0]):.3f}" for row in got["x"]]
            same = same and torch.equal(got["y"].long(), dataset.tensors[1])
        found[str(kept)] = {"rows": rows, "same": same, "counts": dict(counts)}
    trainer.close()
    return found
