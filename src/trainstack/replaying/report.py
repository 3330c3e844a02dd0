"""`ReplayReport` says whether replayed steps have the recorded bits, and where they first differ."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

QUANTITIES = (
    "data",
    "random state",
    "learning rate",
    "forward",
    "backward",
    "skipped step",
    "optimizer",
    "other state",
)
"""The quantities in which steps can differ, in the order of computation. The first one that differs is reported."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepDifference:
    """The first step that differs from its record.

    Attributes:
        step: the global step, counted from 1.
        quantity: the first quantity of the step that differs: one of `QUANTITIES`, or "weights at the start".
        rank: the process on which it differs.
        recorded, replayed: the values, as text.
        parameter: the first parameter with other bits; None if it is unknown.
        shown_by: the source of the parameter: the details of the step, or a later checkpoint; or the reason why it is
            unknown.
    """

    step: int
    quantity: str
    rank: int
    recorded: str
    replayed: str
    parameter: str | None = None
    shown_by: str = ""

    def __str__(self) -> str:
        first = f"step {self.step}, {self.quantity}, rank {self.rank}: {self.recorded} was recorded, {self.replayed} "
        lines = [f"{first}is the result of the replay", *([self.shown_by] if self.shown_by else [])]
        return "\n".join(lines)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayReport:
    """The result of `replay`.

    Attributes:
        run: the folder of the run.
        backend: the backend string.
        nproc: processes of the replay.
        first_step, last_step: the requested and compared steps; up to the first difference they agree.
        began_from: the checkpoint from which the replay began; None for the start of the run.
        mode: of the record, "steps" or "full".
        details: the number of steps with digests of batches and random states to compare.
        checkpoints: the steps whose checkpoints were compared completely.
        tolerance: relative, if another number of processes replayed; None if bits were compared.
        largest_error: the largest relative difference of a loss or norm that was compared to a tolerance.
        first_difference: None if there is none.
        damaged: stored checkpoints that are damaged, or are not those that the step log names, as text.
        notes: differences of environment, arguments and code, and damage of the record.
        seconds: the duration of the replay.
    """

    run: str
    backend: str
    nproc: int
    first_step: int
    last_step: int
    began_from: str | None
    mode: str
    details: int = 0
    checkpoints: tuple[int, ...] = ()
    tolerance: float | None = None
    largest_error: float | None = None
    first_difference: StepDifference | None = None
    damaged: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    seconds: float = 0.0

    @property
    def same(self) -> bool:
        """Whether no difference and no damaged checkpoint was found."""
        return self.first_difference is None and not self.damaged

    def __str__(self) -> str:
        return "\n".join([self.verdict, *(f"note: {note}" for note in self.notes)])

    @property
    def verdict(self) -> str:
        """Whether the bits are the same, and if not, where they differ, in a few lines."""
        span = f"steps {self.first_step} to {self.last_step}"
        found = self.first_difference
        if found is not None:
            before = (
                "" if found.step <= self.first_step else f"\nsteps {self.first_step} to {found.step - 1} are the same"
            )
            lines = [f"NOT THE SAME: {found}{before}"]
        elif self.tolerance is not None:
            lines = [
                f"same to a tolerance of {self.tolerance:g}: {span}, replayed by another number of processes; the "
                f"largest relative difference of a loss or gradient norm is {self.largest_error:.2g}"
            ]
        else:
            lines = [f"same bits: {span}{self._compared}"]
        lines += [f"DAMAGED: {problem}" for problem in self.damaged]
        return "\n".join(lines)

    @property
    def _compared(self) -> str:
        parts = ["losses, gradient norms, learning rates, samples"]
        if self.details:
            parts.append(f"batches and random states of {self.details} step{'s' * (self.details > 1)}")
        if self.mode == "full":
            parts.append("gradients, weights and optimizer states of each step")
        if self.checkpoints:
            steps = ", ".join(map(str, self.checkpoints))
            parts.append(f"all state at the checkpoint{'s' * (len(self.checkpoints) > 1)} of step {steps}")
        return f" ({'; '.join(parts)})"

    def to_json(self) -> dict[str, Any]:
        """The report as plain values, with `same`."""
        return {"same": self.same, **asdict(self)}
