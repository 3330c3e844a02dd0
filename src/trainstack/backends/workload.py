"""`Workload`, the frozen record of modules and optimizers that most verbs receive."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from os import PathLike
from pathlib import Path
from typing import Any, Literal

from torch import Tensor, nn
from torch.optim import Optimizer

from trainstack.backends.fast_paths import fast_paths_enabled
from trainstack.backends.processes.world import World
from trainstack.backends.step_parameters import StepParameters
from trainstack.errors import ConfigurationError


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingSet:
    """Facts about the training data for `prepare`: a layer that samples or probes records needs them.

    Attributes:
        length: records in the dataset; None if the library cannot index them.
        fetch: returns the collated batch of the records at the given indices (int64, 1-dim), not moved to a device.
        global_batch: records in a global step, over all processes.
        max_micro_batch: the largest number of records in one forward pass.
        total_steps: global steps of the whole run; None if unknown.
        problem: the reason why the library cannot index the records, as text; None if it can.
        repeats: the known number of occurrences of the most frequent record in the dataset.
    """

    length: int | None
    fetch: Callable[[Tensor], Any]
    global_batch: int
    max_micro_batch: int
    total_steps: int | None
    problem: str | None = None
    repeats: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Draw:
    """The records of one global step.

    Attributes:
        local: dataset indices of this process's part, int64; may be empty.
        total: records of the step on all processes together, or as many of them as this process knows.
    """

    local: Tensor
    total: float


class Sampling(ABC):
    """Draws the records of each global step, in place of the library's permutation."""

    @abstractmethod
    def begin(self) -> None:
        """Called on all processes before steps are made. Discard an interrupted step and records drawn in advance."""

    @abstractmethod
    def draw(self, step: int) -> Draw:
        """The records of global step `step`, counted from 1. Steps are drawn in order, some of them in advance."""

    @abstractmethod
    def check(self, batch: Any, index: Tensor, again: Callable[[Tensor], Any] | None) -> None:
        """Refuse a batch whose rows are not made of the records at `index`, each from its record alone.

        Args:
            batch: a result of `collate_fn`.
            index: dataset indices, int64.
            again: makes a batch of other indices in the same way; None if rows cannot depend on each other.
        """

    @abstractmethod
    def steps_allowed(self, steps: int) -> int:
        """The number of the next `steps` steps that may be made. All processes call it and get the same result."""

    @abstractmethod
    def exhausted_reason(self) -> str:
        """The reason why no further step may be made, as a sentence."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Clipping:
    """The limit of gradients, applied once in each global step, before the optimizers use them.

    Args:
        kind: `"norm"` scales all gradients together so that their joint L2 norm is at most `limit`; `"value"` clamps
            each element to `[-limit, limit]`; `"none"` does not change them.
        limit: the bound, in the unit of the gradient of the mean loss, without loss scaling.
        measured: whether `clip` computes the joint norm even if clipping does not need it.
    """

    kind: Literal["norm", "value", "none"] = "none"
    limit: float = 0.0
    measured: bool = True

    def __post_init__(self) -> None:
        if self.kind != "none" and not self.limit > 0:
            raise ConfigurationError(f"clipping by {self.kind} to {self.limit}: write a limit above 0.")


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """The model, its optimizers and further objects that the verbs of a stack receive.

    Attributes:
        module: the user's module, never wrapped.
        model: the object that `forward` calls: `module`, or a layer's wrapper around it.
        optimizers: in the order in which the user returned them.
        params: owns the parameters of the current step.
        world: the rank and device of this process.
        clipping: the limit that `clip` applies.
        gradients_reduced_by: the name of the layer that sums gradients over processes, if one does.
        data: the training data, if the library knows it.
        run_dir: the folder for files of the run, if it has one.
        uneven: whether a rank may run a micro-batch of weight 0 in the current step; the same on all ranks.
        fast_paths: whether the verbs may replace public torch calls by the shorter ones of `fast_paths.py`.
        defers_sum: whether the passes of a step keep the gradients of each process separate until `sum_gradients`. This
            is so if a step makes several updates or evaluates a closure.
        closure: the argument of `Optimizer.step`; None for an update from the existing gradients.
    """

    module: nn.Module
    model: nn.Module
    optimizers: tuple[Optimizer, ...]
    params: StepParameters
    world: World
    clipping: Clipping = Clipping()
    gradients_reduced_by: str | None = None
    data: TrainingSet | None = None
    run_dir: Path | None = None
    uneven: bool = False
    fast_paths: bool = True
    defers_sum: bool = False
    closure: Callable[[], Tensor] | None = None

    @classmethod
    def from_module(
        cls,
        module: nn.Module,
        optimizers: Any,
        world: World,
        clipping: Clipping | None = None,
        data: TrainingSet | None = None,
        run_dir: str | PathLike[str] | None = None,
        fast_paths: bool = True,
    ) -> Workload:
        """The workload that `prepare` gets first, in which nothing is wrapped.

        `TRAINSTACK_FAST_PATHS` takes precedence over `fast_paths`.
        """
        optimizers = tuple(optimizers)
        return cls(
            module=module,
            model=module,
            optimizers=optimizers,
            params=StepParameters(module, optimizers),
            world=world,
            clipping=clipping or Clipping(),
            data=data,
            run_dir=None if run_dir is None else Path(run_dir),
            fast_paths=fast_paths_enabled(fast_paths),
        )

    def without_grad_norm(self) -> Workload:
        """A copy that computes the norm of the gradients only if clipping needs it."""
        return replace(self, clipping=replace(self.clipping, measured=False))

    @property
    def parameters(self) -> tuple[nn.Parameter, ...]:
        """All parameters of `module`, each once, including frozen ones."""
        return self.params.all

    @property
    def optimized_params(self) -> tuple[nn.Parameter, ...]:
        """The parameters of the optimizers, each once. They are the ones to clip."""
        return self.params.optimized
