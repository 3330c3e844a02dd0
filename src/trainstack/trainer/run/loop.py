"""`train_steps` runs the global steps of an epoch on a stack.

Zeroing, schedulers, counters, collecting and hooks happen here and nowhere else. This module reads no value from an
accelerator, unless it must skip non-finite steps: each step then depends on its loss and gradient.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from trainstack.backends import Borrowed, TrainerBackend, Workload
from trainstack.backends.clipping import scale_gradients
from trainstack.backends.fast_paths import fast_copy, has_usual_zero_grad
from trainstack.backends.losses import find_loss
from trainstack.errors import ConfigurationError
from trainstack.stage import Stage
from trainstack.trainer.core.module_snapshot import ModuleSnapshot
from trainstack.trainer.core.state import RunState
from trainstack.trainer.data.step_batches import StepBatches
from trainstack.trainer.events.calling import call_all
from trainstack.trainer.events.event import Event
from trainstack.trainer.events.hooks import needs_outputs
from trainstack.trainer.events.loop_events import with_batch_events, with_fetch_events
from trainstack.trainer.reporting.loss_meter import learning_rates
from trainstack.trainer.run.borrowed_pass import BorrowedPass, bind_borrowed_pass
from trainstack.trainer.run.pass_record import PassVerbs
from trainstack.trainer.run.train_loop import TrainLoop
from trainstack.trainer.run.updates import StepUpdates


def train_steps(loop: TrainLoop, steps: Iterable[StepBatches]) -> None:
    """Train on `steps`, one global step each.

    Raises:
        ModuleContractError: `train_step` did not return a loss to train on.
    """
    loop.failed_in = None
    if loop.step_outputs is not None:
        loop.step_outputs.reset()
    if loop.is_torn:
        raise ConfigurationError(
            f"global step {loop.state.global_step + 1} has failed between two of its updates, so the weights belong to "
            "no step. Create a new Trainer, which resumes from the last checkpoint."
        )
    with loop.work.params.watch():
        _train_steps(loop, steps)


def _train_steps(loop: TrainLoop, steps: Iterable[StepBatches]) -> None:
    state, step_schedulers, meter = loop.state, loop.schedules.step, loop.meter
    loop.work.params.refresh()
    buffers = ModuleSnapshot(loop.work.module)
    update = _bind_updates(loop) if loop.makes_updates else _bind_update(loop, buffers)
    _drop_foreign_gradients(loop)
    collector, records, after_update = loop.epoch_outputs, loop.records_rates, loop.after_update
    rates: Sequence[float | Tensor] = ()
    if collector is not None:
        collector.back_to_mark()
    for step_batches in with_fetch_events(steps, loop.bind):
        if loop.may_skip:
            buffers.keep()
        losses, norm, moved, end_step = update(step_batches)
        if state.global_step + 1 >= loop.next_measured_step:  # a log point
            meter.keep_rates(state.global_step + 1, loop.work.optimizers)  # before schedulers change them
        if records:
            rates = learning_rates(loop.work.optimizers)
        # Weights, schedulers and counters change together, before user code runs: a hook may raise.
        if moved:
            step_schedulers()
        elif loop.may_skip or not step_batches.items > 0:
            buffers.restore()
        _advance(state, step_batches, moved)
        loop.is_torn = False
        if collector is not None:
            collector.mark()
        meter.add_step(state, step_batches, losses, moved, norm, rates)
        if after_update is not None:
            after_update()
        end_step()
        loop.has_gradients = False
        if state.global_step >= loop.next_due_step:
            loop.on_due()


Update = Callable[[StepBatches], tuple[list[Tensor | float], Tensor | None, bool, Callable[[], None]]]
"""Trains on a step. Returns the losses of its micro-batches, the norm of its gradients, whether weights have moved, and
the function that ends the step."""


def _bind_update(loop: TrainLoop, buffers: ModuleSnapshot) -> Update:
    """Return the `Update` of a step with one update."""
    stack, state, clip, workloads = loop.stack, loop.state, loop.stack.clip, _workloads(loop.work)
    run_micro_batches, before_update = _bind_micro_batches(loop, buffers), loop.bind_before_update()
    end_update, end_skip = _bind_step_end(loop)

    def update(step_batches: StepBatches) -> tuple[list[Tensor | float], Tensor | None, bool, Callable[[], None]]:
        work, unmeasured = workloads[step_batches.uneven]
        losses = run_micro_batches(step_batches, work)
        measured = loop.skip_nonfinite or state.global_step + 1 >= loop.next_measured_step
        norm = clip(work if measured else unmeasured)
        if not step_batches.items > 0 or (loop.skip_nonfinite and _is_nonfinite(loop, step_batches, losses, norm)):
            stack.skip(work)
            return losses, norm, False, end_skip
        if before_update is not None:
            before_update(work.optimizers)
        return losses, norm, stack.step(work), end_update

    return update


def _bind_updates(loop: TrainLoop) -> Update:
    """Return the `Update` of a step with several updates, or with one that evaluates a closure."""
    backward = propagate_nonfinite(loop.stack.backward) if loop.skip_nonfinite else loop.stack.backward
    forward, backward = with_batch_events(loop.stack.forward, backward, loop.bind)
    after_update, zero = loop.bind(Event.AFTER_OPTIMIZER_STEP), _in_turn(_bind_zeroing(loop))

    def end_update(optimizers: tuple[Optimizer, ...], moved: bool) -> None:
        if moved and after_update is not None:
            after_update(optimizers)
        zero()

    updates = StepUpdates(
        loop,
        forward,
        backward,
        end_backward=loop.bind_end_backward(),
        before_update=loop.bind_before_update(),
        end_update=end_update,
        is_nonfinite=partial(_is_nonfinite, loop),
    )
    end_step = _in_turn(_bind_end_train_step(loop))
    work = replace(loop.work, defers_sum=True, uneven=True)
    return lambda step_batches: (*updates.run(step_batches, work), end_step)


def _workloads(work: Workload) -> tuple[tuple[Workload, Workload], tuple[Workload, Workload]]:
    """For even and for uneven steps: `work`, and a copy that does not compute the norm of the gradients."""
    uneven = replace(work, uneven=True)
    return (work, work.without_grad_norm()), (uneven, uneven.without_grad_norm())


def _borrowed_pass(loop: TrainLoop, verbs: PassVerbs) -> BorrowedPass:
    collectors = [one for one in (loop.step_outputs, loop.epoch_outputs) if one is not None]
    return bind_borrowed_pass(verbs.accumulate, loop.work, loop.state, collectors, loop.bind_end_backward())


def _pass_verbs(loop: TrainLoop) -> PassVerbs:
    """The verbs of a pass. If some steps are run twice, the verbs record their arguments."""
    stack = loop.stack
    backward = propagate_nonfinite(stack.backward) if loop.skip_nonfinite else stack.backward
    verbs = PassVerbs(stack.accumulate, stack.forward, backward, scale_gradients)
    return verbs if loop.verifier is None else loop.verifier.recording(verbs)


def _drop_foreign_gradients(loop: TrainLoop) -> None:
    """Drop gradients that no step of this epoch has computed.

    All gradients from before the run and from a failed step are dropped. Gradients that user code computed between two
    epochs are kept only for an optimizer that overrides `zero_grad`, because it may keep some on purpose.
    """
    kept: set[int] = set()
    if not loop.has_gradients:
        own = [one for one in loop.work.optimizers if not has_usual_zero_grad(one)]
        kept = {id(p) for optimizer in own for group in optimizer.param_groups for p in group["params"]}
    _drop_gradients(p for p in loop.work.params.all if id(p) not in kept)


def _bind_micro_batches(
    loop: TrainLoop, buffers: ModuleSnapshot
) -> Callable[[StepBatches, Workload], list[Tensor | float]]:
    """Return a function that runs forward and backward of a step's micro-batches, and returns their losses.

    Every verb and hook is looked up once, here.
    """
    stack, state, fast = loop.stack, loop.state, loop.work.fast_paths
    verbs = _pass_verbs(loop)
    accumulate, train, find = verbs.accumulate, Stage.TRAIN, _loss_finder(loop)
    is_reduced, run_borrowed = loop.work.gradients_reduced_by is not None, _borrowed_pass(loop, verbs)
    forward, backward = with_batch_events(verbs.forward, verbs.backward, loop.bind)
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
                _prepare_micro_batch(step_batches, weight, losses, work, buffers, verbs)
                with accumulate(work, last):
                    outputs = forward(work, train, batch, number)
                    loss = find(outputs)
                    value = fast_copy(loss, enabled=fast)  # user code and optimizers may write to the loss later
                    # With reduction, weight 0 also needs a backward pass: the other ranks wait for its collectives.
                    if weight or is_reduced:
                        backward(work, loss, weight)
                losses.append(value)
                if observe is not None:
                    observe(outputs, number, loss)
                state.micro_batch += 1
                del batch, outputs, loss  # frees their memory for the next fetch
        except Exception:
            loop.failed_in = state.micro_batch
            raise
        _end_passes(stack, work, last, step_batches.scale)
        return losses

    return run_micro_batches if loop.verifier is None else loop.verifier.verifying(run_micro_batches)


def _end_passes(stack: TrainerBackend, work: Workload, last: bool, scale: float) -> None:
    """Complete the gradients of the step, also those of parameters that were added within it."""
    if not last:  # on one process, a loader without length has ended within the step
        with stack.accumulate(work, True):
            pass
    work.world.comm.raise_if_aborted()  # the gradients of this step may not have been summed
    work.params.refresh()
    if scale != 1.0:
        scale_gradients(work.params.all, scale)


def _loss_finder(loop: TrainLoop) -> Callable[[Any], Tensor]:
    """`find_loss`; if there is a `loop.inspect_loss`, the first loss of the first epoch is passed to it."""
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
    """Return a function that collects outputs and calls the hook and the subscribers of the end of a backward pass.

    None if there is no collector, hook or subscriber.
    """
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
    """Return two functions with zeroing, events and hooks: the first ends a step with an update, the second a skipped
    one."""
    optimizers, after_update = loop.work.optimizers, loop.bind(Event.AFTER_OPTIMIZER_STEP)
    calls = [*_bind_zeroing(loop), *_bind_end_train_step(loop)]
    updated = [] if after_update is None else [partial(after_update, optimizers)]
    return _in_turn([*updated, *calls]), _in_turn(calls)


def _bind_zeroing(loop: TrainLoop) -> list[Callable[[], None]]:
    """The calls that drop the gradients, with their events."""
    optimizers = loop.work.optimizers
    before_zero, after_zero = loop.bind(Event.BEFORE_ZERO_GRAD), loop.bind(Event.AFTER_ZERO_GRAD)
    calls: list[Callable[[], None]] = []
    if before_zero is not None:
        calls.append(partial(before_zero, optimizers))
    calls.append(_bind_zero_gradients(loop.work))
    if after_zero is not None:
        calls.append(partial(after_zero, optimizers))
    return calls


def _in_turn(calls: list[Callable[[], None]]) -> Callable[[], None]:
    return calls[0] if len(calls) == 1 else partial(call_all, calls)


def _bind_zero_gradients(work: Workload) -> Callable[[], None]:
    """Return a function that drops the gradients of all parameters.

    An optimizer that overrides `zero_grad` zeroes the gradients of its parameters.
    """
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
    """The calls of the hook and of the subscribers of the end of a step."""
    hook, collector, state = loop.hooks.end_train_step, loop.step_outputs, loop.state
    fire = loop.bind(Event.TRAIN_STEP_END)
    calls: list[Callable[[], None]] = []
    if hook is not None:
        insists = needs_outputs(hook)

        def call_hook() -> None:
            outputs: tuple[Any, ...] | None = ()
            if collector is not None:  # a step of a private run may be without samples
                outputs = None if collector.is_empty and insists else collector.as_arguments
                collector.reset()  # before the hook, because the hook may raise
            if outputs is not None:
                hook(state.global_step, *outputs)

        calls.append(call_hook)
    if fire is not None:
        calls.append(lambda: fire(state.global_step))
    return calls


def _prepare_micro_batch(
    step_batches: StepBatches,
    weight: float,
    losses: Sequence[Any],
    work: Workload,
    buffers: ModuleSnapshot,
    verbs: PassVerbs,
) -> None:
    if not weight and not losses:  # the whole step may have weight 0: `_train_steps` then restores the buffers
        buffers.keep()
    if step_batches.rescale != 1.0:
        work.params.refresh()
        verbs.scale(work.params.all, step_batches.rescale)
        step_batches.rescale = 1.0


def _is_nonfinite(
    loop: TrainLoop, step_batches: StepBatches, losses: Sequence[Tensor | float], norm: Tensor | None
) -> bool:
    """Whether the norm is inf or nan. On one process, also whether a loss is, because its gradient may be masked.

    Several processes must agree, and only the norm is equal on all of them.
    """
    if norm is None:
        return False
    counted = [loss for loss, weight in zip(losses, step_batches.weights, strict=True) if weight]
    values: Sequence[Tensor | float] = [norm, *counted] if loop.work.world.size == 1 else [norm]
    numbers = [value for value in values if not isinstance(value, Tensor)]
    tensors = [value for value in values if isinstance(value, Tensor)]
    return not all(map(math.isfinite, [*numbers, *loop.stack.read(tensors)]))


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

    The norm of the gradients is equal on every process. With this function it suffices to decide whether to skip a
    step.
    """

    def backward_with_check(work: Workload, loss: Tensor, weight: float) -> None:
        factor = 1.0 + 0.0 * loss.detach()  # 1 for a finite loss, else nan, without a read from the device
        handle = loss.register_hook(lambda gradient: gradient * factor)  # type: ignore[no-untyped-call]
        try:
            backward(work, loss, weight)
        finally:
            handle.remove()

    return backward_with_check
