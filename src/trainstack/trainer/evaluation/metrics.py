"""Metrics with `update`, `compute` and `reset` over the batches of an evaluation."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from numbers import Real
from typing import Any, Protocol, cast, runtime_checkable

import torch
from torch import Tensor, nn

from trainstack.backends import Communicator, World, move_to_device
from trainstack.errors import ConfigurationError, ModuleContractError, annotate
from trainstack.stage import Stage
from trainstack.trainer.arg_matching import check_not_correctness, feeder
from trainstack.trainer.evaluation.metric_states import MergedMetrics
from trainstack.trainer.module_interface import ModuleInterface


@runtime_checkable
class Metric(Protocol):
    """A value that is accumulated over an evaluation, such as a metric of torchmetrics."""

    @property
    def update(self) -> Callable[..., Any]:
        """Add one batch."""

    @property
    def compute(self) -> Callable[[], Any]:
        """The value over all batches since `reset`: a number, a tensor, or a dict of these."""

    @property
    def reset(self) -> Callable[[], Any]:
        """Drop all batches."""


class Metrics:
    """The metrics of a run.

    Args:
        given: a metric, or metrics by name; under the name of a loader, a dict of metrics for this loader only. None
            for the attribute or method `metrics` of the module.
        module: the module, whose `metric_inputs` returns the inputs of the metrics.

    Raises:
        ConfigurationError: a given object is not a metric.
    """

    def __init__(self, given: Any, module: nn.Module) -> None:
        self._module = module
        if given is None:
            given = getattr(module, "metrics", None)
            given = given() if inspect.ismethod(given) else given
        self._for_all: dict[str, Metric] = {}
        self._for_one: dict[str, dict[str, Metric]] = {}
        for name, item in _items(given):
            if _is_metric(item):
                self._for_all[_checked(name)] = _as_metric(item)
            else:
                metrics = _items(item, name)
                self._for_one[name] = {_checked(inner): _of_protocol(inner, metric) for inner, metric in metrics}

    def updates(self) -> list[Callable[..., Any]]:
        """The `update` methods of all metrics."""
        return [metric.update for part in (self._for_all, *self._for_one.values()) for metric in part.values()]

    def check_loaders(self, keys: list[str]) -> None:
        """Refuse metrics for a loader that does not exist.

        Raises:
            ConfigurationError: names the existing loaders.
        """
        for name in self._for_one:
            if name not in keys:
                raise ConfigurationError(
                    f"metrics[{name!r}] is a dict, so it has the metrics of the loader {name!r}, but the loaders are "
                    f"{', '.join(map(repr, keys))}. For metrics of all loaders, write metrics={{'name': metric}}."
                )

    def over(self, key: str, world: World, stage: Stage, *, in_parts: bool) -> MetricPass | None:
        """Begin a pass over the loader `key`; None if it has no metrics.

        Args:
            key: the name of the loader.
            world: the rank of this process and the number of processes.
            stage: the stage of the pass.
            in_parts: whether each process evaluates a part.
        """
        metrics = self._for_all | self._for_one.get(key, {})
        return MetricPass(metrics, self._module, world, stage, in_parts=in_parts) if metrics else None


class MetricPass:
    """One pass of metrics over one loader.

    On one process, metrics are updated after each batch. On several processes, this also holds for metrics whose states
    can be merged: see `MergedMetrics`. For other metrics, each process keeps the inputs of its batches in the host's
    memory, and at the end all processes update them with the inputs of all, in data set order. The batches are the same
    for any number of processes, and so are the bits of the values. Metrics do not communicate.
    """

    def __init__(
        self, metrics: Mapping[str, Metric], module: nn.Module, world: World, stage: Stage, *, in_parts: bool
    ) -> None:
        self._metrics, self._module, self._world, self._stage = metrics, module, world, stage
        self._kept: list[Any] | None = [] if in_parts and world.size > 1 else None
        self._updates = 0
        method = getattr(cast(Any, module).metric_inputs, "__func__", None)
        self._by_default = method is ModuleInterface.metric_inputs
        self._feed = {name: feeder(metric.update) for name, metric in metrics.items()}
        for name, metric in metrics.items():
            if isinstance(metric, nn.Module):
                metric.to(world.device)
            with _annotate_metric_errors(name, metric, "reset"):
                metric.reset()
        self._merged = MergedMetrics(metrics, used=self._kept is not None)

    def add(self, outputs: Any, batch: Any) -> None:
        """Add the outputs of a step for `batch`."""
        try:
            inputs = cast(Any, self._module).metric_inputs(outputs, batch)
        except Exception as error:
            annotate(error, f"raised in {type(self._module).__name__}.metric_inputs")
            raise
        if inputs is None:
            return
        if self._by_default:
            self._by_default = False  # only the first batch is checked
            check_not_correctness(outputs, inputs, f"{self._stage.name.lower()}_step", next(iter(self._metrics)))
        if not isinstance(inputs, tuple | dict):
            raise ModuleContractError(
                f"metric_inputs returned a {type(inputs).__name__}. Return a tuple of positional arguments for each "
                "metric's update, a dict, whose items are matched with its parameters by name, or None for no update."
            )
        if self._kept is None:
            self._update(inputs, self._metrics)
            return
        self._kept.append(move_to_device(_compact(inputs), torch.device("cpu")))
        if self._merged.names:
            self._update(inputs, self._merged.names)

    def results(self, comm: Communicator) -> dict[str, Any]:
        """The values of the metrics by name. Metrics are reset. All processes call this together."""
        if self._kept is not None:
            self._update_with_all(comm, self._kept)
        values = {}
        for name, metric in self._metrics.items():
            with _annotate_metric_errors(name, metric, "compute"), _without_sync(metric):
                if self._updates:
                    values[name] = metric.compute()
                metric.reset()
        return values

    def _update_with_all(self, comm: Communicator, kept: list[Any]) -> None:
        """Update every metric with the inputs of all processes, or merge its states."""
        merged = set[str]()
        if self._merged.names:
            merged, self._updates = self._merged.merge(comm, len(kept))
        left = [name for name in self._metrics if name not in merged]
        if left:
            self._updates = 0
            for inputs in (inputs for part in comm.gather(kept, "metric_inputs") for inputs in part):
                self._update(inputs, left)

    def _update(self, inputs: tuple[Any, ...] | dict[str, Any], names: Iterable[str]) -> None:
        self._updates += 1
        inputs = move_to_device(inputs, self._world.device)
        for name in names:
            metric = self._metrics[name]
            with _annotate_metric_errors(name, metric, "update"), _without_sync(metric), torch.no_grad():
                self._feed[name](inputs)


def numbers_in(name: str, value: Any) -> Iterator[tuple[str, float | Tensor | None]]:
    """The numbers in the result of a metric, each with its name; None for an item that is not one number."""
    if isinstance(value, Mapping):
        for inner, item in value.items():
            yield from numbers_in(f"{name}/{inner}" if name else str(inner), item)
    elif isinstance(value, Tensor) and value.numel() == 1 and not value.is_complex():
        yield name, value
    else:
        yield name, float(value) if isinstance(value, Real) else None


def _items(given: Any, where: str = "") -> list[tuple[str, Any]]:
    if given is None:
        return []
    if _is_metric(given):
        return [("" if callable(getattr(given, "items", None)) else type(given).__name__, given)]
    if isinstance(given, Mapping | nn.ModuleDict):
        return list(given.items())
    wrap = f" Wrap the function: metric_of({_name_of(given)})." if callable(given) else ""
    raise ConfigurationError(
        f"metrics{f'[{where!r}]' if where else ''} is a {type(given).__name__}. Write a dict of metrics by name; a "
        f"metric has the methods update, compute and reset.{wrap}"
    )


def _name_of(function: Any) -> str:
    name = getattr(function, "__name__", "function")
    return name if name.isidentifier() else "function"


class _GetMetric:
    """Adapts a metric that has `get_metric` instead of `compute`. Without `update`, the metric is called.

    If `get_metric` has a parameter `reset`, it can reset the metric. Else the metric has a method `reset`.
    """

    def __init__(self, metric: Any) -> None:
        self._metric = metric
        self.update: Callable[..., Any] = getattr(metric, "update", metric)
        self._resets = "reset" in inspect.signature(metric.get_metric).parameters

    def compute(self) -> Any:
        return self._metric.get_metric(reset=False) if self._resets else self._metric.get_metric()

    def reset(self) -> None:
        reset = getattr(self._metric, "reset", None)
        self._metric.get_metric(reset=True) if reset is None else reset()


def _is_metric(value: Any) -> bool:
    if isinstance(value, type):
        return False
    if callable(getattr(value, "get_metric", None)):
        return callable(getattr(value, "update", value))
    return all(callable(getattr(value, method, None)) for method in ("update", "compute", "reset"))


def _as_metric(value: Any) -> Metric:
    return cast(Metric, value if callable(getattr(value, "compute", None)) else _GetMetric(value))


def _of_protocol(name: str, metric: Any) -> Metric:
    if not _is_metric(metric):
        kind = f"the class {metric.__name__}" if isinstance(metric, type) else f"a {type(metric).__name__}"
        raise ConfigurationError(
            f"metrics[{name!r}] is {kind}. Give an object with the methods update, compute and reset."
        )
    return _as_metric(metric)


def _checked(name: Any) -> str:
    if not isinstance(name, str):
        raise ConfigurationError(f"a metric has the name {name!r}, which is not a string. Write a string.")
    if name == "loss":
        raise ConfigurationError(
            "a metric has the name 'loss', which is the name of the step's loss. Write another name."
        )
    return name


@contextmanager
def _annotate_metric_errors(name: str, metric: Metric, method: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        annotate(error, f"raised in {method} of the metric {name or type(metric).__name__!r}")
        raise


@contextmanager
def _without_sync(metric: Metric) -> Iterator[None]:
    """A block in which metrics of torchmetrics do not synchronize, because they have the batches of all processes."""
    parts: list[Any] = list(metric.modules()) if isinstance(metric, nn.Module) else [metric]
    synced = [(part, part.distributed_available_fn) for part in parts if hasattr(part, "distributed_available_fn")]
    try:
        for part, _ in synced:
            part.distributed_available_fn = lambda: False
        yield
    finally:
        for part, before in synced:
            part.distributed_available_fn = before


def _compact(inputs: Any) -> Any:
    """`inputs` with copies of views, because a small view keeps the memory of the whole tensor."""
    if isinstance(inputs, dict):
        return {name: _compact(value) for name, value in inputs.items()}
    if type(inputs) in (tuple, list):
        return type(inputs)(_compact(value) for value in inputs)
    if isinstance(inputs, Tensor) and inputs.untyped_storage().nbytes() > inputs.nbytes:
        return inputs.clone()
    return inputs
