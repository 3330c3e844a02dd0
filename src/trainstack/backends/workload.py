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
    """What `prepare` may know of the data: a layer that samples or probes records needs it.

    Attributes:
        length: records in the data set; None where the library cannot index them.
        fetch: the collated batch of the records at the given indices (int64, 1-dim), not moved to a device.
        global_batch: records a global step, over all processes.
        max_micro_batch: records that fit into one forward pass.
        total_steps: global steps of the whole run; None if unknown.
        problem: why the library cannot index the records, in words; None if it can.
        repeats: how often the record that the data set has most often is in it, as far as is known.
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
        local: data set indices of this process's part, int64; may be empty.
        total: records of the step on all processes together, as far as this process knows.
    """

    local: Tensor
    total: float


class Sampling(ABC):
    """A law by which the records of each global step are drawn, in place of the library's permutation."""

    @abstractmethod
    def begin(self) -> None:
        """Steps are going to be made, on all processes. What is left of one that was broken off before counts no more,
        nor do records that were drawn ahead."""

    @abstractmethod
    def draw(self, step: int) -> Draw:
        """The records of global step `step`, counted from 1. Steps are asked for in order, some ahead of their turn."""

    @abstractmethod
    def check(self, batch: Any, index: Tensor, again: Callable[[Tensor], Any] | None) -> None:
        """Refuse a batch that is not made of the records at `index`, each from itself.

        Args:
            batch: as `collate_fn` has made it.
            index: data set indices, int64.
            again: makes a batch of other indices in the same way; None where rows cannot depend on each other.
        """

    @abstractmethod
    def steps_allowed(self, steps: int) -> int:
        """How many of the next `steps` steps may be made. All processes ask together, and get the same answer."""

    @abstractmethod
    def exhausted_reason(self) -> str:
        """Why no further step may be made, as a sentence."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Clipping:
    """How gradients are limited, once per global step, before the optimizers use them.

    Args:
        kind: `"norm"` scales all gradients together so that their joint L2 norm is at most `limit`;
            `"value"` clamps each element to `[-limit, limit]`; `"none"` leaves them alone.
        limit: the bound, in the unit of the gradient of the mean loss (loss scaling is undone first).
        measured: whether `clip` computes the joint norm where it does not need it itself.
    """

    kind: Literal["norm", "value", "none"] = "none"
    limit: float = 0.0
    measured: bool = True

    def __post_init__(self) -> None:
        if self.kind != "none" and not self.limit > 0:
            raise ConfigurationError(f"clipping by {self.kind} to {self.limit}: write a limit above 0.")


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Model, optimizers and the rest that the verbs of a stack are handed.

    Attributes:
        module: the user's module, never wrapped.
        model: what `forward` calls: `module`, or a layer's wrapper around it.
        optimizers: in the order in which the user returned them.
        params: owns the parameters of the current step.
        world: this process's place and device.
        clipping: what `clip` does.
        gradients_reduced_by: the name of the layer that sums gradients over processes, if one does.
        data: the training data, where the library knows it.
        run_dir: where the run keeps its files, if it has a place for them.
        uneven: whether a rank may run a micro-batch of weight 0 in the step under way; the same on all ranks.
        fast_paths: whether the verbs may replace public torch calls by the shorter ones of `fast_paths.py`.
        defers_sum: whether the passes of a step leave the gradients of each process apart, so that `sum_gradients` adds
            them up. So it is where a step makes several updates or evaluates a closure.
        closure: what the optimizers are stepped with; None for an update from the gradients there are.
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
        """A workload as `prepare` first gets it: nothing wrapped.

        `TRAINSTACK_FAST_PATHS` wins over `fast_paths`.
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
        """The same, with no norm of the gradients computed that clipping does not need."""
        return replace(self, clipping=replace(self.clipping, measured=False))

    @property
    def parameters(self) -> tuple[nn.Parameter, ...]:
        """All parameters of `module`, each once, frozen ones included."""
        return self.params.all

    @property
    def optimized_params(self) -> tuple[nn.Parameter, ...]:
        """The parameters that the optimizers hold, each once: what is clipped."""
        return self.params.optimized
