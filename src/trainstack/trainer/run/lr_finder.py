"""`try_rates` finds a learning rate by a short training with a growing rate."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import count

import torch
from torch.optim import Optimizer

from trainstack.backends import Workload
from trainstack.errors import ConfigurationError, NonFiniteError
from trainstack.trainer.context import RunContext
from trainstack.trainer.core.modes import Modes, begin_modes
from trainstack.trainer.core.order import mix
from trainstack.trainer.core.state import RunState
from trainstack.trainer.data.step_batches import StepBatches
from trainstack.trainer.data.training_data import TrainingData
from trainstack.trainer.events.hooks import Hooks
from trainstack.trainer.reporting.loss_meter import MAX_SKIPPED_IN_A_ROW
from trainstack.trainer.run.loop import train_steps
from trainstack.trainer.run.train_loop import TrainLoop
from trainstack.trainer.run.trial import restore_after

DIVERGED = 4.0
"""The search ends when the running mean of the loss exceeds its minimum by this factor. fastai uses the same factor."""
SMOOTHING, SETTLED = 0.9, 10
"""The factor of the running mean of the loss, and the number of steps before the mean is used, 1 / (1 - 0.9)."""


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class LRFinderResult:
    """The result of `find_lr`.

    Attributes:
        rates: learning rates, one for each global step that moved the weights.
        losses: the losses of these steps.
    """

    rates: tuple[float, ...]
    losses: tuple[float, ...]

    def __repr__(self) -> str:
        """The suggestion, and the range of the rates."""
        tried = f"{self.rates[0]:.3g} to {self.rates[-1]:.3g}" if self.rates else "none"
        return f"LRFinderResult(suggestion={self.suggestion}, {len(self.rates)} rates: {tried})"

    @property
    def suggestion(self) -> float | None:
        """The rate at which the loss decreases fastest over the logarithm of the rate; None if it never decreases.

        Each slope is that of a least-squares line through a quarter of the losses.
        """
        half = max(1, len(self.losses) // 8)  # an eighth on both sides is a quarter
        places = range(-half, half + 1)
        slopes = {
            rate: sum(place * self.losses[middle + place] for place in places)
            for middle, rate in enumerate(self.rates)
            if half <= middle < len(self.rates) - half
        }
        steepest = min(slopes, key=slopes.__getitem__, default=None)
        return steepest if steepest is not None and slopes[steepest] < 0 else None


def try_rates(
    context: RunContext, data: TrainingData, work: Workload, modes: Modes, start: float, end: float, steps: int
) -> LRFinderResult:
    """Run the search of `find_lr`. All processes call this together. The module trains in `modes`."""
    problem = data.training_set.problem
    if context.busy:
        problem = "training is running"
    elif context.stack.is_private:
        problem = "the run is private, and the search would spend privacy budget"
    if problem is not None:
        raise ConfigurationError(
            f"find_lr: {problem}. Call it before train, on a DataLoader over a map-style data set."
        )
    rates, losses, means = list[float](), list[float](), list[float]()
    seed = mix(context.state.seed, steps)
    with context.fail_together(), restore_after(context, work, seed, "find_lr") as state:
        begin_modes(context.module, modes)
        loop = TrainLoop(context.stack, work, Hooks(None), state=state)
        ramp = _Ramp(loop.work.optimizers, start, end, steps)

        def attend() -> None:
            loop.meter.flush()
            loss = loop.meter.interval.pop()
            if loss is None:  # the step was skipped
                return
            rates.append(ramp.rate)
            losses.append(loss)
            means.append(SMOOTHING * means[-1] + (1 - SMOOTHING) * loss if means else loss)
            ramp.set_rate(ramp.rate * ramp.factor)

        loop.on_due, loop.next_due_step = attend, 0
        with suppress(NonFiniteError):  # the loss has diverged
            train_steps(loop, _iter_steps(data, state, steps, means))
    return LRFinderResult(rates=tuple(rates), losses=tuple(losses))


def _iter_steps(data: TrainingData, state: RunState, steps: int, means: list[float]) -> Iterator[StepBatches]:
    """The steps of any number of epochs, until `steps` are measured, the loss diverges or too many are skipped."""
    idle = known = 0
    for epoch in count():
        state.epoch = epoch
        state.samples_in_epoch = state.batches_in_epoch = state.steps_in_epoch = 0
        for step_batches in data.iter_steps(state):
            idle, known = 0 if len(means) > known else idle + 1, len(means)
            diverged = len(means) > SETTLED and means[-1] > DIVERGED * min(means[SETTLED:])
            if diverged or len(means) >= steps or idle > MAX_SKIPPED_IN_A_ROW:
                return
            yield step_batches


class _Ramp:
    """Sets the rates of all optimizers. They grow by the same factor in each step and keep their ratios."""

    def __init__(self, optimizers: tuple[Optimizer, ...], start: float, end: float, steps: int) -> None:
        self.rate, self.factor = start, (end / start) ** (1 / (steps - 1))
        self._groups = [group for optimizer in optimizers for group in optimizer.param_groups]
        own = [float(group.get("initial_lr", group["lr"])) for group in self._groups]
        self._shares = [rate / max(own) if max(own) else 1.0 for rate in own]
        self.set_rate(start)

    def set_rate(self, highest: float) -> None:
        self.rate = highest
        for group, share in zip(self._groups, self._shares, strict=True):
            rate = highest * share
            if isinstance(group["lr"], torch.Tensor):
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate
