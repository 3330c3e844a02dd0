"""Compare sums of neighbouring datasets: with fixed random numbers, one record moves a sum by at most C."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

from tools.attacks.runs import (
    Kind,
    Outcome,
    Records,
    Settings,
    UserModule,
    make_records,
    never_drawn,
    play,
    same_telemetry,
    seed_with,
    unprobed,
)

TOLERANCE = 1e-3
"""For rounding, in units of C."""

_STEP = 3
RARE = 7
FULL = Settings(dataset_size=20, batch=20, epochs=4, sigma=0.0, debug_seed=1)
SAMPLED = Settings(dataset_size=24, batch=8, epochs=3, sigma=0.0, limit=0.2)
_UNCLIPPED = 3.0
"""A clipping norm above most gradients, so that a change of the scale of records is visible."""


@functools.cache
def sampled() -> Settings:
    """Nine steps at a rate of 1/3. The record `RARE` is only in step 3: later steps must not depend on it.

    The record before it is in step 5, which shows a dataset that mixes neighbours.
    """
    seed = seed_with(RARE, _STEP, SAMPLED, other=RARE - 1, later=_STEP + 2, steps=9)
    return replace(SAMPLED, debug_seed=seed)


@dataclass(frozen=True, slots=True, kw_only=True)
class Influence:
    """The distance by which one record moves the sums of a kind of user code.

    Attributes:
        moves: the largest distance between sums of neighbours in one step, in units of C, or of 2 C if a record is
            replaced; inf if the numbers of steps differ; None if no pair was trained.
        excess: the largest distance minus its bound, in units of C. The bound is C in a step with the record, 2 C if it
            is replaced, and 0 in a step without it. None if no pair was trained.
        refused: the number of pairs with a run that was refused before its first step.
        ended: the number of pairs with a run that was refused in a later step.
        pairs: the number of all pairs.
        mode: the gradient mode.
        reason: the refusal, or a caveat of the statement; empty without both.
        stated: whether the statement of each pair without a refusal excludes this user code.
        must_train: whether a refusal is a fault.
    """

    moves: float | None
    excess: float | None
    refused: int
    ended: int
    pairs: int
    mode: str
    reason: str
    stated: bool
    must_train: bool

    @property
    def holds(self) -> bool:
        """Whether the guarantee holds, or none was given."""
        if self.must_train and (self.outcome != "trained" or self.stated):
            return False
        return self.excess is None or self.stated or self.excess <= TOLERANCE

    @property
    def outcome(self) -> str:
        """The result in one or two words."""
        if self.refused == self.pairs:
            return "refused"
        if self.stated:
            return "stated"
        return f"refused {self.refused}/{self.pairs}" if self.refused else "ended" if self.ended else "trained"


@functools.cache
def _usual(settings: Settings) -> tuple[frozenset[str], frozenset[str]]:
    """The caveats in the statement of plain user code under these settings."""
    kind = Kind(name="plain", module=UserModule)
    statement = play(kind, make_records(settings.dataset_size, RARE), settings).statement
    assert statement is not None, f"plain user code is refused under {settings}, so refusals prove nothing"
    return frozenset(statement.overrides), frozenset(statement.not_covered)


def caveats(outcome: Outcome, settings: Settings) -> list[str]:
    """The caveats in the statement beyond those of plain user code with the same settings."""
    if outcome.statement is None:
        return []
    overrides, not_covered = _usual(settings)
    found = [text for text in outcome.statement.overrides if text not in overrides]
    return found + [text for text in outcome.statement.not_covered if text not in not_covered]


def influence_of(kind: Kind, *, short: bool = False) -> Influence:
    """Train neighbours of every form, and compare their sums; `short` omits half of the forms."""
    full, size = FULL, kind.rare_in
    if size is not None:
        full = replace(FULL, dataset_size=size, batch=size, epochs=1, limit=_UNCLIPPED)
    found = []
    for settings in (full, sampled()):
        _usual(settings)
        found += [_compare(*pair) for pair in _pairs(kind, settings, short)]
    distances = [pair for pair in found if pair["moves"] is not None]
    reasons = [pair["reason"] for pair in found if pair["reason"]]
    return Influence(
        moves=max((pair["moves"] for pair in distances), default=None),
        excess=max((pair["excess"] for pair in distances), default=None),
        refused=sum(pair["moves"] is None for pair in found),
        ended=sum(pair["ended"] for pair in found),
        pairs=len(found),
        mode=next((pair["mode"] for pair in found if pair["mode"]), "-"),
        reason=reasons[0] if reasons else "",
        stated=bool(distances) and all(pair["stated"] for pair in distances),
        must_train=kind.must_train,
    )


Pair = tuple[Outcome, Outcome, dict[int, float] | float, Settings]


def _pairs(kind: Kind, settings: Settings, short: bool) -> Iterator[Pair]:
    """Two outcomes of neighbours, and the allowed distance in each step, or in all steps."""
    records = make_records(settings.dataset_size, RARE)
    everywhere = settings.batch == settings.dataset_size
    telemetry: list[dict[str, float]] = []
    with same_telemetry(telemetry):
        whole = play(kind, records, settings)

    def play_other(data: Records) -> Outcome:
        # with `short`, only the run before compares neighbours
        with same_telemetry(telemetry), unprobed() if short else nullcontext():
            return play(kind, data, settings)

    for index in (RARE, 0) if not short else (RARE,) if everywhere else ():
        with never_drawn(index) as steps:
            other = play_other(records)
        yield whole, other, dict.fromkeys(steps, 1.0), settings
    if not (short and everywhere):
        yield whole, play_other(records.replaced(RARE, by=0)), 2.0 if everywhere else {_STEP: 2.0}, settings
    if everywhere and not short:  # without the last record, all others keep their indices
        yield whole, play_other(records.without(len(records) - 1)), 1.0, settings


def _compare(first: Outcome, second: Outcome, allowed: dict[int, float] | float, settings: Settings) -> dict[str, Any]:
    both = (first, second)
    refusal = next((one.refused for one in both if one.refused), None)
    modes = {one.statement.grad_mode for one in both if one.statement is not None}
    notes = [*caveats(first, settings), *caveats(second, settings)]
    result = {
        "mode": "/".join(sorted(modes)),
        "reason": refusal or (notes[0] if notes else ""),
        "ended": refusal is not None,
        "stated": bool(notes),
        "moves": None,
        "excess": None,
    }
    steps = min(len(first.sums), len(second.sums))
    if steps == 0:
        return result
    distances = (first.sums[:steps] - second.sums[:steps]).norm(dim=1).tolist()
    limits = [allowed if isinstance(allowed, float) else allowed.get(step, 0.0) for step in range(1, steps + 1)]
    excess = max(distance - limit for distance, limit in zip(distances, limits, strict=True))
    distances = [distance / max(limit, 1.0) for distance, limit in zip(distances, limits, strict=True)]
    if refusal is None and len(first.sums) != len(second.sums):
        distances, excess = [math.inf], math.inf
    return {**result, "moves": max(distances), "excess": excess}
