"""`TrainerBackend`, the contract of a layer.

A stack is read from outside inwards: the loop holds the outermost layer and calls its verbs; each layer does
its part and passes the call on to the next. `SingleProcess` is the innermost of every stack.
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
    """The places of a stack, outermost first. One layer a slot."""

    PROCESS = 0
    PRIVACY = 1
    PRECISION = 2
    USER = 3


Window = Literal["interval", "epoch"]
"""The steps since the last log point, or those of the epoch."""


class TrainerBackend(ABC):
    """One layer of a stack, and, as the outermost one, the whole stack.

    Attributes:
        name: the token of the layer in a backend string; also the key of its state in a checkpoint.
        summary: what the layer does, in one sentence, for `explain`.
        collectives: what the layer makes all processes do together, and how often; for `explain`.
        excludes: tokens that may not stand in the same stack, each with the reason.
        ends: the verbs that the layer never passes on to the layers inside it; `explain` prints it, and the contract
            tests compare it with the calls that happen. A stack is refused if a layer inside overrides one of them.
        may_be_skipped: verbs that the layer overrides, and that another layer may end before the call reaches it.
        slot: where the layer goes in a stack; set by `register_layer`, as `name` is.
        private: whether the layer bounds what training reveals of a record.
        bounds_gradients: whether the layer bounds the gradient of each record. A loss of inf or nan then has no
            influence: it neither stops a run nor skips a step.
        may_skip_steps: whether `step` may leave the weights as they are, as a gradient scaler does. The loop then keeps
            the buffers of the module for such a step.
        hides_losses: whether training losses must not be logged.
        hides_records: whether hooks and subscribers of events get no batch, no output and no loss of training.
        hides_losses: whether values that are computed from training data without noise, such as training losses, must
            not be recorded.
        public_validation: of a private layer: whether validation and test data are declared public.
        released_metrics: the names of the metrics that the layer releases with noise; see `pop_released`.
        joins_processes: whether the layer lets several processes train together.
        autocast_dtype: the dtype to which the layer autocasts the forward pass; None where it does not.
        evaluates_together: whether all ranks have to make the same forward passes in an evaluation too, since each of
            them gathers sharded parameters.
        reduces_each_pass: of a layer that divides parameters: whether gradients are divided after each backward pass,
            and not at the end of a step alone.
        replicas: of a layer that divides parameters: how many copies of them all ranks have together.
        units: the parts of the module that the user has named for the layer to work on one at a time; see `find_units`.
        standalone: of the innermost layer: whether no layer around it joins processes.
        configured_by: the classes of the fields of `TrainerArguments` that configure the layer, each with the parameter
            of the constructor that takes the field.
        rank_zero_state: keys of the layer's state that rank 0 alone has, or has in its own way.
        refuses_updates: why a step cannot make several updates in a stack with this layer; empty where it can.
        refuses_closures: why an optimizer cannot evaluate a closure in a stack with this layer; empty where it can.
        refuses_replay: why the passes of a step cannot be run a second time in a stack with this layer; empty where
            they can.
        prepares_again: whether `prepare` may be called a second time, with the optimizers of a training, after an
            evaluation for which it was called without any. Without it an evaluation before training prepares the
            training as well, so that it needs training data and optimizers.
        requires_state: refuse to go on from a checkpoint without the state of this layer, such as a privacy
            accountant's.
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
        """Of a private layer: whether `train_step` has set attributes, which may have values of records."""
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
        """Take this process's place in the world and pick its device."""

    @abstractmethod
    def place(self, module: nn.Module, world: World) -> None:
        """Move the module to where it is trained; called once, before its optimizers are made."""

    @abstractmethod
    def prepare(self, work: Workload) -> Workload:
        """Wrap or convert what is trained; called once, after `place` and before optimizer states are restored.

        It is called a second time where `prepares_again` allows that and training follows an evaluation.
        """

    @abstractmethod
    def accumulate(self, work: Workload, last: bool) -> AbstractContextManager[Any]:
        """The context around forward AND backward of one micro-batch; `last` ends the global step."""

    @abstractmethod
    def forward(self, work: Workload, stage: Stage, batch: Any, step: int) -> Any:
        """Run the module on one micro-batch and return what its step method returned."""

    @abstractmethod
    def backward(self, work: Workload, loss: Tensor, weight: float) -> None:
        """Add the gradient of `weight * loss` to `.grad`.

        Args:
            work: what is trained.
            loss: 0-dim, attached to its graph, not scaled.
            weight: this micro-batch's share of the global step; the shares of one step sum to one.
        """

    @abstractmethod
    def clip(self, work: Workload) -> Tensor | None:
        """Limit the gradients; return their joint L2 norm before that (0-dim, on the device, unread) or None."""

    @abstractmethod
    def step(self, work: Workload) -> bool:
        """Let the optimizers move the weights; False if nothing was moved."""

    @abstractmethod
    def gather(self, outputs: Any) -> Any:
        """Bring collected outputs together from all processes, in dataset order."""

    @abstractmethod
    def read(self, tensors: Sequence[Tensor]) -> list[float]:
        """The values of 0-dim tensors, on one device or several, for the host.

        The loop reads losses, norms and checks of parameters by this verb only, many at once: the host waits for the
        device here.
        """

    @abstractmethod
    def close(self) -> None:
        """Give back what `open` took. May be called twice."""

    def sum_gradients(self, work: Workload) -> None:  # noqa: B027 - most layers have nothing to do
        """Sum the gradients over all processes; all call it, after the passes of an update with `work.defers_sum`."""

    def skip(self, work: Workload) -> None:  # noqa: B027 - most layers have nothing to do
        """Called in place of `step` for a global step that moves nothing; its gradients are zeroed afterwards."""

    def begin_evaluation(self, work: Workload) -> None:  # noqa: B027 - most layers have nothing to do
        """Make what is evaluated the same on all processes, before each pass without training; all call it."""

    def end_evaluation(self, work: Workload) -> None:  # noqa: B027 - most layers have nothing to do
        """Undo what `begin_evaluation` did, after each pass without training.

        Called also where the pass raised or was stopped early, perhaps on this process alone: do not wait for others.
        """

    def on_fresh_start(self, *, retry: bool) -> None:  # noqa: B027 - most layers have nothing to do
        """Called after `prepare` when the run does not resume from a checkpoint.

        Args:
            retry: one was looked for in vain, so this may be another start of a run that was interrupted early.
        """

    def post_processing(self) -> AbstractContextManager[None]:
        """A block in which parameters and buffers may be changed, by values that do not depend on training records.

        A private run refuses other changes between two optimizer steps.
        """
        return nullcontext()

    def schedulers_step(self) -> AbstractContextManager[None]:
        """A block in which the loop steps a scheduler of the user's.

        A private run names other changes of optimizers' options in its statement.
        """
        return nullcontext()

    def on_initial_weights(self, origin: WeightsOrigin) -> None:  # noqa: B027 - most layers have nothing to do
        """Called before `prepare` when the module was given weights from elsewhere, which are in it already."""

    def announce_steps(  # noqa: B027 - most layers have nothing to do
        self, steps: int, publish: Callable[[PrivacyStatement], None] | None
    ) -> None:
        """Called before training: so many global steps are planned.

        Args:
            steps: from now on.
            publish: takes a statement that holds until they are made; called now, and again before more is spent than
                the last one says. None when the training is over.
        """

    def on_chosen_stop(self, steps_left: int) -> None:  # noqa: B027 - most layers have nothing to do
        """Called on all processes when code of the run has stopped the training, with so many planned steps left.

        The code may have read metrics, so the number of steps may depend on them.
        """

    @property
    def sampling(self) -> Sampling | None:
        """How the training data is drawn, if a layer does that itself; known once `prepare` was called."""
        return None

    @property
    def public_dataset_size(self) -> int | None:
        """How many records the run is planned for and tells of, where a layer keeps the true number back."""
        return None

    def pop_released(self, window: Window) -> Mapping[str, float]:
        """The means of the layer's `released_metrics` over the steps since the last call for this window, by name.

        A layer that bounds the influence of a record computes them from values with noise. They may be logged.

        Args:
            window: "interval" for the steps since the last log point, "epoch" for those of the epoch.
        """
        return {}

    def plan_rows(self, work: Workload) -> list[tuple[str, str]]:
        """Rows that a layer adds to the printed plan, as label and value; asked once `prepare` was called."""
        return []

    def gathered_parts(self, module: nn.Module) -> list[nn.Module] | None:
        """The parts of `module` whose parameters this layer gathers together; None if it divides no parameters."""
        return None

    def random_streams(self, world: World) -> RandomStreams | None:
        """Where samples, forward passes and hooks get their random numbers from, in place of the process's generators.

        All processes call it together, after `open`. None leaves the generators to the user, whose seeds then count.
        """
        return None

    @property
    def is_private(self) -> bool:
        """Whether a layer of the stack bounds what training reveals of a record."""
        return any(layer.private for layer in self.layers())

    def privacy_statement(self) -> PrivacyStatement:
        """The guarantee for the training records."""
        from trainstack.backends.privacy_statement import no_guarantee

        return no_guarantee(self.spec)

    def bind(self, owner: object) -> None:
        """Belong to `owner`, for layers keep what belongs to one run, such as a gradient scaler.

        Raises:
            ConfigurationError: the stack belongs to somebody else who is still there, or one of its layers would never
                be called for a verb that it overrides.
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
        """Refuse a stack, perhaps one made by hand, in which a layer is not called for a verb that it overrides."""

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
        """What each layer does, and each verb's way through the stack."""
        layers = list(self.layers())
        lines = [f"{self.spec}: {len(layers)} layer{'s' if len(layers) > 1 else ''}, outermost first", ""]
        width = max(len(layer.name) for layer in layers)
        lines += [f"  {layer.name:<{width}}   {layer.summary}" for layer in layers]
        lines += ["", "each verb's way:", ""]
        verb_width = max(map(len, VERBS))
        lines += [f"  {verb:<{verb_width}}   {self._verb_path(verb) or 'nothing to do'}" for verb in VERBS]
        together = [f"  {layer.name:<{width}}   {layer.collectives}" for layer in layers if layer.collectives]
        lines += ["", "what all processes do together:", "", *together] if together else []
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
        """Whether this layer has code of its own for `verb`."""
        return getattr(cls, verb) is not getattr(TrainerBackend, verb)

    # --- state ---------------------------------------------------------------------------------------------

    def get_layer_state(self) -> dict[str, Any] | None:
        """What this one layer must remember over a restart; None if nothing."""
        return None

    def update_layer_state(self, state: dict[str, Any]) -> None:
        """Take back what `get_layer_state` returned."""
        raise ConfigurationError(f"layer {self.name!r} keeps no state, but was given some: {sorted(state)}")

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
        """Take back what `get_state` returned.

        Raises:
            CheckpointMismatchError: `state` names a layer this stack lacks, or lacks one that this stack needs.
        """
        if "global_step_completed" in state:
            raise CheckpointMismatchError(
                "the state has counters of a PyMarlin backend: global_step_completed. A trainer keeps them, as "
                "trainer.state.global_step and trainer.state.batches; remove them."
            )
        mine = {layer.name: layer for layer in self.layers() if layer.get_layer_state() is not None}
        foreign, missing = sorted(set(state) - set(mine)), sorted(set(mine) - set(state))
        if foreign or missing:
            what = f"has state for {foreign}, which this stack lacks" if foreign else f"has no state for {missing}"
            raise CheckpointMismatchError(
                f"the checkpoint does not fit backend {self.spec!r}: it {what}. Resume with the backend string it "
                "was written under, or start a new run from its weights: resume_mode='weights'."
            )
        for name, layer in mine.items():
            layer.update_layer_state(state[name])

    # --- driving without a Trainer ---------------------------------------------------------------------------

    def init(self, args: TrainerBackendArguments) -> None:
        """Make the stack ready for `train_dl` and `validate_dl`, without a `Trainer`."""
        self._refuse_skipped()
        driver = import_module("trainstack.trainer.run.loop_runner")  # by its name: imports go the other way
        self._runner = driver.DataLoaderRunner(self, args)

    def train_dl(self, dataloader: Any, callback: Any) -> Any:
        """Train on every batch of `dataloader` once; returns the collected outputs of `train_step`.

        On many processes each gives batches of its own; a global step is over the next ones of all of them.
        """
        return self._require_runner().train(dataloader, callback)

    def validate_dl(self, dataloader: Any) -> Any:
        """Run `val_step` on every batch of `dataloader`; returns the collected outputs. All processes call it."""
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
    """What `TrainerBackend.init` is given.

    Args:
        model: a `ModuleInterface`.
        optimizers: over the parameters of `model`.
        schedulers: stepped once after each global step that moved the weights.
        device: `"auto"`, or what `torch.device` understands.
        gradient_accumulation: batches of the dataloader that make up one global step, on each process.
        max_train_steps_per_epoch: global steps after which `train_dl` stops.
        max_val_steps_per_epoch: batches after which `validate_dl` stops.
        clip_grads: limit the joint L2 norm of the gradients.
        max_grad_norm: to what.
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
    """What stands above a stack and calls its verbs."""

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
