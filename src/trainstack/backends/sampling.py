"""How a layer draws the training data itself, where the plain order of a seeded permutation will not do."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingSet:
    """What `prepare` may know of the data: a layer that samples or probes records needs it.

    Attributes:
        length: records in the data set; None where the library cannot index them.
        fetch: the collated batch of the records at the given indices (int64, 1-dim), not moved to a device.
        global_batch: records a global step, over all processes.
        most_at_once: records that fit into one forward pass.
        total_steps: global steps of the whole run; None if unknown.
        problem: why the library cannot index the records, in words; None if it can.
    """

    length: int | None
    fetch: Callable[[Tensor], Any]
    global_batch: int
    most_at_once: int
    total_steps: int | None
    problem: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Draw:
    """The records of one global step.

    Attributes:
        mine: data set indices of this process's part, int64; may be empty.
        total: records of the step on all processes together, as far as this process knows.
    """

    mine: Tensor
    total: float


class Sampling(ABC):
    """A law by which the records of each global step are drawn, in place of the library's permutation."""

    @abstractmethod
    def begin(self) -> None:
        """Steps are going to be made, on all processes. What is left of one that was broken off before counts no more,
        nor do records that were drawn ahead."""

    @abstractmethod
    def draw(self, step: int) -> Draw:
        """The records of global step `step`, counted from 1. Steps are asked for in order, some ahead of their turn."""

    @abstractmethod
    def check(self, batch: Any, records: int) -> None:
        """Refuse a batch that is not made of `records` records."""

    @abstractmethod
    def steps_allowed(self, steps: int) -> int:
        """How many of the next `steps` steps may be made. All processes ask together, and get the same answer."""

    @abstractmethod
    def why_over(self) -> str:
        """Why no further step may be made, as a sentence."""
