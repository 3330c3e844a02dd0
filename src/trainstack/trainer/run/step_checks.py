"""`StepChecks` looks for mistakes in the first global steps and at the start of each epoch."""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Iterable, Iterator
from collections.abc import Set as AbstractSet
from contextlib import contextmanager, suppress
from itertools import chain, islice
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from trainstack.backends import Borrowed
from trainstack.errors import annotate
from trainstack.trainer.context import RunContext
from trainstack.trainer.data.step_batches import StepBatches
from trainstack.trainer.evaluation.metrics import Metrics
from trainstack.trainer.module_checks import left_out_parameters, shortened
from trainstack.trainer.run.train_loop import TrainLoop

FIRST_STEPS = 2
"""The number of global steps that are watched. A manual call in a training loop occurs in each step."""

_EFFECTS = {
    "backward()": "its gradients are added to those of the returned loss",
    "zero_grad()": "the gradients of earlier micro-batches of the step are lost",
    "backward() or zero_grad()": "the gradients of earlier micro-batches of the step are changed",
    "optimizer.step()": "each call is an additional update",
    "scheduler.step()": "each call moves the schedule forward",
}
"""Calls that the trainer makes, and the effect of an additional one."""
_SECOND_BACKWARD = (
    "the trainer calls backward() on the returned loss, so train_step must not call it. If it does not, the loss "
    "depends on a tensor that an earlier step computed, such as a hidden state: detach that tensor"
)


class StepChecks:
    """Checks that need a running step. They read no value from a device, and their hooks are removed after the steps.

    Args:
        context: the context of the run.
        loop: the loop whose steps are watched.
        metrics: the metrics of the run, which may use items of the batches.
    """

    def __init__(self, context: RunContext, loop: TrainLoop, metrics: Metrics) -> None:
        self._context, self._loop, self._metrics = context, loop, metrics
        self._untrained = _references(left_out_parameters(loop.work.optimizers, context.module))
        self._said = set[str]()
        self._watch: _Watch | None = None

    @contextmanager
    def watching(self, steps: Iterable[StepBatches]) -> Iterator[Iterable[StepBatches]]:
        """A block that trains on `steps`, the steps of an epoch. It gives the iterable to train on instead."""
        self._check_parameters()
        state, steps = self._context.state, iter(steps)
        left, is_whole = FIRST_STEPS - state.global_step, not state.steps_in_epoch
        try:
            yield chain(self._first(islice(steps, left)), steps) if left > 0 else steps
            self._end_step()
            if is_whole:  # a resumed process has not seen the updates of earlier steps
                self._check_updates()
        except Exception as error:
            self._annotate(error)
            raise
        finally:
            self._unplug()

    def _first(self, steps: Iterable[StepBatches]) -> Iterator[StepBatches]:
        self._watch = _Watch(self._loop, self._context, self._check_items)
        for step_batches in steps:
            self._watch.begin_step()
            yield step_batches
            self._end_step()
        self._unplug()

    def _check_items(self, batch: Any) -> None:
        """Warn of unused items of a batch, the first batch of the run."""
        if "items" in self._said:  # the run continues after an exception
            return
        self._said.add("items")
        message = self._context.module._unused_items(batch, self._metrics.updates())
        if message is not None:
            self._context.log.warning(message)

    def _end_step(self) -> None:
        """Warn of the mistakes in the finished step. Does nothing for steps that are not watched."""
        watch, log = self._watch, self._context.log
        if watch is None or not watch.is_within:
            return
        if not self._loop.asked_for:
            self._check_updates()
        seen = watch.end_step()
        if seen & {"backward()", "zero_grad()"}:
            seen.discard("backward() or zero_grad()")
        found = [name for name in _EFFECTS if name in seen and name not in self._said]
        self._said.update(found)
        if found:
            log.warning(
                f"train_step or a hook called {' and '.join(found)} itself in global step {watch.step}. The trainer "
                f"calls backward(), step() and zero_grad(): {'; '.join(_EFFECTS[name] for name in found)}. Remove the "
                "calls, unless the step updates a part of the model on purpose."
            )
        missed = watch.without_gradient
        if missed and "gradients" not in self._said:
            names = shortened(missed, 8)
            log.warning(
                f"{len(missed)} trainable parameter{'s' if len(missed) > 1 else ''} received no gradient in the first "
                f"step: {names}. A part that runs under torch.no_grad(), is detached or is not used does not train."
            )
        if missed is not None:
            self._said.add("gradients")

    def _check_updates(self) -> None:
        """Warn of optimizers that `train_step` has not yielded so far."""
        loop = self._loop
        left = [f"{i} ({type(one).__name__})" for i, one in enumerate(loop.work.optimizers) if i not in loop.asked_for]
        if loop.makes_updates and left and "updates" not in self._said:
            self._said.add("updates")
            self._context.log.warning(
                f"train_step has not yielded {'optimizers' if len(left) > 1 else 'optimizer'} {', '.join(left)} by "
                f"global step {self._context.state.global_step}, so no update has changed its parameters. Write "
                "`yield loss, position` with its position."
            )

    def _unplug(self) -> None:
        watch, self._watch = self._watch, None
        if watch is not None:
            watch.close()

    def _check_parameters(self) -> None:
        """Warn of parameters that were added since the last epoch and are in no optimizer."""
        module = self._context.module
        left_out = left_out_parameters(self._loop.work.optimizers, module)
        new = [name for name, p in left_out.items() if not _refers(self._untrained.get(id(p)), p)]
        if new:
            self._untrained = _references(left_out)
            self._context.log.warning(
                f"{len(new)} trainable parameters of {type(module).__name__} are in no optimizer and will not change: "
                f"{shortened(new)}. They were added or unfrozen during training: call optimizer.add_param_group."
            )

    def _annotate(self, error: Exception) -> None:
        if "backward through the graph a second time" in str(error):
            annotate(error, _SECOND_BACKWARD)
        if "Tried to step" in str(error) and self._loop.schedules.steps_by_hand():  # OneCycleLR past its end
            annotate(error, "the trainer steps the scheduler, and other code has called its step() as well")
        optimizer = None if self._watch is None else self._watch.stepping
        if optimizer is None or type(optimizer).__module__.startswith("torch.optim"):
            return
        with suppress(TypeError, ValueError):
            if "closure" in inspect.signature(type(optimizer).step).parameters:
                annotate(
                    error,
                    f"{type(optimizer).__name__}.step() was called without a closure. If it needs one, let train_step "
                    "yield a function instead of the loss: `yield lambda: compute_loss(batch)`",
                )


def _references(parameters: dict[str, nn.Parameter]) -> dict[int, weakref.ref[nn.Parameter]]:
    return {id(p): weakref.ref(p) for p in parameters.values()}


def _refers(reference: weakref.ref[nn.Parameter] | None, parameter: nn.Parameter) -> bool:
    return reference is not None and reference() is parameter


def _is_replaced(optimizer: Optimizer) -> bool:
    """Whether `step` is replaced in the instance, such as by a compiled function, which hooks would recompile.

    torch's schedulers also replace it, by a function that they mark.
    """
    step = vars(optimizer).get("step")
    return step is not None and not hasattr(step, "_wrapped_by_lr_sched")  # private, checked on torch 2.13.0


def _place_and_version(gradient: Tensor) -> tuple[int, int]:
    # torch 2.13.0: the private `_version` counts writes in place; no public API does.
    return gradient.data_ptr() if gradient.layout is torch.strided else -1, gradient._version


def _is_written(before: tuple[int, int] | None, now: tuple[int, int]) -> bool:
    return before is not None and before[0] == now[0] and before[1] != now[1]


class _Watch:
    """Detects the calls within the first global steps by the state of gradients, optimizers and schedulers.

    Attributes:
        step: the current global step, or the last one.
        is_within: whether a step has begun and not ended.
        stepping: the optimizer whose `step` is running, or has raised.
        without_gradient: the names of optimized parameters without a gradient at the first update; None before it.
    """

    def __init__(self, loop: TrainLoop, context: RunContext, on_first_batch: Callable[[Any], None]) -> None:
        self._loop, self._context = loop, context
        self._on_batch = None if context.state.global_step else on_first_batch
        self._names = {id(p): name for name, p in context.module.named_parameters()}
        self.step, self.is_within = 0, False
        self.without_gradient: list[str] | None = None
        self._depth = 0
        self._forget()
        self._handles: list[Any] = []
        for optimizer in loop.work.optimizers:
            if _is_replaced(optimizer):
                continue
            with suppress(AttributeError):  # a class that does not call `Optimizer.__init__` has no hooks
                self._handles.append(optimizer.register_step_pre_hook(self._before_step))
                self._handles.append(optimizer.register_step_post_hook(self._after_step))
        # a layer that ends `backward` computes gradients in `forward`
        ends_backward = any("backward" in layer.ends for layer in loop.stack.layers())
        self._sees_gradients = not ends_backward
        loop.watch_passes(self._watched)
        loop.on_update = self._update

    def close(self) -> None:
        """Remove all hooks and wrappers."""
        for handle in self._handles:
            handle.remove()
        self._loop.watch_passes(None)
        self._loop.on_update = lambda optimizers: None

    def begin_step(self) -> None:
        """Note the beginning of the next step."""
        self.step, self.is_within = self._context.state.global_step + 1, True
        self._forget()

    def _forget(self) -> None:
        self._seen, self._with_gradient = set[str](), set[int]()
        self._calls, self._made = dict[int, int](), dict[int, int]()
        self._held: AbstractSet[int] = frozenset()
        self._skipped = self._context.state.skipped_steps
        self.stepping: Optimizer | None = None

    def end_step(self) -> set[str]:
        """Note the end of the step and its hooks. Returns the keys of `_EFFECTS` whose calls they made."""
        self.is_within = False
        moved = self._context.state.skipped_steps == self._skipped and self._context.state.global_step == self.step
        if any(count > self._made.get(key, 1) for key, count in self._calls.items()):
            self._seen.add("optimizer.step()")
        if self._loop.schedules.steps_by_hand():
            self._seen.add("scheduler.step()")
        whole = bool(self._made) or len(self._calls) == len(self._loop.work.optimizers)
        if moved and self.without_gradient is None and whole:
            self.without_gradient = self._missed()
        return self._seen

    def _update(self, optimizers: tuple[Optimizer, ...]) -> None:
        """Note an update by `optimizers` in a step of several updates. Their gradients are dropped after this call."""
        for optimizer in optimizers:
            self._made[id(optimizer)] = self._made.get(id(optimizer), 0) + 1
            held = (p for group in optimizer.param_groups for p in group["params"])
            self._with_gradient.update(id(p) for p in held if p.grad is not None)
        self._held = frozenset()

    def _missed(self) -> list[str]:
        # torch 2.13.0: no public API shows the hooks by which an optimizer steps in the backward pass.
        work = self._loop.work
        stepped = [one for one in work.optimizers if not self._made or id(one) in self._made]
        held = {id(p) for one in stepped for group in one.param_groups for p in group["params"]}
        return [
            self._names[id(p)]
            for p in work.optimized_params
            if p.requires_grad
            and id(p) in held
            and id(p) not in self._with_gradient
            and id(p) in self._names
            and not getattr(p, "_post_accumulate_grad_hooks", None)
        ]

    def _watched(self, forward: Callable[..., Any], backward: Callable[..., Any]) -> tuple[Any, Any]:
        def watched_forward(work: Any, stage: Any, batch: Any, step: int) -> Any:
            if self._on_batch is not None and type(batch) is not Borrowed:
                self._on_batch(batch)
                self._on_batch = None
            if not self._sees_gradients:
                return forward(work, stage, batch, step)
            before = self._gradients()
            self._compare(self._held, before.keys())  # shows calls in the hooks since the last backward pass
            outputs = forward(work, stage, batch, step)
            after = self._gradients()
            self._compare(before.keys(), after.keys())
            if any(_is_written(before.get(key), now) for key, now in after.items()):
                self._seen.add("backward() or zero_grad()")  # the versions do not show which
            self._held = after.keys()
            return outputs

        def watched_backward(*given: Any) -> None:
            backward(*given)
            self._held = self._gradients().keys()

        return watched_forward, watched_backward

    def _compare(self, held: AbstractSet[int], found: AbstractSet[int]) -> None:
        """Note gradients that were added or removed."""
        if held - found:
            self._seen.add("zero_grad()")
        if found - held:
            self._seen.add("backward()")

    def _gradients(self) -> dict[int, tuple[int, int]]:
        """The address of each gradient and the number of writes to it, by the `id` of the parameter.

        `ddp` moves gradients to other memory when it wraps the module again.
        """
        params = self._loop.work.params
        found = {id(p): _place_and_version(p.grad) for p in (*params.all, *params.optimized) if p.grad is not None}
        if not self._loop.makes_updates:  # with several updates, `_update` notes the gradients of the stepped optimizer
            self._with_gradient.update(found)
        return found

    def _before_step(self, optimizer: Optimizer, *given: Any) -> None:
        if self.stepping is optimizer:  # its `step` calls that of the base class
            self._depth += 1
            return
        self.stepping, self._depth = optimizer, 0
        if self.is_within:
            self._calls[id(optimizer)] = self._calls.get(id(optimizer), 0) + 1
            self._gradients()

    def _after_step(self, optimizer: Optimizer, *given: Any) -> None:
        if self._depth:
            self._depth -= 1
        else:
            self.stepping = None
