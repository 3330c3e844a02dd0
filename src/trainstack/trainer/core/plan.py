"""`TrainingPlan`: all step arithmetic of a run."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, replace
from fractions import Fraction
from typing import Any

from trainstack.errors import ConfigurationError


def split_evenly(number: int, limit: int | None) -> tuple[int, int]:
    """Divide `number` samples into the fewest parts of at most `limit`; return their number and the largest size.

    The last part may be smaller. Without a limit there is one part.
    """
    parts = 1 if limit is None else -(-number // limit)
    return parts, -(-number // parts)


def fraction_of_steps(name: str, fraction: float, steps: int | None) -> Fraction:
    """Return `fraction` of all global `steps` of a run, in decimal as written: 0.07 of 100 is exactly 7.

    Raises:
        ConfigurationError: the number of steps is unknown; the message calls the argument `name`.
    """
    if steps is None:
        raise ConfigurationError(
            f"{name}={fraction} is a fraction of all global steps of the run, and their number is unknown: "
            "the training loader has no length. Write a whole number of steps, or give the loader a length."
        )
    return Fraction(str(fraction)) * steps


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingPlan:
    """Numbers of samples, micro-batches and global steps of a run.

    A global step is one optimizer update over all processes. Make one with `TrainingPlan.make`.

    Attributes:
        global_batch: samples a global step, over all processes (`train_batch_size`).
        process_batch: samples a global step on one process.
        micro_batch: largest number of samples in a forward pass; the last micro-batch of a step may have fewer.
        accumulation: micro-batches a global step on one process, as few as the limit allows.
        world_size: number of processes.
        epochs: epochs of the whole run; `max_steps` may cut the last one short.
        samples_per_epoch: samples an epoch over all processes, after `drop_last`; None if unknown.
        batches_per_epoch: micro-batches an epoch, over all processes; None if unknown.
        steps_per_epoch: exact number of global steps an epoch; None if unknown.
        last_step_samples: samples in the last global step of a full epoch; None if unknown.
        max_steps_per_epoch: the user's limit on global steps an epoch; None for no limit.
        max_steps: global steps of the whole run, if the user set them; otherwise `epochs` decides.
        is_sampled: whether each step draws a sample of random size, as in private training. Then the numbers of samples
            are expectations, and `process_batch` and `micro_batch` are rounded up.

    Examples:
        >>> plan = ts.TrainingPlan.make(
        ...     train_batch_size=64,
        ...     gpu_batch_size_limit=12,
        ...     world_size=2,
        ...     epochs=3,
        ...     dataset_length=1000,
        ... )
        >>> (
        ...     plan.process_batch,
        ...     plan.accumulation,
        ...     plan.steps_per_epoch,
        ...     plan.total_steps,
        ... )
        (32, 3, 16, 48)
    """

    global_batch: int
    process_batch: int
    micro_batch: int
    accumulation: int
    world_size: int
    epochs: int
    samples_per_epoch: int | None
    batches_per_epoch: int | None
    steps_per_epoch: int | None
    last_step_samples: int | None
    max_steps_per_epoch: int | None
    max_steps: int | None = None
    is_sampled: bool = False

    @classmethod
    def make(
        cls,
        *,
        train_batch_size: int,
        gpu_batch_size_limit: int | None = None,
        world_size: int = 1,
        epochs: int = 1,
        dataset_length: int | None = None,
        loader_length: int | None = None,
        drop_last: bool = False,
        max_steps_per_epoch: int | float | None = None,
        max_steps: int | float | None = None,
        is_sampled: bool = False,
    ) -> TrainingPlan:
        """Compute a plan.

        Args:
            train_batch_size: samples a global step, over all processes.
            gpu_batch_size_limit: largest number of samples in a forward pass; None for no limit.
            world_size: number of processes.
            epochs: epochs of the whole run.
            dataset_length: samples in the dataset, if the library orders them.
            loader_length: batches of a loader with a custom order, which the processes take in turn; used without
                `dataset_length`.
            drop_last: whether to omit a last global batch that is not full.
            max_steps_per_epoch: limit on global steps an epoch; a float is a fraction of them.
            max_steps: global steps of the whole run, which override `epochs`; a float is a fraction of the steps in
                `epochs`.
            is_sampled: whether each step draws a sample of random size, which any number of processes can share.

        Raises:
            ConfigurationError: the global batch cannot be divided evenly among the processes, or a limit is a
                fraction of an unknown number.
        """
        if train_batch_size % world_size and not is_sampled:
            lower = train_batch_size - train_batch_size % world_size
            choices = " or ".join(str(b) for b in (lower, lower + world_size) if b > 0)
            raise ConfigurationError(
                f"train_batch_size={train_batch_size} cannot be divided among {world_size} processes: it is the "
                f"number of samples a step over all processes. Write train_batch_size={choices}."
            )
        process_batch = -(-train_batch_size // world_size)
        accumulation, micro = split_evenly(process_batch, gpu_batch_size_limit)
        lengths = _lengths(dataset_length, loader_length, train_batch_size, micro, accumulation * world_size, drop_last)
        max_steps_per_epoch = _whole_cap(max_steps_per_epoch, lengths["steps_per_epoch"])
        if (steps := lengths["steps_per_epoch"]) is not None and max_steps_per_epoch is not None:
            steps = lengths["steps_per_epoch"] = min(steps, max_steps_per_epoch)
        max_steps, epochs = _limited(max_steps, steps, epochs)
        return cls(
            global_batch=train_batch_size,
            process_batch=process_batch,
            micro_batch=micro,
            accumulation=accumulation,
            world_size=world_size,
            epochs=epochs,
            max_steps_per_epoch=max_steps_per_epoch,
            max_steps=max_steps,
            is_sampled=is_sampled,
            **lengths,
        )

    @property
    def total_steps(self) -> int | Any:
        """The number of global steps of the whole run; None if the length of an epoch is unknown."""
        if self.max_steps is not None:
            return self.max_steps
        return None if self.steps_per_epoch is None else self.steps_per_epoch * self.epochs

    def rest(self, epoch: int, global_step: int) -> TrainingPlan:
        """Return the plan of the rest of the run from `epoch`, after `global_step` steps; at least 1 epoch or step."""
        steps = None if self.max_steps is None else max(1, self.max_steps - global_step)
        return replace(self, epochs=max(1, self.epochs - epoch), max_steps=steps)

    def with_end(self, epochs: int, max_steps: int | float | None) -> TrainingPlan:
        """Return the plan of the same data with another end; arguments and errors are those of `make`."""
        steps, epochs = _limited(max_steps, self.steps_per_epoch, epochs)
        return replace(self, epochs=epochs, max_steps=steps)

    def with_micro_batch(self, limit: int) -> TrainingPlan:
        """Return the plan with micro-batches of at most `limit` samples; `samples_per_epoch` must be known."""
        assert self.samples_per_epoch is not None
        accumulation, micro = split_evenly(self.process_batch, limit)
        batches = _micro_batches(self.samples_per_epoch, self.global_batch, micro, accumulation * self.world_size)
        return replace(self, micro_batch=micro, accumulation=accumulation, batches_per_epoch=batches)

    @property
    def last_micro_batch(self) -> int:
        """The number of samples in the last micro-batch of a full step."""
        return self.process_batch - (self.accumulation - 1) * self.micro_batch

    def ends_within_epoch(self, global_step: int, steps_in_epoch: int) -> bool:
        """Whether the run ends at a step before the last step of its epoch, as far as the length is known."""
        if self.max_steps is None or global_step < self.max_steps:
            return False
        length = self.max_steps_per_epoch if self.steps_per_epoch is None else self.steps_per_epoch
        return steps_in_epoch > 0 and (length is None or steps_in_epoch < length)

    @property
    def estimated_global_steps_per_epoch(self) -> int:
        """An upper bound of the global steps an epoch, which modules get: `batches // (processes * accumulation) + 1`.

        This is the documented formula of PyMarlin, limited by `max_steps_per_epoch` and `max_steps`. The exact number
        is `steps_per_epoch`. It is 0 if the length is unknown and there is no limit.
        """
        caps = [cap for cap in (self.max_steps_per_epoch, self.max_steps) if cap is not None]
        if self.batches_per_epoch is None:
            return min(caps, default=0)
        return min([self.batches_per_epoch // (self.world_size * self.accumulation) + 1, *caps])

    def rows(self) -> list[tuple[str, str]]:
        """The plan as label and value, for a table."""
        return [("batch", self.describe_batch()), ("steps", self.describe_steps())]

    def describe_batch(self) -> str:
        """The division of a global batch, such as `64 samples = 2 processes x 1 micro-batch x 32`."""
        processes, parts = _counted(self.world_size, "process", "es"), _counted(self.accumulation, "micro-batch", "es")
        if self.is_sampled:
            return (
                f"{self.global_batch} on average, a new random sample each step; {processes}, micro-batches of at most "
                f"{self.micro_batch}"
            )
        text = f"{_counted(self.global_batch, 'sample')} = {processes} x {parts} x {self.micro_batch}"
        is_uneven = self.last_micro_batch != self.micro_batch
        return f"{text}, the last of {self.last_micro_batch}" if is_uneven else text

    def describe_steps(self) -> str:
        """Global steps of an epoch and of the run, such as `16 per epoch (40 samples in the last), 48 in 3 epochs`."""
        if self.steps_per_epoch is None:
            most = self.max_steps_per_epoch
            per_epoch = "unknown until the loader ends" if most is None else f"at most {most:,} per epoch"
            return per_epoch if self.max_steps is None else f"{per_epoch}, {self.max_steps:,} in all"
        notes = [] if self.max_steps_per_epoch is None else [f"at most {self.max_steps_per_epoch:,}"]
        if not notes and not self.is_sampled and self.last_step_samples not in (None, self.global_batch):
            notes.append(f"{_counted(self.last_step_samples, 'sample')} in the last")
        note = f" ({', '.join(notes)})" if notes else ""
        return f"{self.steps_per_epoch:,} per epoch{note}, {self.total_steps:,} in {_counted(self.epochs, 'epoch')}"

    def to_dict(self) -> dict[str, Any]:
        """Return all numbers as plain Python values, `total_steps` included."""
        return asdict(self) | {"total_steps": self.total_steps}


def _counted(number: int | None, noun: str, plural: str = "s") -> str:
    return f"{number:,} {noun}{plural if number != 1 else ''}"


def _whole_cap(cap: int | float | None, steps: int | None) -> int | None:
    """Return `cap` as a number of global steps; a fraction of the `steps` of an epoch is rounded up."""
    if not isinstance(cap, float):
        return cap
    if steps is None:
        raise ConfigurationError(
            f"max_train_steps_per_epoch={cap} is a fraction of the global steps of an epoch, and their number is "
            "unknown: the training loader has no length. Write a whole number of steps."
        )
    return math.ceil(Fraction(str(cap)) * steps)


def _limited(max_steps: int | float | None, steps: int | None, epochs: int) -> tuple[int | None, int]:
    """Return `max_steps` as a whole number, a fraction rounded up, and the epochs that these steps take.

    If the number of steps in an epoch is unknown or 0, the number of epochs does not change.
    """
    if max_steps is None:
        return None, epochs
    if not isinstance(max_steps, float):
        return max_steps, -(-max_steps // steps) if steps else epochs
    whole = max(1, math.ceil(fraction_of_steps("max_steps", max_steps, None if steps is None else steps * epochs)))
    return whole, -(-whole // steps) if steps else epochs


def _lengths(
    dataset: int | None, loader: int | None, global_batch: int, micro: int, in_step: int, drop_last: bool
) -> dict[str, int | None]:
    """Return the lengths of one epoch, None if unknown; `in_step` is the number of micro-batches a global step."""
    samples = tail = batches = steps = None
    if dataset is not None:
        full, rest = divmod(dataset, global_batch)
        samples = dataset - rest if drop_last else dataset
        steps = full + (rest > 0 and not drop_last)
        tail = rest if rest and not drop_last else min(global_batch, samples)
        batches = _micro_batches(samples, global_batch, micro, in_step)
    elif loader is not None:
        batches, steps = loader, -(-loader // in_step)
    return {
        "samples_per_epoch": samples,
        "last_step_samples": tail,
        "batches_per_epoch": batches,
        "steps_per_epoch": steps,
    }


def _micro_batches(samples: int, global_batch: int, micro: int, in_step: int) -> int:
    """Return the micro-batches in an epoch of `samples`, with `in_step` of them in a full step."""
    full, rest = divmod(samples, global_batch)
    return full * in_step + -(-rest // micro)
