"""Two step logs are compared bit by bit: the first step that differs, and the first quantity within it."""

from __future__ import annotations

import struct
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from trainstack.replaying.comparison import Span, compare_to_tolerance, first_difference
from trainstack.replaying.report import QUANTITIES, ReplayReport
from trainstack.step_log import ENTRY, Details, Flag

NAN = struct.unpack("<d", struct.pack("<Q", 0x7FF8000000000001))[0]


WHOLE = Span(first=1, last=6)


class Log:
    """The part of a `StepLog` that a comparison uses, in memory."""

    def __init__(self, entries: Any, known: dict[int, Details]) -> None:
        self.entries, self.known = entries, known

    def details(self, step: int) -> Details | None:
        return self.known.get(step)


def log_of(steps: int = 6, details: dict[int, Details] | None = None, **changes: Any) -> Any:
    """Steps 1 to `steps`; `changes` are fields with their values at some steps."""
    entries = np.zeros(steps, ENTRY)
    entries["step"] = np.arange(1, steps + 1)
    entries["flags"] = int(Flag.NORM | Flag.SAMPLES)
    entries["loss"], entries["norm"] = 0.5 / entries["step"], 2.0
    entries["samples"], entries["rates"] = entries["step"] * 7, 3
    for name, values in changes.items():
        for step, value in values.items():
            entries[name][step - 1] = value
    return Log(entries, details or {})


def found(one: Any, other: Any, span: Span = WHOLE) -> tuple[int, str] | None:
    difference = first_difference([one], [other], span)
    return None if difference is None else (difference.step, difference.quantity)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, None),
        ({"samples": {4: 0}}, (4, "data")),
        ({"rates": {4: 0}, "loss": {4: 0.0}}, (4, "learning rate")),
        ({"loss": {4: 0.125000001}, "norm": {3: 2.5}}, (3, "backward")),
        ({"loss": {2: -0.25}, "samples": {3: 0}}, (2, "forward")),
        ({"flags": {5: int(Flag.NORM | Flag.SAMPLES | Flag.SKIPPED)}}, (5, "skipped step")),
        ({"flags": {5: int(Flag.SAMPLES)}}, (5, "backward")),
        ({"flags": {5: int(Flag.NORM)}, "samples": {5: 0}}, None),  # the indices are not known
    ],
)
def test_the_first_difference_has_its_step_and_quantity(changes: Any, expected: tuple[int, str] | None) -> None:
    assert found(log_of(), log_of(**changes)) == expected


def test_bits_are_compared_and_not_values() -> None:
    assert found(log_of(loss={3: NAN}), log_of(loss={3: NAN})) is None
    assert found(log_of(loss={3: 0.0}), log_of(loss={3: -0.0})) == (3, "forward")
    assert found(log_of(loss={3: 1.0}), log_of(loss={3: np.nextafter(1.0, 2.0)})) == (3, "forward")


def test_only_steps_of_the_span_are_compared() -> None:
    changed = log_of(loss={2: 9.0, 6: 9.0})
    assert found(log_of(), changed, Span(first=3, last=5)) is None
    assert found(log_of(), changed, Span(first=3, last=6)) == (6, "forward")


def details(step: int = 4, **changes: Any) -> dict[int, Details]:
    values: dict[str, Any] = {"batch": 1, "generators": {"cpu": 5, "numpy": 6}, "parameters": ("a", "b")}
    values |= {name: np.array([1, 2], "<u8") for name in ("gradients", "weights", "optimizer_states")}
    return {step: Details(step=step, **{**values, **changes})}


@pytest.mark.parametrize(
    ("changes", "expected", "parameter"),
    [
        ({"batch": 2}, (4, "data"), None),
        ({"batch": None}, None, None),
        ({"generators": {"cpu": 5, "numpy": 7}}, (4, "random state"), None),
        ({"gradients": np.array([1, 3], "<u8"), "weights": np.array([3, 3], "<u8")}, (4, "backward"), "b"),
        ({"weights": np.array([3, 3], "<u8")}, (4, "optimizer"), "a"),
        ({"optimizer_states": np.array([1, 3], "<u8")}, (4, "optimizer"), "b"),
    ],
)
def test_details_show_the_quantity_and_the_parameter(
    changes: Any, expected: tuple[int, str] | None, parameter: str | None
) -> None:
    one, other = log_of(details=details()), log_of(details=details(**changes))
    assert found(one, other) == expected
    difference = first_difference([one], [other], WHOLE)
    assert (difference.parameter if difference else None) == parameter


def test_the_earliest_quantity_of_a_step_is_reported() -> None:
    """A batch that differs changes the loss: the cause comes first."""
    one, other = log_of(details=details()), log_of(details=details(batch=2), loss={4: 9.0})
    assert found(one, other) == (4, "data")
    assert QUANTITIES.index("data") < QUANTITIES.index("forward") < QUANTITIES.index("optimizer")


def test_each_rank_is_compared_with_the_same_rank() -> None:
    difference = first_difference([log_of(), log_of()], [log_of(), log_of(loss={5: 9.0})], Span(first=1, last=6))
    assert difference is not None
    assert (difference.step, difference.rank, difference.quantity) == (5, 1, "forward")


def test_the_global_loss_compares_different_numbers_of_ranks() -> None:
    """Each rank has its share of the loss; the norm is the same on all."""
    halves = [log_of(loss={step: 0.25 / step for step in range(1, 7)}) for _ in range(2)]
    span = Span(first=1, last=6)
    assert compare_to_tolerance([log_of()], halves, span, 1e-9) == (None, 0.0)
    difference, worst = compare_to_tolerance([log_of(norm={3: 2.0002})], halves, span, 1e-5)
    assert difference is not None
    assert (difference.step, difference.quantity) == (3, "backward")
    assert worst == pytest.approx(1e-4, rel=1e-2)
    assert compare_to_tolerance([log_of(norm={3: 2.0002})], halves, span, 1e-3)[0] is None
    difference, _ = compare_to_tolerance([log_of(rates={2: 9})], halves, span, 1.0)
    assert difference is not None
    assert (difference.step, difference.quantity) == (2, "learning rate")
    difference, _ = compare_to_tolerance([log_of(loss={2: float("nan")})], halves, span, 1.0)
    assert difference is not None
    assert (difference.step, difference.quantity) == (2, "forward")


def test_the_verdict_counts_steps_with_details() -> None:
    report = ReplayReport(
        run="a", backend="sp", nproc=1, first_step=1, last_step=6, began_from=None, mode="steps", details=1
    )
    assert report.verdict.endswith("random states of 1 step)")
    assert replace(report, details=2).verdict.endswith("random states of 2 steps)")
