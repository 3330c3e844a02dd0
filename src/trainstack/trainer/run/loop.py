"""`train_steps` runs the global steps of an epoch on a stack.

Zeroing, schedulers, counters, collecting and hooks happen here and nowhere else. Nothing in here reads a value from
an accelerator, unless non-finite steps are to be skipped: each step then depends on its loss and gradient.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from torch import Tensor, nn

from trainstack.backends import Borrowed, TrainerBackend, Workload
from trainstack.backends.clipping import scale_gradients
from trainstack.backends.fast_paths import fast_copy, has_usual_zero_grad
from trainstack.backends.losses import find_loss
from trainstack.stage import Stage
from trainstack.trainer.core.intervals import NEVER
from trainstack.trainer.core.logs import RunLogger
from trainstack.trainer.core.module_snapshot import ModuleSnapshot
from trainstack.trainer.core.state import RunState
from trainstack.trainer.data.step_batches import StepBatches
from trainstack.trainer.evaluation.collector import OutputCollector
from trainstack.trainer.events.calling import call_all
from trainstack.trainer.events.event import Event
from trainstack.trainer.events.hooks import Hooks, needs_outputs
from trainstack.trainer.events.loop_events import (
    Bind,
    chain,
    no_subscribers,
    with_batch_events,
    with_fetch_events,
)
from trainstack.trainer.reporting.loss_meter import LossMeter
from trainstack.trainer.resume.optimizer_states import OptimizerStates
from trainstack.trainer.run.borrowed_pass import BorrowedPass, bind_borrowed_pass
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
        inspect_loss: called with the first loss, before its backward pass.
        reused_memory: whether the memory of what a step returns may be written to by the next one: see
            `OutputCollector`.

    Attributes:
        meter: gets the losses.
        optimizer_states: saves and restores optimizers and schedulers.
        step_outputs, epoch_outputs: collectors; None where nobody reads them.
        on_due: called once `state.global_step` has reached `next_due_step`, which it sets anew.
        next_due_step: see `on_due`. A signal handler or another thread may call `wake` at any moment, which sets it to
            0.
        next_measured_step: the next global step whose gradient norm is computed even where nothing is clipped; 0 for
            every step.
        watch_passes: replaces the verbs `forward` and `backward` by what a function makes of them, from the next
            micro-batch of the epoch on; None for the bare verbs.
        has_gradients: whether there may be gradients that no finished step has zeroed.
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
        inspect_loss: Callable[[Tensor], None] | None = None,
        reused_memory: bool = False,
    ) -> None:
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
        self.next_measured_step = 0
        self.has_gradients = True
        self.on_due: Callable[[], None] = lambda: None
        self.next_due_step = NEVER
        self.failed_in: int | None = None
        self.watch_passes: Callable[[Callable[..., tuple[Any, Any]] | None], None] = lambda wrap: None

    def bind_end_backward(self) -> Callable[..., Any] | None:
        """The hook and the subscribers of the end of a backward pass; None for nobody."""
        return chain(self.hooks.end_backward, self.bind(Event.AFTER_BACKWARD), slice(1, None))

    def wake(self) -> None:
        """Let `on_due` be called after the step under way; threads and signal handlers may call this."""
        self.next_due_step = 0

    def get_state(self) -> dict[str, Any]:
        """Counters, optimizers, schedulers and running means."""
        return {**self.state.get_state(), **self.optimizer_states.get_state(), "meter": self.meter.get_state()}

    def update_state(self, state: Mapping[str, Any], *, fresh_optimizers: bool, log: RunLogger) -> None:
        """Take back what `get_state` returned, optimizers and schedulers only if they are not to be fresh.

        Raises:
            CheckpointMismatchError: optimizers or schedulers are not those of the checkpoint.
        """
        self.state.update_state(state)
        if "meter" in state:
            self.meter.update_state(state["meter"])
        if not fresh_optimizers:
            self.optimizer_states.update_state(state, log)


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
    meter, clip, workloads = loop.meter, loop.stack.clip, _workloads(loop.work)
    loop.work.params.refresh()
    buffers = ModuleSnapshot(loop.work.module)
    run_micro_batches, before_update = _bind_micro_batches(loop, buffers), loop.bind(Event.BEFORE_OPTIMIZER_STEP)
    end_update, end_skip = _bind_step_end(loop)
    _drop_foreign_gradients(loop)
    collector = loop.epoch_outputs
    if collector is not None:
        collector.back_to_mark()
    for step_batches in with_fetch_events(steps, loop.bind):
        if loop.may_skip:
            buffers.keep()
        work, unmeasured = workloads[step_batches.uneven]
        losses = run_micro_batches(step_batches, work)
        measured = loop.skip_nonfinite or state.global_step + 1 >= loop.next_measured_step
        norm = clip(work if measured else unmeasured)
        if not step_batches.items > 0 or (loop.skip_nonfinite and _is_nonfinite(loop, step_batches, losses, norm)):
            stack.skip(work)
            moved, end_step = False, end_skip
        else:
            if before_update is not None:
                before_update(work.optimizers)
            moved, end_step = stack.step(work), end_update
        if state.global_step + 1 >= loop.next_measured_step:  # a log point
            meter.keep_rates(state.global_step + 1, work.optimizers)  # before schedulers change them
        # Weights, schedulers and counters change together, before user code runs: a hook may raise.
        if moved:
            step_schedulers()
        elif loop.may_skip or not step_batches.items > 0:
            buffers.restore()
        _advance(state, step_batches, moved)
        if collector is not None:
            collector.mark()
        meter.add_step(state, step_batches, losses, moved, norm)
        end_step()
        loop.has_gradients = False
        if state.global_step >= loop.next_due_step:
            loop.on_due()


def _workloads(work: Workload) -> tuple[tuple[Workload, Workload], tuple[Workload, Workload]]:
    """For even and for uneven steps: `work`, and the same without the norm of the gradients."""
    uneven = replace(work, uneven=True)
    return (work, work.without_grad_norm()), (uneven, uneven.without_grad_norm())


def _borrowed_pass(loop: TrainLoop) -> BorrowedPass:
    collectors = [one for one in (loop.step_outputs, loop.epoch_outputs) if one is not None]
    return bind_borrowed_pass(loop.stack, loop.work, loop.state, collectors, loop.bind_end_backward())


def _drop_foreign_gradients(loop: TrainLoop) -> None:
    """Drop gradients that no step of this epoch has computed.

    Those of before the run and of a step that failed are dropped all. Those of user code between two epochs are dropped
    but for an optimizer with its own `zero_grad`, which may keep some on purpose.
    """
    kept: set[int] = set()
    if not loop.has_gradients:
        own = [one for one in loop.work.optimizers if not has_usual_zero_grad(one)]
        kept = {id(p) for optimizer in own for group in optimizer.param_groups for p in group["params"]}
    _drop_gradients(p for p in loop.work.params.all if id(p) not in kept)


def _bind_micro_batches(
    loop: TrainLoop, buffers: ModuleSnapshot
) -> Callable[[StepBatches, Workload], list[Tensor | float]]:
    """Forward and backward of a step's micro-batches, with every verb and hook looked up once; returns their losses."""
    stack, state, fast = loop.stack, loop.state, loop.work.fast_paths
    accumulate, train, find = stack.accumulate, Stage.TRAIN, _loss_finder(loop)
    is_reduced, run_borrowed = loop.work.gradients_reduced_by is not None, _borrowed_pass(loop)
    backward = propagate_nonfinite(stack.backward) if loop.skip_nonfinite else stack.backward
    forward, backward = with_batch_events(stack.forward, backward, loop.bind)
    plain, observe = (forward, backward), _bind_observers(loop)

    def watch_passes(wrap: Callable[..., tuple[Any, Any]] | None) -> None:
        nonlocal forward, backward
        forward, backward = plain if wrap is None else wrap(*plain)

    loop.watch_passes = watch_passes

    def run_micro_batches(step_batches: StepBatches, work: Workload) -> list[Tensor | float]:
        number, losses = state.global_step + 1, list[Tensor | float]()
        state.current_step, state.micro_batch, last, loop.has_gradients = number, 0, False, True
        try:
            for batch, weight, last in step_batches.micro_batches:
                if type(batch) is Borrowed:
                    run_borrowed(batch, work, last, forward, backward)
                    continue
                _prepare_micro_batch(step_batches, weight, losses, work, buffers)
                with accumulate(work, last):
                    outputs = forward(work, train, batch, number)
                    loss = find(outputs)
                    value = fast_copy(loss, enabled=fast)  # user code and optimizers may write to the loss later
                    if weight or is_reduced:  # the gradients of all ranks are summed there
                        backward(work, loss, weight)
                losses.append(value)
                if observe is not None:
                    observe(outputs, number, loss)
                state.micro_batch += 1
                del batch, outputs, loss  # the next fetch may reuse their memory, and needs room
        except Exception:
            loop.failed_in = state.micro_batch
            raise
        _end_passes(stack, work, last, step_batches.scale)
        return losses

    return run_micro_batches


def _end_passes(stack: TrainerBackend, work: Workload, last: bool, scale: float) -> None:
    """Make the gradients those of the step, of all parameters that take part in it by now."""
    if not last:  # in one process, a loader without length has ended within the step
        with stack.accumulate(work, True):
            pass
    work.world.comm.raise_if_aborted()  # the gradients of this step may not have been summed
    work.params.refresh()
    if scale != 1.0:
        scale_gradients(work.params.all, scale)


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


def _bind_observers(loop: TrainLoop) -> Callable[[Any, int, Tensor], None] | None:
    """What collects outputs, and the hook and the subscribers of the end of a backward pass; None for nothing."""
    end_backward = loop.bind_end_backward()
    collectors = [c.collect for c in (loop.step_outputs, loop.epoch_outputs) if c is not None]
    if not collectors and end_backward is None:
        return None

    def observe(outputs: Any, number: int, loss: Tensor) -> None:
        for collect in collectors:
            collect(outputs)
        if end_backward is not None:
            end_backward(number, loss)

    return observe


def _bind_step_end(loop: TrainLoop) -> tuple[Callable[[], None], Callable[[], None]]:
    """What ends a step in which the optimizers were stepped, and one that was skipped: zeroing, events and hooks."""
    optimizers, after_update = loop.work.optimizers, loop.bind(Event.AFTER_OPTIMIZER_STEP)
    before_zero, after_zero = loop.bind(Event.BEFORE_ZERO_GRAD), loop.bind(Event.AFTER_ZERO_GRAD)
    calls: list[Callable[[], None]] = []
    if before_zero is not None:
        calls.append(partial(before_zero, optimizers))
    calls.append(_bind_zero_gradients(loop.work))
    if after_zero is not None:
        calls.append(partial(after_zero, optimizers))
    calls += _bind_end_train_step(loop)
    updated = [] if after_update is None else [partial(after_update, optimizers)]
    return _in_turn([*updated, *calls]), _in_turn(calls)


def _in_turn(calls: list[Callable[[], None]]) -> Callable[[], None]:
    return calls[0] if len(calls) == 1 else partial(call_all, calls)


def _bind_zero_gradients(work: Workload) -> Callable[[], None]:
    """Drops the gradients of all parameters; an optimizer with another `zero_grad` than torch's zeroes its own."""
    params = work.params
    public = [one for one in work.optimizers if not (work.fast_paths and has_usual_zero_grad(one))]

    def zero_gradients() -> None:
        if not public:
            for parameter in params.all:
                parameter.grad = None
            return
        for optimizer in public:
            optimizer.zero_grad()
        zeroed = {id(p) for optimizer in public for group in optimizer.param_groups for p in group["params"]}
        _drop_gradients(p for p in params.all if id(p) not in zeroed)

    return zero_gradients


def _bind_end_train_step(loop: TrainLoop) -> list[Callable[[], None]]:
    """The hook and the subscribers of the end of a step."""
    hook, collector, state = loop.hooks.end_train_step, loop.step_outputs, loop.state
    fire = loop.bind(Event.TRAIN_STEP_END)
    calls: list[Callable[[], None]] = []
    if hook is not None:
        insists = needs_outputs(hook)

        def call_hook() -> None:
            outputs: tuple[Any, ...] | None = ()
            if collector is not None:  # a step of a private run may be without samples
                outputs = None if collector.is_empty and insists else collector.as_arguments
                collector.reset()  # before the hook, which may raise
            if outputs is not None:
                hook(state.global_step, *outputs)

        calls.append(call_hook)
    if fire is not None:
        calls.append(lambda: fire(state.global_step))
    return calls


def _prepare_micro_batch(
    step_batches: StepBatches, weight: float, losses: Sequence[Any], work: Workload, buffers: ModuleSnapshot
) -> None:
    if not weight and not losses:  # perhaps the step counts nothing, and moves nothing
        buffers.keep()
    if step_batches.rescale != 1.0:
        work.params.refresh()
        scale_gradients(work.params.all, step_batches.rescale)
        step_batches.rescale = 1.0


def _is_nonfinite(
    loop: TrainLoop, step_batches: StepBatches, losses: Sequence[Tensor | float], norm: Tensor | None
) -> bool:
    """Whether the norm is inf or nan or, on one process, a loss is: its gradient may be masked.

    Several processes must agree, and have the norm in common only.
    """
    if norm is None:
        return False
    counted = [loss for loss, weight in zip(losses, step_batches.weights, strict=True) if weight]
    values: Sequence[Tensor | float] = [norm, *counted] if loop.work.world.size == 1 else [norm]
    numbers = [value for value in values if not isinstance(value, Tensor)]
    tensors = [value for value in values if isinstance(value, Tensor)]
    return not all(map(math.isfinite, [*numbers, *loop.stack.read(tensors)]))


def _weights(module: nn.Module) -> dict[str, Tensor]:
    return {name: weight for name, weight in module.named_parameters() if weight.requires_grad and weight.numel()}


def _advance(state: RunState, step_batches: StepBatches, updated: bool) -> None:
    micro_batches = max(1, len(step_batches.weights)) if step_batches.counted is None else step_batches.counted
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


def propagate_nonfinite(backward: Callable[[Workload, Tensor, float], None]) -> Callable[..., None]:
    """`backward` with gradients that are nan if the loss is inf or nan.

    So the norm of the gradients alone, which is the same on every process, tells whether a step is to be skipped.
    """

    def backward_with_check(work: Workload, loss: Tensor, weight: float) -> None:
        factor = 1.0 + 0.0 * loss.detach()
        handle = loss.register_hook(lambda gradient: gradient * factor)  # type: ignore[no-untyped-call]
        try:
            backward(work, loss, weight)
        finally:
            handle.remove()

    return backward_with_check
