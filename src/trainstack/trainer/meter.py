"""Losses and gradient norms of the steps under way: kept on the device, read in bulk at log points."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from trainstack.errors import NonFiniteError

MAX_SKIPPED_IN_A_ROW = 50
"""So many steps may be skipped one after the other before the run is stopped."""


class StepEntry(NamedTuple):
    """What is remembered of one global step until the next read.

    Attributes:
        step, epoch, step_in_epoch: its place in the run; steps are counted from 1.
        losses: of its micro-batches; 0-dim, detached, on the device.
        weights: the share of each of them.
        items: what its loss is a mean over.
        moved: whether it moved the weights.
        norm: joint L2 norm of the gradients before clipping, if one was computed.
    """

    step: int
    epoch: int
    step_in_epoch: int
    losses: Sequence[Tensor]
    weights: Sequence[float]
    items: float
    moved: bool
    norm: Tensor | None


class LossMeter:
    """Means over the steps since the last log point, and over the epoch.

    Means are weighted by items and leave out steps that moved nothing; those are counted by `RunState`. All sums are
    float64 and are formed in the order of the steps, so that they do not depend on when the device is read.

    Args:
        tolerant: a non-finite loss is no error where its step moved nothing.
    """

    def __init__(self, *, tolerant: bool = False) -> None:
        self._tolerant = tolerant
        self.entries: list[StepEntry] = []
        self.interval = _Sum()
        self.epoch = _Sum()
        self.last_norm: float | None = None
        self.skipped_in_a_row = 0

    def drain(self) -> None:
        """Read what is pending from the device.

        Raises:
            NonFiniteError: a loss is inf or nan, or the gradients of a step that moved the weights are, or too many
                steps in a row moved nothing.
        """
        if not self.entries:
            return
        losses = iter(read_scalars([loss for entry in self.entries for loss in entry.losses]))
        norms = iter(read_scalars([entry.norm for entry in self.entries if entry.norm is not None]))
        entries, self.entries = self.entries, []
        for entry in entries:
            values = [next(losses) for _ in entry.losses]
            norm = next(norms) if entry.norm is not None else None
            self._count(entry, values, norm)

    def latest(self) -> float | None:
        """Mean loss since the last log point, pending steps included; reads the device."""
        self.drain()
        return self.interval.mean()

    def get_state(self) -> dict[str, Any]:
        """Sums since the last log point and over the epoch; reads what is pending first."""
        self.drain()
        return {
            "interval": self.interval.pair(),
            "epoch": self.epoch.pair(),
            "last_norm": self.last_norm,
            "skipped_in_a_row": self.skipped_in_a_row,
        }

    def update_state(self, state: Mapping[str, Any]) -> None:
        """Take back what `get_state` returned."""
        self.entries = []
        self.interval, self.epoch = _Sum(*state["interval"]), _Sum(*state["epoch"])
        self.last_norm = state["last_norm"]
        self.skipped_in_a_row = state["skipped_in_a_row"]

    def _count(self, entry: StepEntry, values: list[float], norm: float | None) -> None:
        if entry.moved or not self._tolerant:
            self._refuse_nonfinite_loss(entry, values)
        if not entry.moved:
            self.skipped_in_a_row += entry.items > 0
            if self.skipped_in_a_row >= MAX_SKIPPED_IN_A_ROW:
                raise NonFiniteError(
                    f"{self.skipped_in_a_row} global steps in a row, the last of them {_place(entry)}, had gradients "
                    "that are inf or nan and were skipped. Lower the learning rate, check the loss for division by "
                    "zero or log(0), or train in bfloat16: backend='sp-bf16'."
                )
            return
        self.skipped_in_a_row = 0
        self.last_norm = norm
        if norm is not None and not math.isfinite(norm):
            raise NonFiniteError(f"the norm of the gradients is {norm} at {_place(entry)}. {_ADVICE}")
        loss = sum(value * weight for value, weight in zip(values, entry.weights, strict=True) if weight)
        self.interval.add(loss, entry.items)
        self.epoch.add(loss, entry.items)

    def _refuse_nonfinite_loss(self, entry: StepEntry, values: list[float]) -> None:
        for position, (value, weight) in enumerate(zip(values, entry.weights, strict=True)):
            if weight and not math.isfinite(value):
                raise NonFiniteError(f"the loss is {value} at {_place(entry)}, micro-batch {position}. {_ADVICE}")


_ADVICE = (
    "No checkpoint was written after it. Write nonfinite='skip' to leave such steps out and count them, or "
    "log_every=1 to stop before the next step."
)


def _place(entry: StepEntry) -> str:
    return f"global step {entry.step} (epoch {entry.epoch}, step {entry.step_in_epoch} of the epoch)"


class _Sum:
    __slots__ = ("total", "weight")

    def __init__(self, total: float = 0.0, weight: float = 0.0) -> None:
        self.total, self.weight = total, weight

    def add(self, value: float, weight: float) -> None:
        self.total += value * weight
        self.weight += weight

    def mean(self) -> float | None:
        return self.total / self.weight if self.weight else None

    def take(self) -> float | None:
        mean = self.mean()
        self.total = self.weight = 0.0
        return mean

    def pair(self) -> list[float]:
        return [self.total, self.weight]


def read_scalars(tensors: Sequence[Tensor]) -> list[float]:
    """The values of 0-dim tensors of one device, in one transfer, as float64."""
    return torch.stack(list(tensors)).double().tolist() if tensors else []
