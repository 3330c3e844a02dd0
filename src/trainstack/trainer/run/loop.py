"""`train_steps` runs the global steps of an epoch on a stack.

Zeroing, schedulers, counters, collecting and hooks happen here and nowhere else. Nothing in here reads a value
back from the device, unless non-finite steps are to be skipped, which has to be known before each step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from trainstack.backends import EMPTY, TrainerBackend, Workload
from trainstack.backends.clipping import scale_gradients
from trainstack.backends.fast_paths import has_usual_zero_grad
from trainstack.backends.losses import find_loss
from trainstack.stage import Stage
from trainstack.trainer.core.intervals import NEVER
from trainstack.trainer.core.logs import RunLogger
from trainstack.trainer.core.state import RunState
from trainstack.trainer.data.step_batches import StepBatches
from trainstack.trainer.evaluation.collector import OutputCollector
from trainstack.trainer.events.bus import Fire
from trainstack.trainer.events.event import Event
from trainstack.trainer.events.hooks import Hooks, needs_outputs
from trainstack.trainer.events.loop_events import (
    Bind,
    chain,
    no_subscribers,
    with_batch_events,
    with_events_around,
    with_fetch_events,
)
from trainstack.trainer.reporting.loss_meter import LossMeter
from trainstack.trainer.resume.restoring import load_states
from trainstack.trainer.schedulers.stepping import Schedules


class TrainLoop:
    """What the loop works with.

    Args:
        schedules: what is stepped after a global step that moved the weights, and when.
        state: advanced after each global step.
        skip_nonfinite: leave out steps whose loss or gradient is inf or nan (reads the device in every step). A layer
            that bounds each record's gradient leaves nothing to skip.
        keep_epoch_outputs: collect what `train_step` returns over a whole epoch.
        measures_every_step: whether each step's gradient norm is computed, even where nothing is clipped.
        bind: gives the subscribers of an event; asked once an epoch, so that others cost nothing.

    Attributes:
        meter: gets the losses.
        step_outputs, epoch_outputs: collectors; None where nobody reads them.
        on_due: called once `state.global_step` has reached `next_due_step`, which it sets anew.
        next_due_step: see `on_due`. A signal handler or another thread may call `wake` at any moment, which sets it to
            0.
        next_measured_step: the next global step whose gradient norm is computed even where nothing is clipped; 0 for
            every step.
        failed_in: the micro-batch of its step, from 0, in which an exception was raised; None before, or elsewhere.
    """

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
    ) -> None:
        self.stack, self.work, self.hooks, self.bind = stack, work, hooks, bind
        self.schedules = schedules or Schedules()
        self.state = state or RunState()
        bounded = any(layer.bounds_gradients for layer in stack.layers())
        self.skip_nonfinite = skip_nonfinite and not bounded
        self.may_skip = self.skip_nonfinite or any(layer.may_skip_steps for layer in stack.layers())
        unmeasured = work.clipping.kind == "none" and not (measures_every_step or skip_nonfinite or bounded)
        self.meter = LossMeter(
            stack.read,
            skip_nonfinite=skip_nonfinite,
            per_record_clipped=bounded,
            hide_loss=any(layer.hides_losses for layer in stack.layers()),
            comm=work.world.comm,
            weights=(lambda: _weights(work.module)) if unmeasured else None,
            fast_paths=work.fast_paths,
        )
        self.step_outputs = OutputCollector(device=None) if hooks.step_outputs else None
        self.epoch_outputs = OutputCollector() if keep_epoch_outputs else None
        self.next_measured_step = 0
        self.on_due: Callable[[], None] = lambda: None
        self.next_due_step = NEVER
        self.failed_in: int | None = None

    def wake(self) -> None:
        """Let `on_due` be called after the step under way; threads and signal handlers may call this."""
        self.next_due_step = 0

    def get_state(self) -> dict[str, Any]:
        """Counters, optimizers, schedulers and running means."""
        return {
            **self.state.get_state(),
            "optimizers": [optimizer.state_dict() for optimizer in self.work.optimizers],
            "schedulers": [scheduler.state_dict() for scheduler in self.schedules.schedulers],
            "scheduler_counts": self.schedules.get_counts(),
            "kinds": {
                "optimizers": [type(optimizer).__name__ for optimizer in self.work.optimizers],
                "schedulers": [type(scheduler).__name__ for scheduler in self.schedules.schedulers],
            },
            "meter": self.meter.get_state(),
        }

    def update_state(self, state: Mapping[str, Any], *, fresh_optimizers: bool, log: RunLogger) -> None:
        """Take back what `get_state` returned, optimizers and schedulers only if they are not to be fresh.

        Raises:
            CheckpointMismatchError: optimizers or schedulers are not those of the checkpoint.
        """
        self.state.update_state(state)
        if "meter" in state:
            self.meter.update_state(state["meter"])
        if not fresh_optimizers:
            load_states("optimizer", self.work.optimizers, state["optimizers"], state["kinds"]["optimizers"], log)
            load_states("scheduler", self.schedules.schedulers, state["schedulers"], state["kinds"]["schedulers"], log)
            self.schedules.update_counts(state["scheduler_counts"])


def train_steps(loop: TrainLoop, steps: Iterable[StepBatches]) -> None:
    """Train on `steps`, one global step each.

    Raises:
        ModuleContractError: `train_step` did not return a loss to train on.
    """
    loop.failed_in = None
    if loop.step_outputs is not None:
        loop.step_outputs.reset()
    with loop.work.params.watch():
        _train_steps(loop, steps)


def _train_steps(loop: TrainLoop, steps: Iterable[StepBatches]) -> None:
    stack, state, step_schedulers = loop.stack, loop.state, loop.schedules.step
    work, params, meter = loop.work, loop.work.params, loop.meter
    params.refresh()
    buffers = BufferSnapshot(work.module) if loop.may_skip else None
    clip, read, unmeasured = stack.clip, stack.read, work.without_grad_norm()
    run_micro_batches, after_step = _bind_micro_batches(loop), _bind_end_train_step(loop)
    before_update, after_update, zero_gradients = _bind_update_events(loop)
    _drop_gradients(params.all)
    for step_batches in with_fetch_events(steps, loop.bind):
        if buffers is not None:
            buffers.keep()
        losses = run_micro_batches(step_batches)
        measured = loop.skip_nonfinite or state.global_step + 1 >= loop.next_measured_step
        norm = clip(work if measured else unmeasured)
        if not step_batches.items > 0 or (loop.skip_nonfinite and _is_nonfinite(norm, read)):
            _drop_gradients(params.all)
            stack.skip(work)
            updated = moved = False
        else:
            if before_update is not None:
                before_update(work.optimizers)
            updated, moved = True, stack.step(work)
        # Weights, schedulers and counters change together, before user code runs: a hook may raise.
        if moved:
            step_schedulers()
        elif buffers is not None:
            buffers.restore()
        _advance(state, step_batches, moved)
        meter.add_step(state, step_batches, losses, moved, norm)
        if updated and after_update is not None:
            after_update(work.optimizers)
        zero_gradients()
        if after_step is not None:
            after_step()
        if state.global_step >= loop.next_due_step:
            loop.on_due()


def _bind_micro_batches(loop: TrainLoop) -> Callable[[StepBatches], list[Tensor]]:
    """Forward and backward of a step's micro-batches, with every verb and hook looked up once; returns their losses."""
    stack, work, state = loop.stack, loop.work, loop.state
    accumulate, train = stack.accumulate, Stage.TRAIN
    forward, backward = with_batch_events(stack.forward, stack.backward, loop.bind)
    end_backward = chain(loop.hooks.end_backward, loop.bind(Event.AFTER_BACKWARD), slice(1, None))
    collectors = [c.collect for c in (loop.step_outputs, loop.epoch_outputs) if c is not None]
    must_join, skip = work.gradients_reduced_by is not None, loop.skip_nonfinite

    def run_micro_batches(step_batches: StepBatches) -> list[Tensor]:
        number = state.global_step + 1
        losses: list[Tensor] = []
        state.current_step = number
        position, last = 0, False
        try:
            for batch, weight, last in step_batches.micro_batches:
                with accumulate(work, last):
                    outputs = forward(work, train, batch, number)
                    loss = find_loss(outputs)
                    value = loss.detach().clone()  # a copy: user code and optimizers may write to the loss later
                    if weight or must_join:  # the gradients of all processes meet in the backward pass
                        backward(work, propagate_nonfinite(loss) if skip else loss, weight)
                if batch is EMPTY:
                    continue
                losses.append(value)
                for collect in collectors:
                    collect(outputs)
                if end_backward is not None:
                    end_backward(number, loss)
                position += 1
                del batch, outputs, loss  # the next fetch may reuse their memory, and needs room
        except Exception:
            loop.failed_in = position
            raise
        if not last:  # a loader without length has ended within the step
            with accumulate(work, True):
                pass
        _complete_gradients(work, step_batches.scale)
        return losses

    return run_micro_batches


def _complete_gradients(work: Workload, scale: float) -> None:
    """Make the gradients those of the step, of all parameters that take part in it by now."""
    params = work.params
    params.refresh()
    if scale != 1.0:
        scale_gradients(params.all, scale)
    if params.frozen and work.gradients_reduced_by is not None:  # computed for the reducer, used by nobody
        _drop_gradients(params.frozen.values())


def _bind_update_events(loop: TrainLoop) -> tuple[Fire | None, Fire | None, Callable[[], None]]:
    """What is called before and after the optimizers' step, and the zeroing with the events around it.

    An optimizer with another `zero_grad` than torch's zeroes its parameters itself.
    """
    bind, optimizers, params = loop.bind, loop.work.optimizers, loop.work.params
    public = [one for one in optimizers if not (loop.work.fast_paths and has_usual_zero_grad(one))]

    def zero_gradients() -> None:
        if not public:
            _drop_gradients(params.all)
            return
        for optimizer in public:
            optimizer.zero_grad()
        zeroed = {id(p) for optimizer in public for group in optimizer.param_groups for p in group["params"]}
        _drop_gradients(p for p in params.all if id(p) not in zeroed)

    before, after = bind(Event.BEFORE_OPTIMIZER_STEP), bind(Event.AFTER_OPTIMIZER_STEP)
    zero = with_events_around(zero_gradients, bind(Event.BEFORE_ZERO_GRAD), bind(Event.AFTER_ZERO_GRAD), optimizers)
    return before, after, zero


def _bind_end_train_step(loop: TrainLoop) -> Callable[[], None] | None:
    hook, collector, state = loop.hooks.end_train_step, loop.step_outputs, loop.state
    fire = loop.bind(Event.TRAIN_STEP_END)
    if hook is None and fire is None:
        return None
    insists = hook is not None and needs_outputs(hook)

    def end_train_step() -> None:
        outputs: tuple[Any, ...] | None = ()
        if collector is not None:  # a step may be without samples, on one process or on all
            outputs = None if collector.is_empty and insists else collector.as_arguments
            collector.reset()  # before the hook, which may raise
        if hook is not None and outputs is not None:
            hook(state.global_step, *outputs)
        if fire is not None:
            fire(state.global_step)

    return end_train_step


def _is_nonfinite(norm: Tensor | None, read: Callable[[Sequence[Tensor]], list[float]]) -> bool:
    return norm is not None and not math.isfinite(read([norm])[0])


def _weights(module: nn.Module) -> dict[str, Tensor]:
    return {name: weight for name, weight in module.named_parameters() if weight.requires_grad and weight.numel()}


class BufferSnapshot:
    """The buffers of a module as they were before a step that may have to be left out, such as running statistics."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._kept: list[tuple[Tensor, Tensor]] = []

    def keep(self) -> None:
        """Remember them."""
        self._kept = [(buffer, buffer.clone()) for buffer in self._module.buffers()]

    def restore(self) -> None:
        """Make them what they were."""
        with torch.no_grad():
            for buffer, before in self._kept:
                buffer.copy_(before)


def _advance(state: RunState, step_batches: StepBatches, updated: bool) -> None:
    micro_batches = len(step_batches.weights) if step_batches.counted is None else step_batches.counted
    state.global_step += 1
    state.steps_in_epoch += 1
    state.samples_in_epoch += step_batches.samples
    state.batches += micro_batches
    state.batches_in_epoch += micro_batches
    if not updated:
        state.skipped_steps += 1


def _drop_gradients(parameters: Iterable[nn.Parameter]) -> None:
    for parameter in parameters:
        parameter.grad = None


def propagate_nonfinite(loss: Tensor) -> Tensor:
    """`loss` with a gradient that is nan if `loss` is inf or nan.

    So the norm of the gradients alone, which is the same on every process, tells whether a step is to be skipped.
    """
    return loss * (1.0 + 0.0 * loss.detach())
