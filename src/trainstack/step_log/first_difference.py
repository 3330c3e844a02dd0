"""`first_difference`: the first global step at which two step logs of one rank differ, and the quantity."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from trainstack.step_log.format import Details, Flag
from trainstack.step_log.reading import NEEDS, Entries, StepLog

IN_STEP = ("data", "random state", "forward", "backward", "learning rate", "skipped step", "optimizer")
"""The quantities of a step, in the order of their computation."""

_OF_FIELD = {
    "epoch": "data",
    "samples": "data",
    "loss": "forward",
    "norm": "backward",
    "rates": "learning rate",
    "flags": "skipped step",
}


Values = np.ndarray[Any, np.dtype[np.float64]]


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstDifference:
    """The first global step of one rank whose records differ.

    Attributes:
        step: the global step.
        quantity: the first of `IN_STEP` that differs in it.
        values: the values of both logs, as texts; digests in hexadecimal digits.
        parameters: the names of those whose gradient, weight or optimizer state differs, if these are recorded.
        same_until: the last step before it in which all common records are equal; 0 if there is none.
        has_details: whether both have details of the step: digests of its batch and of random states.
    """

    step: int
    quantity: str
    values: tuple[str, str]
    parameters: tuple[str, ...] = ()
    same_until: int = 0
    has_details: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Tolerance:
    """Limits below which two losses or gradient norms count as equal; a difference within one of them suffices.

    Attributes:
        relative: fraction of the larger magnitude.
        absolute: the largest difference.
    """

    relative: float
    absolute: float

    def is_exceeded(self, one: Values, other: Values) -> np.ndarray[Any, np.dtype[np.bool_]]:
        """Whether the values at each place differ by more than both limits. nan equals nan."""
        with np.errstate(invalid="ignore"):
            is_close = np.abs(one - other) <= self.absolute
        return ~(is_close | (relative_errors(one, other) <= self.relative))


def relative_errors(one: Values, other: Values) -> Values:
    """The differences as fractions of the larger magnitude; 0 where both are the same, or both nan."""
    scale = np.maximum(np.maximum(np.abs(one), np.abs(other)), np.finfo("f8").tiny)
    with np.errstate(invalid="ignore"):
        error = np.abs(one - other) / scale
    return np.where((np.isnan(one) & np.isnan(other)) | (one == other), 0.0, error)


def largest_error(one: StepLog, other: StepLog, *, shares: bool = True) -> float:
    """The largest relative difference of a norm, or with `shares` of a loss, in the steps of both logs. nan is skipped.

    Args:
        one: a log.
        other: of the same rank of another run, or of another number of ranks.
        shares: whether the ranks have the same samples in both, so that losses are compared.
    """
    mine, theirs = _aligned(one.entries, other.entries)
    worst = 0.0
    for name in ("norm", *(["loss"] if shares else [])):
        known = _is_comparable(mine, theirs, name)
        errors = relative_errors(mine[name][known], theirs[name][known])
        worst = max(worst, float(np.nanmax(errors, initial=0.0)))
    return worst


def common_steps(one: StepLog, other: StepLog) -> int:
    """The number of global steps that both have recorded."""
    return len(_aligned(one.entries, other.entries)[0])


def first_difference(
    one: StepLog, other: StepLog, *, shares: bool = True, tolerance: Tolerance | None = None
) -> FirstDifference | None:
    """The first difference of two logs; None if all common records are equal.

    Args:
        one: a log.
        other: of the same rank of another run, or of another number of ranks.
        shares: whether the ranks have the same samples in both, so that losses and digests of samples are compared.
        tolerance: for losses and norms; None to compare bits. With it, digests of batches, random states and tensors
            are not compared.
    """
    mine, theirs = _aligned(one.entries, other.entries)
    fields = dict(_OF_FIELD) if shares else {"norm": "backward", "rates": "learning rate", "flags": "skipped step"}
    found = _first_entries(mine, theirs, fields, tolerance)
    with_details = shares and tolerance is None
    known = sorted(set(one.steps_with_details()) & set(other.steps_with_details())) if with_details else []
    unlike = unlike_generators(one, other, known)
    in_details = _first_details(one, other, known, min(found.values(), default=None), unlike)
    steps = [*found.values(), *([in_details] if in_details is not None else [])]
    if not steps:
        return None
    step = min(steps)
    differing = {fields[name]: _texts(mine, theirs, name, step) for name, at in found.items() if at == step}
    parameters: tuple[str, ...] = ()
    if step in known:
        differing = _in_details(one.details(step), other.details(step), unlike) | differing
        parameters = differing_parameters(one.details(step), other.details(step))
    is_first = step == int(mine["step"][0])
    drawn = [texts for texts, is_used in unlike.values() if (is_first if is_used is None else is_used)]
    if drawn and "data" not in differing and not {"forward", "backward", "optimizer"}.isdisjoint(differing):
        differing["random state"] = drawn[0]
    quantity = next(name for name in IN_STEP if name in differing)
    before = int(np.searchsorted(mine["step"], step))
    same_until = int(mine["step"][before - 1]) if before else 0
    return FirstDifference(
        step=step,
        quantity=quantity,
        values=differing[quantity],
        parameters=parameters,
        same_until=same_until,
        has_details=step in known,
    )


def _aligned(one: Entries, other: Entries) -> tuple[Entries, Entries]:
    """The entries of the steps that both have."""
    count = min(len(one), len(other))
    if np.array_equal(one["step"][:count], other["step"][:count]):  # the usual case of two runs from the start
        return one[:count], other[:count]
    _, mine, theirs = np.intersect1d(one["step"], other["step"], assume_unique=True, return_indices=True)
    return one[mine], other[theirs]


def _first_entries(
    mine: Entries, theirs: Entries, fields: Mapping[str, str], tolerance: Tolerance | None
) -> dict[str, int]:
    """The first step at which each field differs, for fields that differ."""
    found = dict[str, int]()
    for name in fields:
        if tolerance is not None and mine[name].dtype.kind == "f":
            differs = tolerance.is_exceeded(mine[name], theirs[name])
        else:
            differs = _bits(mine, name) != _bits(theirs, name)
        differs &= _is_comparable(mine, theirs, name)
        position = int(differs.argmax()) if len(differs) else 0
        if len(differs) and differs[position]:
            found[name] = int(mine["step"][position])
    return found


def _is_comparable(mine: Entries, theirs: Entries, name: str) -> np.ndarray[Any, np.dtype[np.bool_]]:
    """Whether both have recorded the field, in each entry."""
    if name == "loss":
        hidden: np.ndarray[Any, np.dtype[np.bool_]] = (mine["flags"] | theirs["flags"]) & np.uint32(Flag.HIDDEN) == 0
        return hidden
    needed = np.uint32(NEEDS.get(name, 0))
    both: np.ndarray[Any, np.dtype[np.bool_]] = (mine["flags"] & theirs["flags"] & needed) == needed
    return both


def _bits(entries: Entries, name: str) -> np.ndarray[Any, Any]:
    values: np.ndarray[Any, Any] = entries[name]
    if name == "flags":
        values = values & np.uint32(Flag.SKIPPED)
    elif values.dtype.kind == "f":
        values = values.view("<u8")
    return values


def _texts(mine: Entries, theirs: Entries, name: str, step: int) -> tuple[str, str]:
    position = int(np.searchsorted(mine["step"], step))
    one, other = (side[name][position] for side in (mine, theirs))
    if name == "flags":
        words = ["skipped" if int(value) & Flag.SKIPPED else "made" for value in (one, other)]
        return words[0], words[1]
    if name in ("loss", "norm"):
        return _exactly(float(one)), _exactly(float(other))
    if name == "epoch":
        return f"epoch {one}", f"epoch {other}"
    return f"digest {int(one):016x}", f"digest {int(other):016x}"


def _exactly(value: float) -> str:
    """`value` as decimal text, and its bits."""
    return f"{value!r} ({value.hex()})"


# --- details


_Unlike = Mapping[str, tuple[tuple[str, str], bool | None]]


def unlike_generators(one: StepLog, other: StepLog, known: Sequence[int]) -> _Unlike:
    """The random generators with different initial states: both digests, and whether one of the runs drew from it.

    None means that this is unknown, because both have details of only one step.

    An unseeded generator begins with another state in each process. If no code draws from it, this has no effect;
    otherwise the values of the steps show it.
    """
    if not known:
        return {}
    details = [log.details(step) for step in (known[0], known[-1]) for log in (one, other)]
    begun, begun_too, ended, ended_too = ({} if own is None else own.generators for own in details)
    return {
        name: (
            (f"{name} {state:016x}", f"{name} {begun_too[name]:016x}"),
            None if len(known) == 1 else ended.get(name) != state or ended_too.get(name) != begun_too[name],
        )
        for name, state in begun.items()
        if begun_too.get(name, state) != state
    }


def _first_details(one: StepLog, other: StepLog, known: Sequence[int], last: int | None, unlike: _Unlike) -> int | None:
    """The first step up to `last` whose details differ, by bisection: runs that have diverged do not become equal
    again.
    """
    steps = [step for step in known if last is None or step <= last]
    if not steps or not _differ(one, other, steps[-1], unlike):
        return None
    low, high = -1, len(steps) - 1  # the details at `high` differ, those at `low` do not
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if _differ(one, other, steps[middle], unlike) else (middle, high)
    return steps[high]


_PARTS = {"gradients": "backward", "weights": "optimizer", "optimizer_states": "optimizer"}


def _differ(one: StepLog, other: StepLog, step: int, unlike: _Unlike) -> bool:
    return bool(_in_details(one.details(step), other.details(step), unlike))


def _in_details(one: Details | None, other: Details | None, unlike: _Unlike) -> dict[str, tuple[str, str]]:
    """The quantities that differ, without `unlike` generators, and the digests of the first tensor or generator."""
    if one is None or other is None:
        return {}
    found = dict[str, tuple[str, str]]()
    if one.batch is not None and other.batch is not None and one.batch != other.batch:
        found["data"] = f"{one.batch:016x}", f"{other.batch:016x}"
    for name, digest in one.generators.items():
        differs = name not in unlike and other.generators.get(name, digest) != digest
        if differs and "random state" not in found:
            found["random state"] = f"{name} {digest:016x}", f"{name} {other.generators[name]:016x}"
    if list(one.parameters) == list(other.parameters):
        for part, quantity in _PARTS.items():
            mine, theirs = getattr(one, part), getattr(other, part)
            places = np.flatnonzero(mine != theirs)
            if len(places) and quantity not in found:
                at = int(places[0])
                name = one.parameters[at]
                found[quantity] = f"{name} {int(mine[at]):016x}", f"{name} {int(theirs[at]):016x}"
    return found


def differing_parameters(one: Details | None, other: Details | None) -> tuple[str, ...]:
    """The parameters with a different digest, in the order of the module."""
    if one is None or other is None or list(one.parameters) != list(other.parameters):
        return ()
    differs = np.zeros(len(one.parameters), bool)
    for part in _PARTS:
        differs |= getattr(one, part) != getattr(other, part)
    return tuple(one.parameters[int(at)] for at in np.flatnonzero(differs))
