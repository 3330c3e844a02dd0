"""`train_steps` runs the global steps of an epoch on a stack.

Zeroing, schedulers, counters, collecting and hooks happen here and nowhere else. Nothing in here reads a value
back from the device, unless non-finite steps are to be skipped, which has to be known before each step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from trainstack.backends import EMPTY, TrainerBackend, Workload
from trainstack.backends.losses import find_loss
from trainstack.stage import Stage
from trainstack.trainer.core.intervals import NEVER
from trainstack.trainer.core.logs import RunLogger
from trainstack.trainer.core.state import RunState
from trainstack.trainer.data.step_batches import StepBatches
from trainstack.trainer.evaluation.collector import OutputCollector
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
        measure_every: global steps between those whose gradients' norm is computed even where nothing is clipped.
        bind: gives the subscribers of an event; asked once an epoch, so that others cost nothing.
        copy_losses: keep copies of the losses, for a compiled model that is replayed as a CUDA graph returns the same
            memory in every step.
        inspect_loss: called with the first loss, before its backward pass.

    Attributes:
        meter: gets the losses.
        step_outputs, epoch_outputs: collectors; None where nobody reads them.
        on_due: called once `state.global_step` has reached `next_due_step`, which it sets anew.
        next_due_step: see `on_due`. A signal handler or another thread may call `wake` at any moment, which sets it to
            0.
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
        measure_every: int = 1,
        bind: Bind = no_subscribers,
        copy_losses: bool = False,
        inspect_loss: Callable[[Tensor], None] | None = None,
    ) -> None:
        self.inspect_loss = inspect_loss
        self.bind, self.copy_losses = bind, copy_losses
        self.stack, self.work, self.hooks = stack, work, hooks
        self.schedules = schedules or Schedules()
        self.state = state or RunState()
        bounded = any(layer.bounds_gradients for layer in stack.layers())
        self.skip_nonfinite = skip_nonfinite and not bounded
        unmeasured = work.clipping.kind == "none" and measure_every > 1 and not skip_nonfinite and not bounded
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
        self.measure_every = measure_every
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
    stack, state, step_schedulers = loop.stack, loop.state, loop.schedules.step
    work, loop.failed_in = loop.work, None
    work.params.refresh()
    if loop.step_outputs is not None:
        loop.step_outputs.reset()
    buffers = BufferSnapshot(work.module) if loop.skip_nonfinite else None
    clip, read, parameters, meter = stack.clip, stack.read, work.parameters, loop.meter
    dropped = (
        {} if work.gradients_reduced_by is None else work.params.frozen
    )  # computed for the reducer, used by nobody
    unmeasured, measure_every = work.without_grad_norm(), 1 if loop.skip_nonfinite else loop.measure_every
    run_micro_batches, after_step = _bind_micro_batches(loop), _bind_end_train_step(loop)
    step, drop_gradients = _bind_update(loop)
    _drop_gradients(parameters)
    for step_batches in with_fetch_events(steps, loop.bind):
        if buffers is not None:
            buffers.keep()
        losses = run_micro_batches(step_batches)
        if dropped:
            _drop_gradients(dropped.values())
        norm = clip(unmeasured if (state.global_step + 1) % measure_every else work)
        left_out = not step_batches.items > 0 or (
            loop.skip_nonfinite and norm is not None and not math.isfinite(read([norm])[0])
        )
        if left_out:
            _drop_gradients(parameters)
        moved = step(work) and not left_out
        drop_gradients(parameters)
        if not moved and buffers is not None:
            buffers.restore()
        if moved:
            step_schedulers()
        _advance(state, step_batches, moved)
        meter.add_step(state, step_batches, losses, moved, norm)
        if after_step is not None:
            after_step()
        if state.global_step >= loop.next_due_step:
            loop.on_due()


def _bind_micro_batches(loop: TrainLoop) -> Callable[[StepBatches], list[Tensor]]:
    """Forward and backward of a step's micro-batches, with every verb and hook looked up once; returns their losses."""
    stack, work, state = loop.stack, loop.work, loop.state
    accumulate, train, find = stack.accumulate, Stage.TRAIN, _loss_finder(loop)
    forward, backward = with_batch_events(stack.forward, stack.backward, loop.bind)
    end_backward = chain(loop.hooks.end_backward, loop.bind(Event.AFTER_BACKWARD), slice(1, None))
    collectors = [c.collect for c in (loop.step_outputs, loop.epoch_outputs) if c is not None]
    must_join, skip, copy = work.gradients_reduced_by is not None, loop.skip_nonfinite, loop.copy_losses

    def run_micro_batches(step_batches: StepBatches) -> list[Tensor]:
        number, last, losses = state.global_step + 1, len(step_batches.batches) - 1, []
        state.current_step = number
        position = 0
        try:
            for position, batch in enumerate(step_batches.batches):
                weight, state.micro_batch = step_batches.weights[position], position
                with accumulate(work, position == last):
                    outputs = forward(work, train, batch, number)
                    loss = find(outputs)
                    if weight or must_join:  # the gradients of all processes meet in the backward pass
                        backward(work, propagate_nonfinite(loss) if skip else loss, weight)
                # a leaf, such as a parameter, may be changed in place when the optimizers step
                losses.append(loss.detach().clone() if copy or loss.is_leaf else loss.detach())
                if batch is EMPTY:
                    continue
                for collect in collectors:
                    collect(outputs)
                if end_backward is not None:
                    end_backward(number, loss)
        except Exception:
            loop.failed_in = position
            raise
        return losses

    return run_micro_batches


def _loss_finder(loop: TrainLoop) -> Callable[[Any], Tensor]:
    """`find_loss`; in the first epoch it gives the first loss to `loop.inspect_loss`, if there is one."""
    if loop.inspect_loss is None:
        return find_loss

    def find(outputs: Any) -> Tensor:
        loss = find_loss(outputs)
        if (inspect := loop.inspect_loss) is not None:
            loop.inspect_loss = None
            inspect(loss)
        return loss

    return find


def _bind_update(loop: TrainLoop) -> tuple[Callable[[Workload], bool], Callable[[Iterable[nn.Parameter]], None]]:
    """The optimizers' step and the dropping of gradients, with the events around them."""
    bind, optimizers = loop.bind, loop.work.optimizers
    step = with_events_around(
        loop.stack.step, bind(Event.BEFORE_OPTIMIZER_STEP), bind(Event.AFTER_OPTIMIZER_STEP), optimizers
    )
    drop = with_events_around(_drop_gradients, bind(Event.BEFORE_ZERO_GRAD), bind(Event.AFTER_ZERO_GRAD), optimizers)
    return step, drop


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
            collector.reset()
        if hook is not None and outputs is not None:
            hook(state.global_step, *outputs)
        if fire is not None:
            fire(state.global_step)

    return end_train_step


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
    micro_batches = len(step_batches.batches) if step_batches.counted is None else step_batches.counted
    state.micro_batch = 0
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
