"""Comparison of two step logs: the first step that differs, and the quantity."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from trainstack.replaying.report import QUANTITIES, StepDifference
from trainstack.step_log import Details, Flag, StepLog
from trainstack.step_log.first_difference import relative_errors

Entries = np.ndarray[Any, np.dtype[Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """Steps that are compared, from `first` to `last`, both included."""

    first: int
    last: int

    def of(self, log: StepLog) -> Entries:
        """The entries of these steps."""
        steps = log.entries["step"]
        return log.entries[(steps >= self.first) & (steps <= self.last)]


def first_difference(recorded: Sequence[StepLog], replayed: Sequence[StepLog], span: Span) -> StepDifference | None:
    """The first step in which the logs of the ranks differ; None if there is none in `span`.

    Steps that one of the logs lacks are ignored. Within a step the order is that of `QUANTITIES`, then of the ranks.
    """
    found = [
        one
        for rank, pair in enumerate(zip(recorded, replayed, strict=True))
        for one in (_in_entries(*pair, span, rank), _in_details(*pair, span, rank))
        if one is not None
    ]
    return min(found, key=lambda one: (one.step, QUANTITIES.index(one.quantity), one.rank), default=None)


def count_details(recorded: StepLog, replayed: StepLog, span: Span) -> int:
    """The number of steps of the span that have details in both logs."""
    return sum(_details(recorded, replayed, step) is not None for step in span.of(recorded)["step"].tolist())


def _in_entries(recorded: StepLog, replayed: StepLog, span: Span, rank: int) -> StepDifference | None:
    one, other = span.of(recorded), span.of(replayed)
    common = np.intersect1d(one["step"], other["step"])
    one, other = (side[np.isin(side["step"], common)] for side in (one, other))
    differ = {
        "data": (one["samples"] != other["samples"]) & ((one["flags"] & other["flags"] & Flag.SAMPLES) != 0),
        "learning rate": one["rates"] != other["rates"],
        "forward": _bits(one["loss"]) != _bits(other["loss"]),
        "backward": (_bits(one["norm"]) != _bits(other["norm"])) | _flag_differs(one, other, Flag.NORM),
        "skipped step": _flag_differs(one, other, Flag.SKIPPED),
    }
    return _first_of(differ, one, other, rank)


def _first_of(differ: Mapping[str, Any], one: Entries, other: Entries, rank: int) -> StepDifference | None:
    """The first of these entries in which a quantity differs; `differ` has a bool for each of them, by quantity."""
    any_differs = np.logical_or.reduce(list(differ.values()))
    if not any_differs.any():
        return None
    place = int(np.argmax(any_differs))
    quantity = next(name for name in QUANTITIES if name in differ and differ[name][place])
    return StepDifference(
        step=int(one["step"][place]),
        quantity=quantity,
        rank=rank,
        recorded=_describe(quantity, one[place]),
        replayed=_describe(quantity, other[place]),
    )


def _flag_differs(one: Entries, other: Entries, flag: Flag) -> Any:
    return ((one["flags"] ^ other["flags"]) & flag) != 0


def _bits(values: Any) -> Any:
    return np.ascontiguousarray(values).view("<u8")


def _describe(quantity: str, entry: Any) -> str:
    if quantity == "forward":
        return f"loss {float(entry['loss'])!r}"
    if quantity == "backward":
        return f"gradient norm {float(entry['norm'])!r}" if int(entry["flags"]) & Flag.NORM else "no gradient norm"
    if quantity == "skipped step":
        return "a skipped step" if int(entry["flags"]) & Flag.SKIPPED else "a step"
    name, field = ("samples", "samples") if quantity == "data" else ("learning rates", "rates")
    return f"{name} with digest {int(entry[field]):016x}"


def _in_details(recorded: StepLog, replayed: StepLog, span: Span, rank: int) -> StepDifference | None:
    for step in span.of(recorded)["step"].tolist():
        pair = _details(recorded, replayed, step)
        found = None if pair is None else _between(*pair, rank)
        if found is not None:
            return found
    return None


def _details(recorded: StepLog, replayed: StepLog, step: int) -> tuple[Details, Details] | None:
    one, other = recorded.details(step), replayed.details(step)
    return None if one is None or other is None else (one, other)


def _between(one: Details, other: Details, rank: int) -> StepDifference | None:
    """The first quantity of a step whose digests differ."""
    if one.batch is not None and other.batch is not None and one.batch != other.batch:
        return _digests(one.step, "data", rank, ("batch", one.batch, other.batch))
    for name, digest in one.generators.items():
        if other.generators.get(name, digest) != digest:
            return _digests(one.step, "random state", rank, (f"state of {name}", digest, other.generators[name]))
    for quantity, field in (("backward", "gradients"), ("optimizer", "weights"), ("optimizer", "optimizer_states")):
        place = _first_place(one, other, field)
        if place is not None:
            name, words = one.parameters[place], field.replace("_", " ").removesuffix("s")
            mine, theirs = (int(getattr(side, field)[place]) for side in (one, other))
            return _digests(one.step, quantity, rank, (f"{words} of {name}", mine, theirs), name)
    return None


def _first_place(one: Details, other: Details, field: str) -> int | None:
    if tuple(one.parameters) != tuple(other.parameters):
        return None
    places = np.flatnonzero(getattr(one, field) != getattr(other, field))
    return int(places[0]) if len(places) else None


def _digests(
    step: int, quantity: str, rank: int, found: tuple[str, int, int], parameter: str | None = None
) -> StepDifference:
    what, one, other = found
    return StepDifference(
        step=step,
        quantity=quantity,
        rank=rank,
        recorded=f"{what} with digest {one:016x}",
        replayed=f"{what} with digest {other:016x}",
        parameter=parameter,
        shown_by="" if parameter is None else f"The first parameter that differs in this step is {parameter}.",
    )


def parameter_of(recorded: StepLog, replayed: StepLog, step: int) -> str | None:
    """The first parameter whose gradient, or else weight, differs in a step; None if no details show it."""
    pair = _details(recorded, replayed, step)
    if pair is None:
        return None
    for field in ("gradients", "weights", "optimizer_states"):
        place = _first_place(*pair, field)
        if place is not None:
            return pair[0].parameters[place]
    return None


def compare_to_tolerance(
    recorded: Sequence[StepLog], replayed: Sequence[StepLog], span: Span, tolerance: float
) -> tuple[StepDifference | None, float]:
    """The first step that differs on another number of ranks, and the largest relative error of a loss or norm.

    The global loss is the sum of the ranks' shares, and each rank has the whole norm: they may differ by `tolerance` of
    their magnitude. Learning rates and skipped steps have to be equal. Samples are not compared.
    """
    one, other = _of_all_ranks(recorded, span), _of_all_ranks(replayed, span)
    common = np.intersect1d(one["step"], other["step"])
    one, other = (side[np.isin(side["step"], common)] for side in (one, other))
    errors = {
        "forward": relative_errors(one["loss"], other["loss"]),
        "backward": relative_errors(one["norm"], other["norm"]),
    }
    worst = max((float(np.nanmax(error, initial=0.0)) for error in errors.values()), default=0.0)
    differ = {
        "learning rate": one["rates"] != other["rates"],
        **{quantity: ~(error <= tolerance) for quantity, error in errors.items()},
        "skipped step": _flag_differs(one, other, Flag.SKIPPED),
    }
    return _first_of(differ, one, other, 0), worst


def _of_all_ranks(logs: Sequence[StepLog], span: Span) -> Entries:
    """The entries of rank 0 for the steps that all ranks have, with the global loss; a missing norm is nan."""
    parts = [span.of(log) for log in logs]
    steps = parts[0]["step"]
    for part in parts[1:]:
        steps = np.intersect1d(steps, part["step"])
    parts = [part[np.isin(part["step"], steps)] for part in parts]
    whole: Entries = parts[0].copy()
    whole["loss"] = np.sum([part["loss"] for part in parts], axis=0)
    whole["norm"] = np.where((whole["flags"] & Flag.NORM) != 0, whole["norm"], np.nan)
    return whole
