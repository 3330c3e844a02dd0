"""`compare_runs`: the first global step at which two runs diverge, and the cause, from their step logs."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from trainstack.errors import ConfigurationError
from trainstack.step_log import Flag, StepLog, ranks_of, read_step_log
from trainstack.step_log.first_difference import (
    IN_STEP,
    FirstDifference,
    Tolerance,
    common_steps,
    first_difference,
    largest_error,
    relative_errors,
)
from trainstack.trainer.core.changes import Change, changes_between, flat, table_of
from trainstack.trainer.core.effects import Effect

START_WEIGHTS = "weights at the start"
_MOST_NAMES = 3
_CAUSES: Mapping[str, tuple[str, ...]] = {
    "data": ("data", "arguments", "code"),
    "random state": ("arguments", "environment", "code", "data"),
    "learning rate": ("optimizers", "arguments", "code", "data"),
    "skipped step": ("arguments", "environment", "code"),
    START_WEIGHTS: ("arguments", "code", "environment"),
}
"""The sections of a description of a start that can explain a quantity, most likely first; others take all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunComparison:
    """The difference of two runs, from their step logs.

    Attributes:
        step: the first global step whose records differ; None if all that both recorded is the same.
        rank: the first rank in which they differ there.
        quantity: "data", "random state", "forward", "backward", "optimizer", "learning rate", "skipped step" or
            "weights at the start"; None if nothing differs.
        values: of both runs there, as texts; ("", "") if nothing differs.
        parameters: the names of parameters that differ there, where they are recorded.
        same_until: the last global step before of which all that both recorded is the same; 0 for none.
        compared: the number of global steps that both have.
        reason: the cause of the difference, as text.
        changes: the differences of the two starts, those that explain the quantity first.
        tolerance: relative, for losses and norms; None if bits were compared.
        absolute_tolerance: the same as a difference.
        largest_error: the largest relative difference of a loss or norm; None if bits were compared.
        notes: limits of the comparison: damage, other numbers of steps or ranks.
    """

    step: int | None
    rank: int | None = None
    quantity: str | None = None
    values: tuple[str, str] = ("", "")
    parameters: tuple[str, ...] = ()
    same_until: int = 0
    compared: int = 0
    reason: str = ""
    changes: tuple[Change, ...] = ()
    tolerance: float | None = None
    absolute_tolerance: float | None = None
    largest_error: float | None = None
    notes: tuple[str, ...] = ()

    @property
    def same(self) -> bool:
        """Whether all that both recorded is the same, or within the tolerance."""
        return self.step is None

    def __str__(self) -> str:
        lines = [self.summary]
        if not self.same:
            lines += [f"  first:  {self.values[0]}", f"  second: {self.values[1]}"]
        lines += [f"  {self.reason}"] if self.reason else []
        if self.changes:
            lines += ["The starts differ in:", table_of(self.changes, sides=("first", "second"))]
        return "\n".join([*lines, *(f"Note: {note}." for note in self.notes)])

    @property
    def summary(self) -> str:
        """The result in one line."""
        if self.same and self.largest_error is not None:
            limits = {"relative": self.tolerance, "absolute": self.absolute_tolerance}
            words = " or ".join(f"{value:g} ({name})" for name, value in limits.items() if value is not None)
            return (
                f"same to a tolerance of {words} in {self.compared:,} global steps; the largest relative difference of "
                f"a loss or gradient norm is {self.largest_error:.2g}"
            )
        if self.same:
            return f"same records in {self.compared:,} global steps"
        where = f"global step {self.step:,}"
        where += f" on rank {self.rank}" if self.rank else ""
        until = f"; the same until global step {self.same_until:,}" if self.same_until else ""
        names = ", ".join(self.parameters[:_MOST_NAMES]) + (", ..." if len(self.parameters) > _MOST_NAMES else "")
        return f"the runs diverge at {where}: {self.quantity}{f' ({names})' if names else ''}{until}"


def compare_runs(
    one: str | os.PathLike[str],
    other: str | os.PathLike[str],
    *,
    tolerance: float | None = None,
    absolute_tolerance: float | None = None,
) -> RunComparison:
    """Find the first global step at which two runs diverge, and the cause, from their step logs alone.

    Logs of `record="full"` tell the exact step and the parameters. The default log tells the first step whose recorded
    value differs; random states and batches are recorded at log points, so they may have differed some steps earlier.
    Damaged logs are used as far as they are intact.

    With a tolerance, losses and gradient norms may differ within it, and learning rates, samples and skipped steps have
    to be the same. Digests of batches, random states, gradients and weights are then not compared.

    Args:
        one: the folder of a run, its `output_dir`.
        other: of another.
        tolerance: the largest relative difference of two losses or norms, as for `replay`; None to compare bits.
        absolute_tolerance: the largest difference. If both are given, a difference within one of them suffices.

    Raises:
        ConfigurationError: they have no global step in common, a run has no step log, or a tolerance is negative.
        CheckpointError: a log cannot be read.

    Examples:
        >>> folders = [f"runs/lr{lr}" for lr in (0.1, 0.2)]
        >>> for lr, folder in zip((0.1, 0.2), folders):
        ...     module = ts.SupervisedModule(
        ...         nn.Linear(1, 1),
        ...         nn.MSELoss(),
        ...         "sgd",
        ...         data,
        ...         optimizer_kwargs={"lr": lr},
        ...     )
        ...     ts.Trainer(module, replace(args, output_dir=folder)).train()
        >>> ts.compare_runs(*folders).step
        1
    """
    limits = _limits(tolerance, absolute_tolerance)
    folders = Path(one), Path(other)
    ranks = [_ranks_of(folder) for folder in folders]
    mine, theirs = ([read_step_log(folder, rank) for rank in own] for folder, own in zip(folders, ranks, strict=True))
    compared, notes = common_steps(mine[0], theirs[0]), tuple(_notes(folders, mine, theirs))
    if not compared:
        raise ConfigurationError(
            f"{folders[0]} and {folders[1]} have recorded no global step in common, so there is nothing to compare. "
            "Name two runs that have trained."
        )
    logs, first = _find_first(mine, theirs, limits)
    given: dict[str, Any] = {}
    if limits is not None:
        given = {"tolerance": tolerance, "absolute_tolerance": absolute_tolerance}
        given["largest_error"] = _largest_error(mine, theirs)
    changes = changes_between(*_starts(*logs, None if first is None else first.step))
    changes = [change for change in changes if change.effect is not Effect.SAME_BITS]
    if first is None:
        return RunComparison(step=None, compared=compared, changes=tuple(changes), notes=notes, **given)
    found = RunComparison(
        step=first.step,
        rank=logs[0].rank,
        quantity=first.quantity,
        values=first.values,
        parameters=first.parameters,
        same_until=first.same_until,
        compared=compared,
        notes=notes,
        **given,
    )
    return explained(found, changes, has_details=first.has_details)


def explained(found: RunComparison, changes: Sequence[Change], *, has_details: bool) -> RunComparison:
    """`found`, which names a step, with the reason and with `changes`, those that can explain the quantity first.

    Args:
        found: names the step and the quantity.
        changes: the differences of the two starts.
        has_details: whether both have digests of the batch and of random states in that step.
    """
    quantity = found.quantity or ""
    order = _CAUSES.get(quantity, ("arguments", "optimizers", "data", "environment", "code"))
    ordered = sorted(changes, key=lambda change: _place(change, order))
    return replace(found, reason=_reason(quantity, ordered, has_details), changes=tuple(ordered))


def _limits(tolerance: float | None, absolute_tolerance: float | None) -> Tolerance | None:
    for name, value in (("tolerance", tolerance), ("absolute_tolerance", absolute_tolerance)):
        if value is not None and not 0 <= value < float("inf"):
            raise ConfigurationError(f"{name}={value}: write a number from 0 up, such as 1e-4.")
    if tolerance is None and absolute_tolerance is None:
        return None
    return Tolerance(relative=tolerance or 0.0, absolute=absolute_tolerance or 0.0)


_Pair = tuple[StepLog, StepLog]


def _pairs(mine: Sequence[StepLog], theirs: Sequence[StepLog]) -> list[_Pair]:
    return [(log, twin) for log, twin in zip(mine, theirs, strict=False) if log.rank == twin.rank]


def _have_unlike_sizes(mine: Sequence[StepLog], theirs: Sequence[StepLog]) -> bool:
    return mine[0].segments[-1].world_size != theirs[0].segments[-1].world_size


def _find_first(
    mine: Sequence[StepLog], theirs: Sequence[StepLog], limits: Tolerance | None
) -> tuple[_Pair, FirstDifference | None]:
    """The logs of the rank that differs first, and its difference; those of the first rank, and None, if none does."""
    pairs = _pairs(mine, theirs)
    if _have_unlike_sizes(mine, theirs):
        return pairs[0], _over_ranks(mine, theirs, limits)
    for pair in pairs if limits is None else ():  # digests of weights have no tolerance
        weights = _unlike_weights(*pair)
        if weights:
            names = tuple(change.name.partition(".")[2] for change in weights)
            values = f"{names[0]} {weights[0].saved}", f"{names[0]} {weights[0].given}"
            step = int(pair[0].entries["step"][0])
            return pair, FirstDifference(step=step, quantity=START_WEIGHTS, values=values, parameters=names)
    each = [(pair, first_difference(*pair, tolerance=limits)) for pair in pairs]
    found = [(pair, difference) for pair, difference in each if difference is not None]
    return min(found, key=lambda one: (one[1].step, IN_STEP.index(one[1].quantity)), default=(pairs[0], None))


def _ranks_of(folder: Path) -> list[int]:
    ranks = ranks_of(folder)
    if not ranks:
        raise ConfigurationError(
            f"{folder} has no step log. Name the output_dir of a run that was trained with "
            "TrainerArguments(record='steps'), the default, or record='full'."
        )
    return ranks


def _unlike_weights(log: StepLog, twin: StepLog) -> list[Change]:
    """The parameters and buffers with which two runs began unlike, if they began at one place."""
    one, other = log.segments[0], twin.segments[0]
    if one.resumed_step != other.resumed_step:
        return []
    return changes_between(*(flat({"weights": start.description.get("weights", {})}) for start in (one, other)))


def _place(change: Change, order: Sequence[str]) -> tuple[bool, int]:
    section = change.name.partition(".")[0]
    return not change.effect.breaks_exactness, order.index(section) if section in order else len(order)


def _reason(quantity: str, changes: Sequence[Change], has_details: bool) -> str:
    causes = [change for change in changes if change.effect.breaks_exactness]
    if causes:
        shown = ", ".join(f"{c.name} ({c.saved} and {c.given})" for c in causes[:_MOST_NAMES])
        others = f", and {len(causes) - _MOST_NAMES} more" if len(causes) > _MOST_NAMES else ""
        more = _WORLD_SIZE if any(c.name == "environment.world size" for c in causes) else ""
        return f"because the starts differ: {shown}{others}.{more}"
    if quantity == START_WEIGHTS:
        return "because the runs began with other weights, by the same arguments and code: another random state before."
    cause = _UNEXPLAINED.get(quantity, _OPERATOR)
    unknown = "" if has_details else f"samples with other values under the same indices, or {_EARLIER}"
    unknown = f", {unknown}" if unknown else ""
    return f"The recorded starts do not differ, so the cause is {cause}{unknown}."


_WORLD_SIZE = (
    " With another number of processes the values agree up to rounding, and with dropout the model draws other masks."
)
_EARLIER = (
    "other random numbers: batches and random states are recorded at log points alone, and at each step with "
    "record='full'"
)
_OPERATOR = "an operator that is not deterministic, or weights that were changed between steps"
_UNEXPLAINED = {
    "data": "other samples, another order, or an augmentation that was edited or draws from a separate generator",
    "random state": "code that drew other random numbers, such as a hook",
    "learning rate": "a schedule or a hook that chose another rate",
    "skipped step": "an overflow or a non-finite value in one of them",
}


def _starts(one: StepLog, other: StepLog, step: int | None) -> tuple[dict[str, str], dict[str, str]]:
    """The descriptions of the segments that made global step `step`, or the first, without their weights."""
    found = list[dict[str, str]]()
    for log in (one, other):
        position = 0 if step is None else int(np.searchsorted(log.entries["step"], step))
        items = flat(log.segments[int(log.origins[position])].description)
        found.append({name: text for name, text in items.items() if not name.startswith("weights.")})
    return found[0], found[1]


_Column = np.ndarray[Any, np.dtype[Any]]


def _over_ranks(mine: Sequence[StepLog], theirs: Sequence[StepLog], limits: Tolerance | None) -> FirstDifference | None:
    """`first_difference` for unlike numbers of ranks: the loss of all ranks, norm, rates and skipped steps."""
    found = first_difference(mine[0], theirs[0], shares=False, tolerance=limits)
    steps, one, other = _common_losses(mine, theirs)
    exceeded = one.view("<u8") != other.view("<u8") if limits is None else limits.is_exceeded(one, other)
    differs = np.flatnonzero(exceeded)
    if not len(differs):
        return found
    at = int(differs[0])
    step, before = int(steps[at]), steps[:at]
    if found is not None and (found.step, IN_STEP.index(found.quantity)) < (step, IN_STEP.index("forward")):
        return found
    values = repr(float(one[at])), repr(float(other[at]))
    return FirstDifference(step=step, quantity="forward", values=values, same_until=int(before[-1]) if at else 0)


def _largest_error(mine: Sequence[StepLog], theirs: Sequence[StepLog]) -> float:
    """The largest relative difference of a loss or norm, over all ranks."""
    if not _have_unlike_sizes(mine, theirs):
        return max(largest_error(*pair) for pair in _pairs(mine, theirs))
    _, one, other = _common_losses(mine, theirs)
    of_losses = float(np.nanmax(relative_errors(one, other), initial=0.0))
    return max(of_losses, largest_error(mine[0], theirs[0], shares=False))


def _common_losses(mine: Sequence[StepLog], theirs: Sequence[StepLog]) -> tuple[_Column, _Column, _Column]:
    """The steps with a loss in both runs, and the losses of all ranks in them."""
    (steps, one), (others, other) = _total_losses(mine), _total_losses(theirs)
    common, here, there = np.intersect1d(steps, others, assume_unique=True, return_indices=True)
    return common, one[here], other[there]


def _total_losses(logs: Sequence[StepLog]) -> tuple[_Column, _Column]:
    """The steps that all ranks have recorded with a loss, and the sums of their shares."""
    shown = [log.entries[(log.entries["flags"] & np.uint32(Flag.HIDDEN)) == 0] for log in logs]
    steps = shown[0]["step"]
    for entries in shown[1:]:
        steps = np.intersect1d(steps, entries["step"], assume_unique=True)
    total = np.zeros(len(steps))
    for entries in shown:
        total += entries["loss"][np.searchsorted(entries["step"], steps)]
    return steps, total


def _notes(folders: tuple[Path, Path], mine: Sequence[StepLog], theirs: Sequence[StepLog]) -> Iterator[str]:
    for folder, logs in zip(folders, (mine, theirs), strict=True):
        for log in logs:
            damage = [log.damage] if log.damage else []
            yield from (f"{folder}, rank {log.rank}: {problem}" for problem in [*damage, *log.contradictions])
            if log.repeated:
                step = min(log.repeated)
                yield f"{folder}, rank {log.rank}: global step {step} was made twice after a resume, with other bits"
    last = [int(logs[0].entries["step"][-1]) if len(logs[0].entries) else 0 for logs in (mine, theirs)]
    if last[0] != last[1]:
        yield f"the first has {last[0]:,} global steps, the second {last[1]:,}; those of both are compared"
    if len(mine) != len(theirs):
        yield (
            f"the runs have {len(mine)} and {len(theirs)} ranks: sums of their losses are compared, and no digests of "
            "samples"
        )
