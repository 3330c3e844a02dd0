"""`TrainingPlan`, all step arithmetic of a run."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, replace
from fractions import Fraction
from typing import Any

from trainstack.errors import ConfigurationError


def split_evenly(number: int, limit: int | None) -> tuple[int, int]:
    """The fewest parts of at most `limit` that `number` samples have room in, and the size of the larger ones.

    The last part may be smaller. Without a limit, or within it, there is one part.
    """
    parts = 1 if limit is None else -(-number // limit)
    return parts, -(-number // parts)


def fraction_of_steps(name: str, fraction: float, steps: int | None) -> Fraction:
    """`fraction` of all global `steps` of a run, taken as written: 0.07 of 100 is 7.

    Raises:
        ConfigurationError: their number is not known; `name` is the argument that the user set.
    """
    if steps is None:
        raise ConfigurationError(
            f"{name}={fraction} is a fraction of all global steps of the run, and how many those are is unknown: "
            "the training loader has no length. Write a whole number of steps, or give the loader a length."
        )
    return Fraction(str(fraction)) * steps


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingPlan:
    """How many samples, micro-batches and global steps a run consists of.

    A global step is one optimizer update over all processes. Make one with `TrainingPlan.make`.

    Attributes:
        global_batch: samples a global step, over all processes (`train_batch_size`).
        process_batch: samples a global step on one process.
        micro_batch: samples a forward pass, at most; the last one of a step may have fewer.
        accumulation: micro-batches a global step on one process: as few as the limit allows.
        world_size: number of processes.
        epochs: epochs of the whole run, the last of them perhaps cut short by `max_steps`.
        samples_per_epoch: samples an epoch over all processes, after `drop_last`; None if unknown.
        batches_per_epoch: micro-batches an epoch that a single process would see; None if unknown.
        steps_per_epoch: global steps an epoch, exactly; None if unknown.
        last_step_samples: samples in the last global step of a full epoch; None if unknown.
        max_steps_per_epoch: the user's cap.
        max_steps: global steps of the whole run, if the user gave their number instead of epochs.
        is_sampled: whether each step draws a sample of random size, as private training does. The numbers of samples
            are then means, and `process_batch` and `micro_batch` are rounded up.
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
        """Do the arithmetic.

        Args:
            train_batch_size: the global batch.
            gpu_batch_size_limit: samples that fit into one forward pass; None: as many as a process has in a step.
            world_size: number of processes.
            epochs: of the whole run.
            dataset_length: samples in the data set, where the library orders them.
            loader_length: otherwise, batches of a loader with a custom order, which the processes take in turn.
            drop_last: leave out a last global batch that is not full.
            max_steps_per_epoch: cap on global steps an epoch; a float is a fraction of them.
            max_steps: global steps of the whole run, whatever `epochs` says; a float is a fraction of theirs.
            is_sampled: each step draws a sample of random size, which any number of processes can share.

        Raises:
            ConfigurationError: the global batch cannot be divided evenly among the processes, or a limit is a
                fraction of an unknown number.
        """
        if train_batch_size % world_size and not is_sampled:
            lower = train_batch_size - train_batch_size % world_size
            choices = " or ".join(str(b) for b in (lower, lower + world_size) if b > 0)
            raise ConfigurationError(
                f"train_batch_size={train_batch_size} cannot be divided among {world_size} processes: it is the "
                f"number of samples a step over all of them. Write train_batch_size={choices}."
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
        """Global steps of the whole run; None if the length of an epoch is unknown."""
        if self.max_steps is not None:
            return self.max_steps
        return None if self.steps_per_epoch is None else self.steps_per_epoch * self.epochs

    def rest(self, epoch: int, global_step: int) -> TrainingPlan:
        """The plan of what is left before `epoch`, when `global_step` steps are made; at least one epoch or step."""
        steps = None if self.max_steps is None else max(1, self.max_steps - global_step)
        return replace(self, epochs=max(1, self.epochs - epoch), max_steps=steps)

    def with_end(self, epochs: int, max_steps: int | float | None) -> TrainingPlan:
        """The plan of the same data with another end; arguments and errors are those of `make`."""
        steps, epochs = _limited(max_steps, self.steps_per_epoch, epochs)
        return replace(self, epochs=epochs, max_steps=steps)

    def with_micro_batch(self, limit: int) -> TrainingPlan:
        """The plan of the same data in micro-batches of at most `limit` samples; `samples_per_epoch` must be known."""
        assert self.samples_per_epoch is not None
        accumulation, micro = split_evenly(self.process_batch, limit)
        batches = _micro_batches(self.samples_per_epoch, self.global_batch, micro, accumulation * self.world_size)
        return replace(self, micro_batch=micro, accumulation=accumulation, batches_per_epoch=batches)

    @property
    def last_micro_batch(self) -> int:
        """Samples in the last micro-batch of a full step."""
        return self.process_batch - (self.accumulation - 1) * self.micro_batch

    def ends_within_epoch(self, global_step: int, steps_in_epoch: int) -> bool:
        """Whether the run is over at a step that is not the last of its epoch, as far as that is known."""
        if self.max_steps is None or global_step < self.max_steps:
            return False
        length = self.max_steps_per_epoch if self.steps_per_epoch is None else self.steps_per_epoch
        return steps_in_epoch > 0 and (length is None or steps_in_epoch < length)

    @property
    def estimated_global_steps_per_epoch(self) -> int:
        """An upper bound: `batches // (processes * accumulation) + 1`, capped; what modules are given.

        PyMarlin's documented formula. The exact number is `steps_per_epoch`. Zero if nothing is known and
        nothing is capped.
        """
        caps = [cap for cap in (self.max_steps_per_epoch, self.max_steps) if cap is not None]
        if self.batches_per_epoch is None:
            return min(caps, default=0)
        return min([self.batches_per_epoch // (self.world_size * self.accumulation) + 1, *caps])

    def rows(self) -> list[tuple[str, str]]:
        """The plan as label and value, for a table."""
        return [("batch", self.describe_batch()), ("steps", self.describe_steps())]

    def describe_batch(self) -> str:
        """How a global batch is split, such as `64 samples = 2 processes x 1 micro-batch x 32`."""
        processes, parts = _counted(self.world_size, "process", "es"), _counted(self.accumulation, "micro-batch", "es")
        if self.is_sampled:
            return (
                f"{self.global_batch} on average, drawn again in each step; {processes}, micro-batches of at most "
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
        """All numbers as plain values, `total_steps` included."""
        return asdict(self) | {"total_steps": self.total_steps}


def _counted(number: int | None, noun: str, plural: str = "s") -> str:
    return f"{number:,} {noun}{plural if number != 1 else ''}"


def _whole_cap(cap: int | float | None, steps: int | None) -> int | None:
    """`cap` as a number of global steps; a fraction of the `steps` of an epoch is rounded up."""
    if not isinstance(cap, float):
        return cap
    if steps is None:
        raise ConfigurationError(
            f"max_train_steps_per_epoch={cap} is a fraction of the global steps of an epoch, and how many those are is "
            "unknown: the training loader has no length. Write a whole number of steps."
        )
    return math.ceil(Fraction(str(cap)) * steps)


def _limited(max_steps: int | float | None, steps: int | None, epochs: int) -> tuple[int | None, int]:
    """`max_steps` as a number, a fraction of all steps rounded up, and the epochs that it takes.

    Epochs stay what they are where their steps are unknown, or where there are none.
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
    """The lengths of one epoch, as far as they can be known, with so many micro-batches in a step on all processes."""
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
    """How many micro-batches an epoch of `samples` has, with `in_step` of them in a full step."""
    full, rest = divmod(samples, global_batch)
    return full * in_step + -(-rest // micro)
