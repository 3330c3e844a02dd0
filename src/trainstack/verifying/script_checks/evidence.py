"""`Evidence`, the facts that a dry run collects and the checks judge."""

from __future__ import annotations

import copy
import inspect
import os
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from trainstack.trainer import ModuleInterface, TrainerArguments, TrainingPlan
from trainstack.trainer.core.random_state import isolated_rng
from trainstack.trainer.core.state_tree import tensors_in
from trainstack.trainer.data.step_batches import unsupported_order_reason
from trainstack.verifying.script_checks.sources import Source

MOST_SAMPLES = 256
"""Samples of a data set that are read. They are spread over it, so that its order can be judged."""


@dataclass(frozen=True, slots=True)
class Call:
    """A call of a function of torch, from the user's code.

    Attributes:
        name: of the function.
        place: `file:line` of the user's code; "" where no file of the user's is on the stack.
        stage: `"train"` or `"val"`.
        facts: by name.
    """

    name: str
    place: str
    stage: str
    facts: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class LayerInput:
    """The input of the first layer with weights."""

    name: str
    low: float
    high: float
    is_whole: bool
    shape: tuple[int, ...]


@dataclass(slots=True)
class Evidence:
    """The facts about a script after its dry run. Checks read it and change nothing.

    Attributes:
        module: after the dry run.
        args: of the run that the script would make.
        source: the file of the user; None where it cannot be read.
        plan: of the run that the script would make; None where it was not reached.
        loader: the training loader; None where it was not reached.
        val_loaders: by name.
        batches: of training, on the CPU, the first ones.
        losses: of the training steps.
        first_loss_again: the loss of the first batch after the last step; None where it was not computed.
        gradients: the largest absolute gradient of each parameter, by name, in each step.
        gradient_norms: over all parameters, in each step.
        calls: calls of torch that are worth a look.
        layer_input: of the first layer with weights.
        optimizers: of the run.
        schedulers: of the run.
        metrics: names of the metrics that were recorded.
        messages: of the trainer: level and text.
        warnings: of Python: text and place.
        error: that ended the dry run; None without.
        changed: attributes of the module that training changed and no state keeps.
        samples: of the training data, by index.
        val_samples: of the validation data, by index.
        unstable: whether a sample that is read twice, from the same random state, differs.
        responses: whether the loss depends on each item of the batch, by description.
    """

    module: ModuleInterface
    args: TrainerArguments
    source: Source | None
    plan: TrainingPlan | None = None
    loader: Any = None
    val_loaders: dict[str, Any] = field(default_factory=dict)
    batches: list[Any] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    first_loss_again: float | None = None
    gradients: list[dict[str, float]] = field(default_factory=list)
    gradient_norms: list[float] = field(default_factory=list)
    calls: list[Call] = field(default_factory=list)
    layer_input: LayerInput | None = None
    optimizers: Sequence[Any] = ()
    schedulers: Sequence[Any] = ()
    metrics: set[str] = field(default_factory=set)
    messages: list[tuple[int, str]] = field(default_factory=list)
    warnings: list[tuple[str, str]] = field(default_factory=list)
    error: BaseException | None = None
    changed: list[str] = field(default_factory=list)
    samples: dict[int, Any] = field(default_factory=dict)
    val_samples: dict[str, dict[int, Any]] = field(default_factory=dict)
    unstable: int | None = None
    responses: dict[str, bool] = field(default_factory=dict)

    def method_place(self, name: str) -> str:
        """`file:line` of a method of the module, where the user has written it."""
        method = inspect.unwrap(getattr(type(self.module), name, None) or type(self.module).__init__)
        return self.place_of(method)

    def place_of(self, function: Any) -> str:
        """`file:line` of a function, class or object; "" where it has no source of the user's."""
        with suppress(TypeError, OSError):
            target = function if inspect.isroutine(function) or inspect.isclass(function) else type(function)
            file = inspect.getsourcefile(target)
            line = inspect.getsourcelines(target)[1]
            if file is not None and not (getattr(target, "__module__", "") or "").startswith(("trainstack.", "torch.")):
                return f"{os.path.basename(file)}:{line}"
        return ""

    def data_length(self) -> int:
        """Samples of the training data that the library orders; 0 where it has a custom order or no length."""
        if not isinstance(self.loader, DataLoader) or unsupported_order_reason(self.loader) is not None:
            return 0
        return len(self.loader.dataset)  # type: ignore[arg-type]

    def labels(self) -> list[Any]:
        """The labels of the samples that were read, where they are single whole numbers."""
        found = [label_of(sample) for _, sample in sorted(self.samples.items())]
        return found if found and all(one is not None for one in found) else []


def label_of(sample: Any) -> int | None:
    """The label of a sample: the last item of a tuple, or the item that is named like one; None for other labels."""
    value: Any = None
    if isinstance(sample, Mapping):
        value = next((sample[name] for name in ("labels", "label", "target", "targets", "y") if name in sample), None)
    elif isinstance(sample, tuple | list) and len(sample) > 1:
        value = sample[-1]
    if isinstance(value, Tensor | np.ndarray | np.generic):
        is_whole = (
            not value.is_floating_point() if isinstance(value, Tensor) else np.issubdtype(value.dtype, np.integer)
        )
        single = (value.numel() if isinstance(value, Tensor) else value.size) == 1
        return int(value) if is_whole and single else None
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def tensors_of(value: Any) -> list[Tensor]:
    """All tensors in nested lists, tuples and dicts."""
    return [one for one in tensors_in(value) if isinstance(one, Tensor)]


def map_tensors(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """`value` with each tensor in nested lists, tuples and dicts replaced by `change` of it; others stay."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, dict):
        copied = copy.copy(value)
        for key, item in value.items():
            copied[key] = map_tensors(item, change)
        return copied
    if isinstance(value, tuple | list):
        items = [map_tensors(item, change) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    return value


def read_samples(loader: Any) -> dict[int, Any]:
    """Up to `MOST_SAMPLES` samples of the data set of a loader, by index; none where it has no indices."""
    dataset = getattr(loader, "dataset", None)
    if not isinstance(loader, DataLoader) or not hasattr(dataset, "__getitem__"):
        return {}
    samples: dict[int, Any] = {}
    with suppress(Exception), isolated_rng(0, torch.device("cpu")):
        length = len(dataset)  # type: ignore[arg-type]
        step = max(1, length // MOST_SAMPLES)
        for index in range(0, length, step):
            samples[index] = dataset[index]  # type: ignore[index]
            if len(samples) == MOST_SAMPLES:
                break
    return samples


def digest(sample: Any) -> tuple[Any, ...]:
    """A value that is equal for samples with equal content."""
    if isinstance(sample, Tensor):
        return ("tensor", tuple(sample.shape), str(sample.dtype), sample.detach().cpu().contiguous().numpy().tobytes())
    if isinstance(sample, np.ndarray):
        return ("array", sample.shape, str(sample.dtype), sample.tobytes())
    if isinstance(sample, Mapping):
        return tuple((key, digest(item)) for key, item in sample.items())
    if isinstance(sample, tuple | list):
        return tuple(map(digest, sample))
    return ("value", repr(sample))


def holds_generator(value: Any, depth: int = 3) -> bool:
    """Whether an object has its own generator of random numbers, which continues with each sample."""
    if isinstance(value, torch.Generator | np.random.Generator | np.random.RandomState | random.Random):
        return True
    inner: Iterator[Any] = iter(())
    if isinstance(value, list | tuple) and len(value) < 100:
        inner = iter(value)
    elif hasattr(value, "__dict__") and not isinstance(value, nn.Module):
        inner = iter(list(vars(value).values()))
    return depth > 0 and any(holds_generator(one, depth - 1) for one in inner)


@contextmanager
def random_state_kept() -> Iterator[None]:
    """A block after which the generators of the process are those of before."""
    with isolated_rng(0, torch.device("cpu")):
        yield
