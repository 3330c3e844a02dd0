"""`StepUpdates` runs a global step of several updates: a `train_step` that yields, or an optimizer with a closure.

Each update covers the whole step: all micro-batches of all processes run to their first `yield`, one update uses the
gradient of the whole step, and then the micro-batches continue to the next `yield`. So any split of a batch gives the
same result, as it does with one update.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import LBFGS, Optimizer

from trainstack.backends import Borrowed, Workload
from trainstack.backends.losses import find_loss
from trainstack.errors import ModuleContractError
from trainstack.stage import Stage
from trainstack.trainer.core.borrowing import muted_log, restored_after
from trainstack.trainer.core.module_snapshot import ModuleSnapshot
from trainstack.trainer.core.several_updates import HOW_TO_YIELD, NextPart, PartResult, check_closures, yields_updates
from trainstack.trainer.data.step_batches import StepBatches
from trainstack.trainer.run.train_loop import TrainLoop


class StepResult(NamedTuple):
    """The result of the updates of a step.

    Attributes:
        losses: the loss of each micro-batch that is not borrowed.
        norm: the joint norm of the gradients, 0-dim; None if none was computed.
        moved: whether weights moved.
    """

    losses: list[Tensor | float]
    norm: Tensor | None
    moved: bool


@dataclass(slots=True, eq=False)
class _Pass:
    """A micro-batch of the step.

    Attributes:
        batch: the batch of the loader.
        weight: its share of the step.
        borrowed: whether it has no weight, on a rank with fewer micro-batches than others.
        position: its position in the step on this process, from 0.
        last: whether it is the last one of the step.
        generator: the generator of a `train_step` that yields.
        part: the input of the forward pass that a closure evaluates: a `NextPart`, or the batch.
        outputs: the outputs of the step.
        loss: the sum of the losses of the updates so far.
        update_loss: the loss of the current update.
    """

    batch: Any
    weight: float
    borrowed: bool
    position: int
    last: bool
    generator: Generator[Any, Any, Any] | None = None
    part: Any = None
    outputs: Any = None
    loss: Tensor | float = 0.0
    update_loss: Tensor | float = 0.0


class _Request(NamedTuple):
    """The next update of a micro-batch: a step of the optimizers at these positions, with or without a closure."""

    optimizers: tuple[int, ...]
    closure: bool


class StepUpdates:
    """The updates of the steps of an epoch.

    Args:
        loop: gives the verbs and the counters.
        forward, backward: the verbs, with the events around them.
        end_backward: called with the number of the step and the loss after each backward pass; may be None.
        before_update: called with the optimizers before each update; may be None.
        end_update: called after each update with the optimizers, and whether weights moved. It drops the gradients.
        is_nonfinite: whether to skip an update with these losses and this norm.
    """

    def __init__(
        self,
        loop: TrainLoop,
        forward: Callable[..., Any],
        backward: Callable[..., Any],
        *,
        end_backward: Callable[[int, Tensor], Any] | None,
        before_update: Callable[[tuple[Optimizer, ...]], Any] | None,
        end_update: Callable[[tuple[Optimizer, ...], bool], None],
        is_nonfinite: Callable[[StepBatches, Sequence[Tensor | float], Tensor | None], bool],
    ) -> None:
        self._loop, self._stack, self._plain = loop, loop.stack, (forward, backward)
        self._forward, self._backward = self._plain
        self._end_backward, self._before_update, self._end_update = end_backward, before_update, end_update
        self._is_nonfinite = is_nonfinite
        self._snapshot, self._buffers = ModuleSnapshot(loop.work.module), ModuleSnapshot(loop.work.module)
        self._yields = yields_updates(loop.work.module)
        loop.watch_passes = self._watch_passes

    def _watch_passes(self, wrap: Callable[..., tuple[Any, Any]] | None) -> None:
        self._forward, self._backward = self._plain if wrap is None else wrap(*self._plain)

    def run(self, step: StepBatches, work: Workload) -> StepResult:
        """Make the updates of a step.

        Args:
            step: the micro-batches. All are fetched before the first update.
            work: the workload of the step.

        Raises:
            ModuleContractError: the micro-batches yield different updates, or one yields no loss.
        """
        state = self._loop.state
        state.current_step, self._loop.has_gradients = state.global_step + 1, True
        passes = _hold(step)
        if not step.items > 0:
            self._stack.skip(work)
            return StepResult([0.0 for one in passes if not one.borrowed], None, False)
        norms, moved = list[Tensor](), False
        try:
            if self._yields:
                for one in passes:
                    self._begin(one, work)
            while (request := self._advance(passes, work)) is not None:
                norm, stepped = self._update(passes, step, work, request)
                if stepped or not moved:  # a skipped update counts only if the step has no other
                    norms = [*(norms if moved else ()), *(() if norm is None else (norm,))]
                    for one in passes:
                        one.loss = one.update_loss + (one.loss if moved else 0.0)
                moved |= stepped
                if not self._yields:
                    break
        except Exception:
            self._loop.failed_in = state.micro_batch
            raise
        self._collect(passes)
        norm = None if not norms else norms[0] if len(norms) == 1 else torch.stack(norms).norm()
        return StepResult([one.loss for one in passes if not one.borrowed], norm, moved)

    @contextmanager
    def _within(self, one: _Pass, work: Workload) -> Iterator[Callable[[Any], Any]]:
        """A block for a forward and a backward pass. It gives a function that calls `forward` with a batch or part."""
        state = self._loop.state
        state.micro_batch = one.position
        if not one.borrowed:
            with self._stack.accumulate(work, one.last):
                yield lambda part: self._forward(work, Stage.TRAIN, part, state.current_step)
            return
        with (
            muted_log(work.module, state),
            restored_after(work, state, self._snapshot) as begin,
            self._stack.accumulate(work, one.last),
        ):
            yield lambda part: self._forward(work, Stage.TRAIN, Borrowed(part, begin), state.current_step)

    def _begin(self, one: _Pass, work: Workload) -> None:
        with self._within(one, work) as forward:
            one.generator = forward(one.batch)
        if not isinstance(one.generator, Generator):
            raise ModuleContractError(
                f"train_step is a generator function and returned a {type(one.generator).__name__} through a layer."
            )

    def _advance(self, passes: Sequence[_Pass], work: Workload) -> _Request | None:
        """Run all micro-batches up to their next update, with backward passes; None if all have ended."""
        if self._loop.may_skip:
            self._buffers.keep()
        for one in passes:
            one.update_loss = 0.0
        asked = [self._next(one, work) for one in passes]
        mine = sorted({"" if one is None else f"{one.closure:d} {' '.join(map(str, one.optimizers))}" for one in asked})
        found = sorted(set().union(*work.world.comm.gather(mine, "the updates of a step")))
        if len(found) > 1:
            said = " and ".join(f"optimizers {one[2:]}" if one else "the end of train_step" for one in found)
            raise ModuleContractError(
                f"the micro-batches of global step {self._loop.state.current_step} yielded different updates: {said}. "
                "All micro-batches of a step, on all processes, must yield the same optimizers in the same order."
            )
        return _Request(tuple(map(int, found[0][2:].split())), found[0][0] == "1") if found[0] else None

    def _next(self, one: _Pass, work: Workload) -> _Request | None:
        """Run a micro-batch up to its next update. If it yields a loss, run the backward pass too."""
        everyone = tuple(range(len(self._loop.work.optimizers)))
        if one.generator is None:
            one.part = one.batch
            return _Request(everyone, closure=True)
        with self._within(one, work) as forward:
            result: PartResult = forward(NextPart(partial(_run_part, one.generator)))
            if result.ended:
                one.outputs = result.value
                return None
            loss, optimizers = result.split()
            chosen = everyone if optimizers is None else self._positions(optimizers)
            if callable(loss) and not isinstance(loss, Tensor):
                one.part = NextPart(loss)
                return _Request(chosen, closure=True)
            self._run_backward(one, work, find_loss(loss))
        return _Request(chosen, closure=False)

    def _positions(self, optimizers: Any) -> tuple[int, ...]:
        known = self._loop.work.optimizers
        chosen = tuple(optimizers) if isinstance(optimizers, list | tuple) else (optimizers,)
        found = []
        for one in chosen:
            position = next(
                (i for i, other in enumerate(known) if other is one or (type(one) is int and i == one)), None
            )
            if position is None:
                raise ModuleContractError(
                    f"train_step yielded {one!r} as an optimizer. {HOW_TO_YIELD}; an optimizer is one of the "
                    f"{len(known)} that get_optimizers_schedulers returned, or its position: 0 to {len(known) - 1}."
                )
            found.append(position)
        return tuple(sorted(set(found)))

    def _run_backward(self, one: _Pass, work: Workload, loss: Tensor) -> None:
        if (inspect := self._loop.inspect_loss) is not None and not one.borrowed:
            self._loop.inspect_loss = None
            inspect(loss)
        one.update_loss = loss.detach().clone()  # user code and optimizers may write to the loss later
        if one.weight or work.gradients_reduced_by is not None:  # with reduction all ranks must run the same passes
            self._backward(work, loss, one.weight)
        if self._end_backward is not None:
            self._end_backward(self._loop.state.current_step, loss)

    def _update(
        self, passes: Sequence[_Pass], step: StepBatches, work: Workload, request: _Request
    ) -> tuple[Tensor | None, bool]:
        """Make one update. Returns the joint norm of its gradients, and whether weights moved."""
        self._loop.asked_for.update(request.optimizers)
        optimizers = tuple(self._loop.work.optimizers[position] for position in request.optimizers)
        held = [p for one in optimizers for group in one.param_groups for p in group["params"]]
        work = replace(work, optimizers=optimizers, params=work.params.clipping(held))
        norm: Tensor | None = None
        if request.closure:
            check_closures(type(optimizers[0]).__name__, self._stack.layers(), self._loop.skip_nonfinite)
            closure = _Closure(self, passes, work)
            # LBFGS begins with a call of the closure. Other optimizers may read the gradients before they call it.
            if not all(isinstance(one, LBFGS) for one in optimizers):
                closure()
            work = replace(work, closure=closure)
        else:
            norm = self._sum_and_clip(work)
        losses = [one.update_loss for one in passes if not one.borrowed]
        if self._loop.skip_nonfinite and self._is_nonfinite(step, losses, norm):
            self._stack.skip(work)
            moved = False
        else:
            if self._before_update is not None:
                self._before_update(optimizers)
            moved = self._stack.step(work)
        self._loop.is_torn |= moved  # until the counters are advanced
        self._loop.on_update(optimizers if moved else ())
        if not moved and self._loop.may_skip:
            self._buffers.restore()
        self._end_update(optimizers, moved)
        return norm, moved

    def _sum_and_clip(self, work: Workload) -> Tensor | None:
        work.world.comm.raise_if_aborted()  # the gradients of this step may not have been summed
        self._stack.sum_gradients(work)
        return self._stack.clip(work)

    def evaluate(self, passes: Sequence[_Pass], work: Workload) -> Tensor:
        """The loss of the step at the current weights, 0-dim. Its summed and clipped gradients are in `.grad`."""
        self._loop.on_update(())
        for parameter in work.params.all:
            parameter.grad = None
        total = torch.zeros((), device=work.world.device)
        for one in passes:
            with torch.enable_grad(), self._within(one, work) as forward:
                outputs = forward(one.part)
                if one.generator is None:
                    one.outputs = outputs
                self._run_backward(one, work, find_loss(outputs))
            total = total + one.weight * one.update_loss
        self._sum_and_clip(work)
        if work.world.size > 1:
            total = total.new_tensor(work.world.comm.sum([float(total)], "the loss of a closure")[0])
        return total

    def _collect(self, passes: Sequence[_Pass]) -> None:
        for collector in (self._loop.step_outputs, self._loop.epoch_outputs):
            if collector is None:
                continue
            for one in passes:
                collect = collector.collect_structure if one.borrowed else collector.collect
                collect(one.loss if one.outputs is None else one.outputs)


class _Closure:
    """The closure of an optimizer: it computes the loss and new gradients. The first loss is that of the step."""

    def __init__(self, updates: StepUpdates, passes: Sequence[_Pass], work: Workload) -> None:
        self._updates, self._passes, self._work, self._first = updates, passes, work, True

    def __call__(self) -> Tensor:
        losses = [one.update_loss for one in self._passes]
        total = self._updates.evaluate(self._passes, self._work)
        if not self._first:
            for one, loss in zip(self._passes, losses, strict=True):
                one.update_loss = loss
        self._first = False
        return total


def _run_part(generator: Generator[Any, Any, Any]) -> PartResult:
    """Run up to the next `yield`, or to the end.

    Raises:
        ModuleContractError: the `yield` is in a block that changes a mode of torch. The block would remain open during
            the other micro-batches and the update, and the blocks would not close in reverse order.
    """
    before = _modes()
    try:
        yielded = next(generator)
    except StopIteration as end:
        return PartResult(True, end.value)
    if _modes() != before:
        generator.close()
        raise ModuleContractError(
            "train_step yields within a `with` block that changes the mode of gradients or of autocast, which would "
            "last through the update and other micro-batches. End the block before the `yield`, and open it again "
            "after it; for a whole run in bfloat16 write backend='sp-bf16'."
        )
    return PartResult(False, yielded)


def _modes() -> tuple[Any, ...]:
    """The modes that a `with` block may change: gradients, inference, and autocast on each type of device."""
    accelerator = torch.accelerator.current_accelerator()
    types = ["cpu"] if accelerator is None else ["cpu", accelerator.type]
    casts = [(torch.is_autocast_enabled(one), torch.get_autocast_dtype(one)) for one in types]
    return torch.is_grad_enabled(), torch.is_inference_mode_enabled(), *casts


def _hold(step: StepBatches) -> list[_Pass]:
    """Fetch all micro-batches of a step. Their weights are only known after the last one."""
    fetched = []
    for batch, _, last in step.micro_batches:
        # a loader may reuse the memory of a batch for the next one
        fetched.append(batch if last else copy.deepcopy(batch))
    own = iter(step.weights)
    borrowed = [type(batch) is Borrowed for batch in fetched]
    return [
        _Pass(batch.batch if lent else batch, 0.0 if lent else next(own), lent, position, position == len(fetched) - 1)
        for position, (batch, lent) in enumerate(zip(fetched, borrowed, strict=True))
    ]
