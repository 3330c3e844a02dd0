"""Loaders with custom batch sizes: `as_is` declares them, and others are compared with the plan."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from trainstack.trainer.core.logs import RunLogger
from trainstack.trainer.core.plan import TrainingPlan
from trainstack.trainer.data.step_batches import StepBatches


def as_is(loader: Any) -> Any:
    """Use the batches of `loader` without a change, in the loader's order and sizes.

    This is for loaders whose `batch_size` has another meaning, such as the number of parts of a graph in
    `RandomNodeLoader` of PyTorch Geometric. If a batch does not show its number of samples, override `batch_weight` of
    the module.

    Args:
        loader: an iterable. Its length, data set, `set_epoch` and state are used if it has them.

    Returns:
        an iterable to return from `get_train_dataloader` and the methods for evaluation.

    Examples:
        >>> batches = [(x[:40], 3 * x[:40]), (x[40:], 3 * x[40:])]
        >>> class Line(ts.SupervisedModule):
        ...     def get_train_dataloader(self, sampler, batch_size):
        ...         return ts.as_is(batches)
        >>> ts.Trainer(Line(nn.Linear(1, 1), nn.MSELoss(), "sgd"), args).train()
    """
    return _SizedLoader(loader) if hasattr(loader, "__len__") else _Loader(loader)


def compare_first_step(
    steps: Iterable[StepBatches], loader: Any, plan: TrainingPlan, log: RunLogger
) -> Iterator[StepBatches]:
    """Yield `steps`; warn once if the first has another number of samples than the plan says.

    A loader with a custom order has its own batch size. With `train_batch_size=1`, the default, nothing was planned.
    """
    rest = iter(steps)
    for first in rest:
        yield first
        samples = int(first.items)  # known once the micro-batches of the step have been read
        if samples not in (0, plan.global_batch) and plan.global_batch != 1 and not isinstance(loader, _Loader):
            on = "" if plan.world_size == 1 else f" on {plan.world_size} processes together"
            log.warning(
                f"the first global step has {samples} samples{on}, and train_batch_size={plan.global_batch}: the "
                f"loader has its own batch size. Write train_batch_size={samples}, pass batch_size on to the loader, "
                "or return trainstack.as_is(loader)."
            )
        break
    yield from rest


_OWN = ("batch_size", "batch_sampler", "sampler", "drop_last", "collate_fn")
"""Attributes of a `DataLoader` that do not describe the batches of a wrapped loader."""


class _Loader:
    def __init__(self, loader: Any) -> None:
        self.loader = loader

    def __iter__(self) -> Iterator[Any]:
        return iter(self.loader)

    def __getattr__(self, name: str) -> Any:
        if name in _OWN or name == "loader" or name.startswith("__"):
            raise AttributeError(f"a loader that is used as it is has no {name!r}")
        return getattr(self.loader, name)


class _SizedLoader(_Loader):
    def __len__(self) -> int:
        return len(self.loader)
