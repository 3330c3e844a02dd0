"""Intervals in global steps, epochs, seconds or fractions of a run."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from fractions import Fraction
from typing import Any

from trainstack.backends import Communicator
from trainstack.errors import ConfigurationError, annotate
from trainstack.trainer.core.plan import TrainingPlan, fraction_of_steps

NEVER = 1 << 62
"""A global step that no run reaches; it fits into int64, also after an addition of steps."""


@dataclass(frozen=True, kw_only=True)
class Every:
    """Interval in global steps, in epochs or in time. Set exactly one of the three.

    Args:
        steps: global steps; a float in (0, 1] is a fraction of all global steps of the run.
        epochs: epochs.
        time: seconds, "HH:MM:SS", "D:HH:MM:SS" or a `timedelta`; stored as seconds. The time counts from the start of
            `train()`, and then from the end of the last action that was due.

    Raises:
        ConfigurationError: none or several are set, or a value is out of range.

    Examples:
        >>> args = ts.TrainerArguments(
        ...     train_batch_size=16, validate_every=ts.Every(time="00:30:00")
        ... )
        >>> args.validate_every.time
        1800.0
    """

    steps: int | float | None = None
    epochs: int | None = None
    time: float | str | timedelta | None = None

    def __post_init__(self) -> None:
        if sum(value is not None for value in (self.steps, self.epochs, self.time)) != 1:
            raise ConfigurationError(f"{self}: write one of Every(steps=...), Every(epochs=...) and Every(time=...).")
        if self.time is not None:
            object.__setattr__(self, "time", seconds_of("Every.time", self.time))
        if self.steps is not None and not is_number_of_steps(self.steps):
            raise ConfigurationError(
                f"Every(steps={self.steps!r}): write a whole number, 1 or more, or a float above 0 and up to 1.0 for a "
                "fraction of the run."
            )
        if self.epochs is not None and (type(self.epochs) is not int or self.epochs < 1):
            raise ConfigurationError(f"Every(epochs={self.epochs!r}): write a whole number, 1 or more.")


ValidateEvery = int | float | Every | Callable[[Any], bool]


def is_number_of_steps(value: Any) -> bool:
    """Whether `value` is a whole number above 0, or a float in (0, 1]."""
    return 0.0 < value <= 1.0 if isinstance(value, float) else type(value) is int and value >= 1


def seconds_of(name: str, value: Any) -> float:
    """Convert a duration to seconds: a number of seconds, a `timedelta`, "HH:MM:SS" or "D:HH:MM:SS" with days.

    Raises:
        ConfigurationError: `value` is none of these; the message calls it `name`.
    """
    seconds = math.nan
    if isinstance(value, int | float) and not isinstance(value, bool):
        seconds = float(value)
    elif isinstance(value, timedelta):
        seconds = value.total_seconds()
    elif isinstance(value, str) and re.fullmatch(r"(\d+:)?\d+:[0-5]?\d:[0-5]?\d", value):
        days, hours, minutes, rest = (int(part) for part in f"0:{value}".split(":")[-4:])
        seconds = float(((days * 24 + hours) * 60 + minutes) * 60 + rest)
    if not 0 < seconds < math.inf:
        raise ConfigurationError(
            f"{name}={value!r}: write a number of seconds above 0, or a duration as 'HH:MM:SS' or 'D:HH:MM:SS', such "
            "as '11:30:00'."
        )
    return seconds


def check_validate_every(value: Any) -> None:
    """Check the argument `validate_every`.

    Raises:
        ConfigurationError: the value is not an interval; the message lists the accepted forms.
    """
    good = value is None or isinstance(value, Every) or type(value) is int or is_number_of_steps(value)
    if not good and not (callable(value) and not isinstance(value, type)):
        raise ConfigurationError(
            f"validate_every={value!r}: write a number of global steps (500), a fraction of the run (0.25), a negative "
            "number of epochs (-2), Every(steps=...), Every(epochs=...), Every(time=...), a function of the trainer "
            "that returns True or False, 0 for no validation, or None for one after each epoch."
        )


def steps_of(name: str, every: int | float, plan: TrainingPlan) -> Fraction:
    """Convert `every` to global steps; a float is a fraction of all global steps of the run, in decimal as written.

    Raises:
        ConfigurationError: `every` is a fraction and the number of steps is unknown; the message calls it `name`.
    """
    return fraction_of_steps(name, every, plan.total_steps) if isinstance(every, float) else Fraction(every)


def whole_steps(name: str, every: int | float, plan: TrainingPlan) -> int:
    """Return `steps_of`, rounded up to a whole number, at least 1."""
    return max(1, math.ceil(steps_of(name, every, plan)))


def is_log_point(step: int, interval: int, last: int | None) -> bool:
    """Whether global step `step` is measured and logged: a multiple of `interval`, or the last of `max_steps`."""
    return step % interval == 0 or step == last


class Timer:
    """Determines at which global step a time has passed, with the same result on all ranks.

    The clock of rank 0 decides. To compare it rarely, the ranks meet again after half of the steps that remain at the
    current pace.

    Args:
        seconds: the time; None for never.
        clock: returns seconds; the difference of two calls counts.
    """

    seconds: float | None
    next_step: int

    def __init__(self, seconds: float | None, clock: Callable[[], float] = time.monotonic) -> None:
        self.seconds, self._clock, self.next_step = seconds, clock, NEVER

    def begin(self, step: int) -> None:
        """Start the clock after global step `step`. All ranks call it together."""
        if self.seconds is not None:
            self._seen, self._stride = (self._clock(), step), 1
            self._due: float | None = self._seen[0] + self.seconds
            self.next_step = step + 1

    def is_due(self, step: int, comm: Communicator) -> bool:
        """Whether the time has passed at global step `step`. All ranks call it at `next_step` or later. Collective."""
        if step < self.next_step:
            return False
        self._stride, due = comm.broadcast_object(self._look(step), "looking at the clock")
        self.next_step = step + self._stride
        return bool(due)

    def _look(self, step: int) -> tuple[int, bool]:
        """Return the number of steps until the next look at the clock, and whether the time has passed."""
        now, (before, last) = self._clock(), self._seen
        self._seen = now, step
        if self._due is None:  # the action that was due has ended: the next interval starts
            assert self.seconds is not None
            self._due = now + self.seconds
        if now >= self._due:
            self._due = None
            return 1, True
        # 1e-9 s avoids a division by 0 if the clock has not moved. The stride at most doubles, because the first steps
        # (compilation, warm-up of caches) are slower than the later ones.
        steps_left = (self._due - now) * (step - last) / max(now - before, 1e-9)
        return max(1, min(int(steps_left / 2), 2 * self._stride)), False


class ValidationSchedule:
    """Decides when to validate during training.

    Each multiple of a fraction is rounded up separately, so 0.25 also validates at the run's last step if the number of
    steps is not a multiple of 4. An epoch that `max_steps` cuts short counts as an epoch: the run ends with a
    validation.

    Args:
        every: `TrainerArguments.validate_every`.
        plan: plan of the run.

    Attributes:
        plan: plan of the run, with the length of the current epoch.
        trainer: argument of a user's function.
        timer: timer of an interval in time.
    """

    def __init__(self, every: ValidateEvery | None, plan: TrainingPlan) -> None:
        self.trainer: Any = None
        self._ask = every if callable(every) else None
        self._epochs, self._steps = 0, Fraction(0)
        self.timer: Timer = Timer(every.time if isinstance(every, Every) else None)  # type: ignore[arg-type]  # seconds
        if every is None:
            self._epochs = 1
        elif isinstance(every, Every):
            self._epochs = every.epochs or 0
            self._steps = steps_of("validate_every", every.steps or 0, plan)
        elif isinstance(every, int | float):
            self._epochs = max(0, -int(every))
            self._steps = steps_of("validate_every", max(0, every), plan)
        self.plan = plan
        self._cut = plan.max_steps or 0 if self._epochs else 0

    @property
    def is_sparse(self) -> bool:
        """Whether an epoch may end before the first validation."""
        return self._epochs > 1 or self._steps > 0 or self._ask is not None or self.timer.seconds is not None

    def after_epoch(self, epoch: int) -> bool:
        """Whether to validate after `epoch`, counted from 0."""
        return self._epochs > 0 and (epoch + 1) % self._epochs == 0

    def next_step(self, step: int) -> int:
        """Return the next global step after `step` at which to call `is_due`."""
        if self._ask is not None:
            return step + 1
        due = math.ceil((step // self._steps + 1) * self._steps) if self._steps else NEVER
        due = min(due, max(self.timer.next_step, step + 1))
        return min(due, self._cut) if self._cut > step else due

    def is_due(self, step: int, steps_in_epoch: int, comm: Communicator) -> bool:
        """Whether to validate after global step `step`, before the epoch ends. Collective.

        A user's function runs on the main process only; if it raises an error, all processes raise one.
        """
        if self._ask is None:
            cut = step == self._cut and self.plan.ends_within_epoch(step, steps_in_epoch)
            # Whether a multiple of the interval is in (step - 1, step]; a fraction of a step has no exact multiple.
            reached = self._steps > 0 and step // self._steps * self._steps > step - 1
            return self.timer.is_due(step, comm) or cut or reached
        answer, failure = False, None
        if comm.rank == 0:
            try:
                answer = bool(self._ask(self.trainer))
            except Exception as error:
                annotate(error, "raised in the function given as validate_every")
                failure = error
        return bool(comm.broadcast_outcome(failure, answer, "asking validate_every"))
