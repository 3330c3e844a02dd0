"""`TrainLoop` has the parts and the counters that the global steps of a run use."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from trainstack.backends import TrainerBackend, Workload
from trainstack.trainer.core.intervals import NEVER
from trainstack.trainer.core.logs import RunLogger
from trainstack.trainer.core.several_updates import check_updates
from trainstack.trainer.core.state import RunState
from trainstack.trainer.evaluation.collector import OutputCollector
from trainstack.trainer.events.event import Event
from trainstack.trainer.events.hooks import Hooks
from trainstack.trainer.events.loop_events import Bind, chain, no_subscribers
from trainstack.trainer.reporting.loss_meter import LossMeter
from trainstack.trainer.resume.optimizer_states import OptimizerStates
from trainstack.trainer.run.step_verifier import StepVerifier
from trainstack.trainer.schedulers.stepping import Schedules


class TrainLoop:
    """The parts and counters of the training loop.

    Args:
        stack: the outermost layer of the backend.
        work: the prepared workload of the run.
        hooks: the hooks of the module.
        schedules: the schedulers to step after a global step that moved the weights, and their intervals.
        state: the counters, advanced after each global step.
        skip_nonfinite: skip steps whose loss or gradient is inf or nan. This reads the device in every step. It has no
            effect with a layer that bounds the gradient of each record.
        keep_epoch_outputs: collect the outputs of `train_step` over a whole epoch.
        measures_every_step: compute the gradient norm of each step, even without clipping.
        bind: returns the subscribers of an event. It is called once an epoch, so events without any cost nothing.
        inspect_loss: called with the first loss, before its backward pass.
        reused_memory: whether the next step may write to the memory of the outputs: see `OutputCollector`.

    Attributes:
        meter: receives the losses.
        optimizer_states: saves and restores optimizers and schedulers.
        step_outputs, epoch_outputs: collectors; None if no hook reads them.
        on_due: called when `state.global_step` has reached `next_due_step`. It sets the next `next_due_step`.
        next_due_step: see `on_due`. A signal handler or another thread may call `wake` at any moment, which sets it to
            0.
        next_measured_step: the next global step whose gradient norm is computed even without clipping; 0 for every
            step.
        watch_passes: called with a function that wraps the verbs `forward` and `backward` from the next micro-batch of
            the epoch on; None removes the wrappers.
        makes_updates: whether `StepUpdates` runs the steps.
        asked_for: the positions of the optimizers for which `StepUpdates` has had an update so far.
        on_update: called by `StepUpdates` with the stepped optimizers, before it drops their gradients.
        records_rates: whether the learning rates of each step are kept.
        before_update: called with the optimizers after all subscribers, directly before they step; None for no call.
        after_update: called after each global step, before its gradients are dropped; None for no call.
        is_torn: whether an unfinished step has moved weights.
        has_gradients: whether there may be gradients that no finished step has zeroed.
        verifier: runs some steps twice; None to run each once.
        failed_in: the micro-batch of its step, from 0, in which an exception was raised; None otherwise.
    """

    makes_updates: bool
    is_torn: bool
    failed_in: int | None
    stack: TrainerBackend
    work: Workload
    hooks: Hooks
    bind: Bind
    schedules: Schedules
    optimizer_states: OptimizerStates
    state: RunState
    skip_nonfinite: bool
    may_skip: bool
    meter: LossMeter
    step_outputs: OutputCollector | None
    epoch_outputs: OutputCollector | None
    next_measured_step: int
    next_due_step: int
    inspect_loss: Callable[[Tensor], None] | None
    verifier: StepVerifier | None
    records_rates = False
    before_update: Callable[[tuple[Optimizer, ...]], None] | None = None
    after_update: Callable[[], None] | None = None

    def __init__(
        self,
        stack: TrainerBackend,
        work: Workload,
        hooks: Hooks,
        *,
        schedules: Schedules | None = None,
        state: RunState | None = None,
        skip_nonfinite: bool = False,
        keep_epoch_outputs: bool = False,
        measures_every_step: bool = True,
        bind: Bind = no_subscribers,
        inspect_loss: Callable[[Tensor], None] | None = None,
        reused_memory: bool = False,
    ) -> None:
        self.makes_updates, self.is_torn = check_updates(work, list(stack.layers()), skip_nonfinite), False
        self.stack, self.work, self.hooks, self.bind, self.inspect_loss = stack, work, hooks, bind, inspect_loss
        self.schedules = schedules or Schedules()
        self.schedules.around_step = stack.schedulers_step
        self.optimizer_states = OptimizerStates(work, self.schedules)
        self.state = state or RunState()
        bounded = any(layer.bounds_gradients for layer in stack.layers())
        self.skip_nonfinite = skip_nonfinite and not bounded
        self.may_skip = self.skip_nonfinite or any(layer.may_skip_steps for layer in stack.layers())
        unmeasured = work.clipping.kind == "none" and not (measures_every_step or skip_nonfinite or bounded)
        self.meter = LossMeter(
            stack.read,
            per_record_clipped=bounded,
            hide_loss=any(layer.hides_losses for layer in stack.layers()),
            comm=work.world.comm,
            weights=(lambda: _weights(work.module)) if unmeasured else None,
            fast_paths=work.fast_paths,
        )
        self.step_outputs = OutputCollector(device=None, reused_memory=reused_memory) if hooks.step_outputs else None
        self.epoch_outputs = OutputCollector(reused_memory=reused_memory) if keep_epoch_outputs else None
        self.next_measured_step, self.next_due_step, self.verifier = 0, NEVER, None
        self.has_gradients, self.failed_in, self.asked_for = True, None, set[int]()
        self.on_due: Callable[[], None] = lambda: None
        self.watch_passes: Callable[[Callable[..., tuple[Any, Any]] | None], None] = lambda wrap: None
        self.on_update: Callable[[tuple[Optimizer, ...]], None] = lambda optimizers: None

    def bind_end_backward(self) -> Callable[..., Any] | None:
        """The hook and the subscribers of the end of a backward pass; None without any."""
        return chain(self.hooks.end_backward, self.bind(Event.AFTER_BACKWARD), slice(1, None))

    def bind_before_update(self) -> Callable[..., Any] | None:
        """The subscribers of the moment before optimizers step, and `before_update`; None without any."""
        return chain(self.bind(Event.BEFORE_OPTIMIZER_STEP), self.before_update)

    def wake(self) -> None:
        """Call `on_due` after the current step. Threads and signal handlers may call this."""
        self.next_due_step = 0

    def get_state(self) -> dict[str, Any]:
        """Counters, optimizers, schedulers and running means."""
        return {**self.state.get_state(), **self.optimizer_states.get_state(), "meter": self.meter.get_state()}

    def update_state(self, state: Mapping[str, Any], *, fresh_optimizers: bool, log: RunLogger) -> None:
        """Load the result of `get_state`. With `fresh_optimizers`, optimizers and schedulers are not changed.

        Raises:
            CheckpointMismatchError: the checkpoint has other optimizers or schedulers.
        """
        self.state.update_state(state)
        if "meter" in state:
            self.meter.update_state(state["meter"])
        if not fresh_optimizers:
            self.optimizer_states.update_state(state, log)


def _weights(module: nn.Module) -> dict[str, Tensor]:
    return {name: weight for name, weight in module.named_parameters() if weight.requires_grad and weight.numel()}
