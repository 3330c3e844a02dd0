"""`TrainerBackend`, the contract of a layer.

The loop holds the outermost layer of a stack and calls its verbs. Each layer does its part and passes the call to the
next one inside. `SingleProcess` is the innermost layer of every stack.
"""

from __future__ import annotations

import enum
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from trainstack.backends.model_units import Unit
from trainstack.backends.processes.world import DeviceChoice, World
from trainstack.backends.workload import Workload
from trainstack.errors import CheckpointMismatchError, ConfigurationError
from trainstack.stage import Stage

if TYPE_CHECKING:
    from trainstack.backends.privacy_statement import PrivacyStatement, WeightsOrigin
    from trainstack.backends.random_streams import RandomStreams
    from trainstack.backends.workload import Sampling


VERBS = (
    "open",
    "place",
    "prepare",
    "accumulate",
    "forward",
    "backward",
    "clip",
    "step",
    "skip",
    "begin_evaluation",
    "end_evaluation",
    "gather",
    "read",
    "close",
)
"""The verbs that a run calls on a stack, in the order of a run."""


class Slot(enum.IntEnum):
    """The positions in a stack, outermost first. Each slot holds one layer, except USER, which holds any number."""

    PROCESS = 0
    PRIVACY = 1
    PRECISION = 2
    USER = 3


Window = Literal["interval", "epoch"]
"""The steps since the last log point, or those of the epoch."""


class TrainerBackend(ABC):
    """One layer of a stack. The outermost layer represents the whole stack.

    Attributes:
        name: the token of the layer in a backend string; also the key of its state in a checkpoint.
        summary: the effect of the layer, in one sentence, for `explain`.
        collectives: the collective operations of the layer and their frequency, for `explain`.
        excludes: tokens that cannot be in the same stack, each with the reason.
        ends: the verbs that the layer never passes to the layers inside it. `explain` prints them, and the contract
            tests compare them with the calls that happen. A stack is refused if a layer inside overrides one of them.
        may_be_skipped: verbs that the layer overrides, and that another layer may end before the call reaches it.
        slot: the position of the layer in a stack. `register_layer` sets it, and `name`.
        private: whether the layer bounds the information about a record that training reveals.
        bounds_gradients: whether the layer bounds the gradient of each record. A loss of inf or nan then has no
            influence: it neither stops a run nor skips a step.
        may_skip_steps: whether `step` may leave the weights unchanged, as a gradient scaler does. The loop then
            restores the buffers of the module after such a step.
        hides_records: whether hooks and subscribers of events get no batch, no output and no loss of training.
        hides_losses: whether values that are computed from training data without noise, such as training losses, must
            not be recorded.
        public_validation: of a private layer: whether validation and test data are declared public.
        released_metrics: the names of the metrics that the layer releases with noise; see `pop_released`.
        joins_processes: whether the layer lets several processes train together.
        autocast_dtype: the dtype to which the layer autocasts the forward pass; None if it does not autocast.
        evaluates_together: whether all ranks have to make the same forward passes in an evaluation too, because each
            pass gathers sharded parameters.
        reduces_each_pass: of a layer that shards parameters: whether gradients are reduced after each backward pass,
            not only at the end of a step.
        replicas: of a layer that shards parameters: the number of complete copies over all ranks.
        units: the submodules that the user named as units of the layer; see `find_units`.
        standalone: of the innermost layer: whether no layer around it joins processes.
        configured_by: the classes of the fields of `TrainerArguments` that configure the layer, each with the parameter
            of the constructor that takes the field.
        rank_zero_state: keys of the layer's state that only rank 0 has, or that differ on rank 0.
        refuses_updates: the reason why a step cannot make several updates in a stack with this layer; empty if it can.
        refuses_closures: the reason why an optimizer cannot evaluate a closure in a stack with this layer; empty if it
            can.
        refuses_replay: the reason why the passes of a step cannot run a second time in a stack with this layer; empty
            if they can.
        prepares_again: whether `prepare` may be called a second time, with the optimizers of a training, after an
            evaluation that prepared the stack without optimizers. If False, an evaluation before training prepares the
            training too, and needs training data and optimizers.
        requires_state: whether a checkpoint without the state of this layer, such as that of a privacy accountant, is
            refused.
    """

    name: ClassVar[str] = ""
    summary: ClassVar[str] = ""
    collectives: ClassVar[str] = ""
    excludes: ClassVar[Mapping[str, str]] = {}
    ends: ClassVar[frozenset[str]] = frozenset()
    may_be_skipped: ClassVar[frozenset[str]] = frozenset()
    slot: ClassVar[Slot] = Slot.USER
    private: ClassVar[bool] = False
    bounds_gradients: ClassVar[bool] = False
    may_skip_steps: ClassVar[bool] = False
    joins_processes: ClassVar[bool] = False
    autocast_dtype: ClassVar[torch.dtype | None] = None
    evaluates_together: bool = False
    reduces_each_pass: bool = False
    replicas: int = 1
    units: Sequence[Unit] | None = None
    standalone: bool = True
    configured_by: ClassVar[Mapping[type, str]] = {}
    refuses_updates: str = ""
    refuses_closures: str = ""
    refuses_replay: str = ""
    hides_losses: bool = False
    hides_records: bool = False
    public_validation: bool = False

    @property
    def keeps_values(self) -> bool:
        """Of a private layer: whether `train_step` has set attributes, which may contain values of records."""
        return False

    released_metrics: tuple[str, ...] = ()
    rank_zero_state: ClassVar[frozenset[str]] = frozenset()
    prepares_again: ClassVar[bool] = False
    requires_state: ClassVar[bool] = False
    _runner: LoopRunner | None = None
    _owner: weakref.ref[Any] | None = None

    # --- the verbs -----------------------------------------------------------------------------------------

    @abstractmethod
    def open(self, device: DeviceChoice = "auto") -> World:
        """Join the process group, select the device of this process and return both as a `World`."""

    @abstractmethod
    def place(self, module: nn.Module, world: World) -> None:
        """Move the module to its device. Called once, before its optimizers are made."""

    @abstractmethod
    def prepare(self, work: Workload) -> Workload:
        """Wrap or convert the model. Called once, after `place` and before optimizer states are restored.

        If `prepares_again`, it is called a second time for a training that follows an evaluation.
        """

    @abstractmethod
    def accumulate(self, work: Workload, last: bool) -> AbstractContextManager[Any]:
        """The context around the forward and the backward pass of one micro-batch; `last` ends the global step."""

    @abstractmethod
    def forward(self, work: Workload, stage: Stage, batch: Any, step: int) -> Any:
        """Run the step method of the module on one micro-batch and return its outputs."""

    @abstractmethod
    def backward(self, work: Workload, loss: Tensor, weight: float) -> None:
        """Add the gradient of `weight * loss` to `.grad`.

        Args:
            work: the module, its optimizers and their parameters.
            loss: 0-dim, attached to its graph, not scaled.
            weight: this micro-batch's share of the global step; the shares of one step sum to one.
        """

    @abstractmethod
    def clip(self, work: Workload) -> Tensor | None:
        """Limit the gradients. Return their joint L2 norm before that (0-dim, on the device, not read) or None."""

    @abstractmethod
    def step(self, work: Workload) -> bool:
        """Run the optimizers. Return False if no weight changed."""

    @abstractmethod
    def gather(self, outputs: Any) -> Any:
        """Combine collected outputs of all processes, in dataset order."""

    @abstractmethod
    def read(self, tensors: Sequence[Tensor]) -> list[float]:
        """The values of 0-dim tensors, on one device or several, as Python floats.

        The host waits for the device here. The loop reads losses, norms and checks of parameters only by this verb,
        many at once.
        """

    @abstractmethod
    def close(self) -> None:
        """Release the resources of `open`, such as the process group. A second call has no effect."""

    def sum_gradients(self, work: Workload) -> None:  # noqa: B027 - most layers have nothing to do
        """Sum the gradients over all processes. All of them call it after the passes of an update if `defers_sum`."""

    def skip(self, work: Workload) -> None:  # noqa: B027 - most layers have nothing to do
        """Replaces `step` for a global step that moves nothing; the loop zeroes its gradients afterwards."""

    def begin_evaluation(self, work: Workload) -> None:  # noqa: B027 - most layers have nothing to do
        """Make the evaluated state equal on all processes. All of them call it before each pass without training."""

    def end_evaluation(self, work: Workload) -> None:  # noqa: B027 - most layers have nothing to do
        """Undo the changes of `begin_evaluation` after each pass without training.

        It is also called after an exception or an early stop, perhaps on this process only: do not wait for others.
        """

    def on_fresh_start(self, *, retry: bool) -> None:  # noqa: B027 - most layers have nothing to do
        """Called after `prepare` when the run does not resume from a checkpoint.

        Args:
            retry: whether the run looked for a checkpoint and found none. An earlier start of the same run may then
                have been interrupted before its first checkpoint.
        """

    def post_processing(self) -> AbstractContextManager[None]:
        """A block in which parameters and buffers may be changed to values that do not depend on training records.

        A private run refuses other changes between two optimizer steps.
        """
        return nullcontext()

    def schedulers_step(self) -> AbstractContextManager[None]:
        """A block in which the loop steps one of the user's schedulers.

        A private run lists changes of optimizers' options outside such a block in its statement.
        """
        return nullcontext()

    def on_initial_weights(self, origin: WeightsOrigin) -> None:  # noqa: B027 - most layers have nothing to do
        """Called before `prepare` when the module contains weights from another source, such as a checkpoint."""

    def announce_steps(  # noqa: B027 - most layers have nothing to do
        self, steps: int, publish: Callable[[PrivacyStatement], None] | None
    ) -> None:
        """Called before training with the number of planned global steps.

        Args:
            steps: counted from now.
            publish: takes a statement that holds for the planned steps. It is called before the first of them, and
                again before the run spends more than the last statement says. None after the end of the training.
        """

    def on_chosen_stop(self, steps_left: int) -> None:  # noqa: B027 - most layers have nothing to do
        """Called on all processes when code of the run stops the training with `steps_left` planned steps left.

        The code may have read metrics, so the number of steps may depend on them.
        """

    @property
    def sampling(self) -> Sampling | None:
        """The sampling of the training data, if a layer does it itself; known after `prepare`."""
        return None

    @property
    def public_dataset_size(self) -> int | None:
        """The public number of records, with which the run is planned, if a layer hides the true number."""
        return None

    def pop_released(self, window: Window) -> Mapping[str, float]:
        """The means of the layer's `released_metrics` over the steps since the last call for this window, by name.

        A layer that bounds the influence of a record computes them from values with noise, so they may be logged.

        Args:
            window: "interval" for the steps since the last log point, "epoch" for those of the epoch.
        """
        return {}

    def plan_rows(self, work: Workload) -> list[tuple[str, str]]:
        """Rows that a layer adds to the printed plan, as label and value. Called after `prepare`."""
        return []

    def gathered_parts(self, module: nn.Module) -> list[nn.Module] | None:
        """The parts of `module` whose parameters this layer gathers together; None if it shards no parameters."""
        return None

    def random_streams(self, world: World) -> RandomStreams | None:
        """The streams that replace the generators of the process for samples, forward passes and hooks.

        All processes call it together, after `open`. None leaves the generators to the user, whose seeds then apply.
        """
        return None

    @property
    def is_private(self) -> bool:
        """Whether a layer of the stack is `private`."""
        return any(layer.private for layer in self.layers())

    def privacy_statement(self) -> PrivacyStatement:
        """The guarantee for the training records."""
        from trainstack.backends.privacy_statement import no_guarantee

        return no_guarantee(self.spec)

    def bind(self, owner: object) -> None:
        """Reserve the stack for `owner`, because layers keep state of one run, such as a gradient scaler.

        Raises:
            ConfigurationError: another live object owns the stack, or one of its layers overrides a verb that never
                reaches it.
        """
        self._refuse_skipped()
        current = self._owner() if self._owner is not None else None
        if current is not None and current is not owner:
            raise ConfigurationError(
                f"this {self.spec!r} backend object belongs to another Trainer already. Build one for each: "
                f"build_trainer_backend({self.spec!r})."
            )
        self._owner = weakref.ref(owner)

    def _refuse_skipped(self) -> None:  # noqa: B027 - a layer alone skips none
        """Refuse a stack, perhaps made by hand, with a layer that overrides a verb and is never called for it."""

    # --- structure -----------------------------------------------------------------------------------------

    def layers(self) -> Iterator[TrainerBackend]:
        """This layer and those inside it, outermost first."""
        yield self

    @property
    def spec(self) -> str:
        """The backend string that builds this stack."""
        names = [layer.name or type(layer).__name__ for layer in self.layers()]
        if self.slot is Slot.PROCESS:  # the core inside it is implied
            return "-".join(names[:-1] or names)
        return "-".join([names[-1], *names[:-1]])

    def explain(self) -> str:
        """Describe each layer and the path of each verb through the stack, as plain text."""
        layers = list(self.layers())
        lines = [f"{self.spec}: {len(layers)} layer{'s' if len(layers) > 1 else ''}, outermost first", ""]
        width = max(len(layer.name) for layer in layers)
        lines += [f"  {layer.name:<{width}}   {layer.summary}" for layer in layers]
        lines += ["", "path of each verb:", ""]
        verb_width = max(map(len, VERBS))
        lines += [f"  {verb:<{verb_width}}   {self._verb_path(verb) or 'nothing to do'}" for verb in VERBS]
        together = [f"  {layer.name:<{width}}   {layer.collectives}" for layer in layers if layer.collectives]
        lines += ["", "collective operations:", "", *together] if together else []
        lines += ["", f"state in a checkpoint: {', '.join(sorted(self.get_state())) or 'none'}"]
        return "\n".join(lines)

    def _verb_path(self, verb: str) -> str:
        """The layers in which `verb` does something, outermost first, e.g. `"amp > sp"` or `"dp (ends here)"`."""
        way = []
        for layer in self.layers():
            if layer.overrides(verb):
                way.append(layer.name)
            if verb in layer.ends:
                return " > ".join(way) + " (ends here)"
        return " > ".join(way)

    @classmethod
    def overrides(cls, verb: str) -> bool:
        """Whether this layer implements `verb`."""
        return getattr(cls, verb) is not getattr(TrainerBackend, verb)

    # --- state ---------------------------------------------------------------------------------------------

    def get_layer_state(self) -> dict[str, Any] | None:
        """The state of this layer alone that a checkpoint has to keep; None if it has none."""
        return None

    def update_layer_state(self, state: dict[str, Any]) -> None:
        """Restore the state that `get_layer_state` returned."""
        raise ConfigurationError(f"layer {self.name!r} has no state, but got some: {sorted(state)}")

    def get_state(self) -> dict[str, Any]:
        """The state of all layers that have one, keyed by layer name."""
        states: dict[str, Any] = {}
        for layer in self.layers():
            state = layer.get_layer_state()
            if state is not None and (not layer.name or layer.name in states):
                raise ConfigurationError(
                    f"layer {type(layer).__name__} keeps state under the name {layer.name!r}, which is "
                    f"{'taken' if layer.name else 'empty'}. Register it: @register_layer('its-own-token')."
                )
            if state is not None:
                states[layer.name] = state
        return states

    def update_state(self, state: Mapping[str, Any]) -> None:
        """Restore the state that `get_state` returned.

        Raises:
            CheckpointMismatchError: `state` names a layer this stack lacks, or lacks one that this stack needs.
        """
        if "global_step_completed" in state:
            raise CheckpointMismatchError(
                "the state has counters of a PyMarlin backend: global_step_completed. A trainer keeps them, as "
                "trainer.state.global_step and trainer.state.batches; remove them from the state."
            )
        mine = {layer.name: layer for layer in self.layers() if layer.get_layer_state() is not None}
        foreign, missing = sorted(set(state) - set(mine)), sorted(set(mine) - set(state))
        if foreign or missing:
            what = f"has state for {foreign}, which this stack lacks" if foreign else f"has no state for {missing}"
            raise CheckpointMismatchError(
                f"the checkpoint does not fit backend {self.spec!r}: it {what}. Resume with the backend string of the "
                "checkpoint, or start a new run from its weights: resume_mode='weights'."
            )
        for name, layer in mine.items():
            layer.update_layer_state(state[name])

    # --- driving without a Trainer ---------------------------------------------------------------------------

    def init(self, args: TrainerBackendArguments) -> None:
        """Prepare the stack for `train_dl` and `validate_dl`, without a `Trainer`."""
        self._refuse_skipped()
        driver = import_module("trainstack.trainer.run.loop_runner")  # not an import above: trainer/ imports backends/
        self._runner = driver.DataLoaderRunner(self, args)

    def train_dl(self, dataloader: Any, callback: Any) -> Any:
        """Train on every batch of `dataloader` once. Returns the collected outputs of `train_step`.

        Each process passes its part of the data. A global step uses the next batches of all processes.
        """
        return self._require_runner().train(dataloader, callback)

    def validate_dl(self, dataloader: Any) -> Any:
        """Run `val_step` on every batch of `dataloader`. Returns the collected outputs. All processes call it."""
        return self._require_runner().validate(dataloader)

    def get_global_steps_completed(self) -> int:
        """Global steps finished by the trainer, or by `train_dl` since `init`."""
        owner = self._owner() if self._owner is not None else None
        return owner.state.global_step if owner is not None else self._require_runner().global_steps

    def get_batches_completed(self) -> int:
        """Micro-batches finished by the trainer on this process, or by `train_dl` since `init`."""
        owner = self._owner() if self._owner is not None else None
        return owner.state.batches if owner is not None else self._require_runner().batches

    def _require_runner(self) -> LoopRunner:
        if self._runner is None:
            raise ConfigurationError(
                "this backend has nothing to train yet. Call backend.init(TrainerBackendArguments(...)) first, "
                "or give the backend to a Trainer."
            )
        return self._runner


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerBackendArguments:
    """The arguments of `TrainerBackend.init`.

    Args:
        model: a `ModuleInterface`.
        optimizers: over the parameters of `model`.
        schedulers: stepped once after each global step that moved the weights.
        device: `"auto"`, or an argument of `torch.device`.
        gradient_accumulation: batches of the dataloader that make up one global step, on each process.
        max_train_steps_per_epoch: global steps after which `train_dl` stops.
        max_val_steps_per_epoch: batches after which `validate_dl` stops.
        clip_grads: whether to limit the joint L2 norm of the gradients.
        max_grad_norm: the limit of the norm.
    """

    model: nn.Module
    optimizers: Iterable[Optimizer]
    schedulers: Iterable[Any] = ()
    device: str | torch.device = "auto"
    gradient_accumulation: int = 1
    max_train_steps_per_epoch: int | None = None
    max_val_steps_per_epoch: int | None = None
    clip_grads: bool = True
    max_grad_norm: float = 1.0


class LoopRunner(Protocol):
    """Runs the training loop on a stack without a `Trainer`."""

    @property
    def global_steps(self) -> int:
        """Global steps finished."""

    @property
    def batches(self) -> int:
        """Micro-batches finished."""

    def train(self, dataloader: Any, callback: Any) -> Any:
        """One pass of training over `dataloader`."""

    def validate(self, dataloader: Any) -> Any:
        """One pass of validation over `dataloader`."""
