"""Placeholders represent numbers of the plan; arithmetic on them is evaluated when the plan is known."""

from __future__ import annotations

import copy
import functools
import math
import operator
import pickle
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import trainstack as ts
from trainstack.trainer.schedulers import placeholders
from trainstack.trainer.schedulers.placeholders import (
    NUM_EPOCHS,
    NUM_UPDATE_STEPS_PER_EPOCH,
    STEPS_PER_EPOCH,
    TOTAL_STEPS,
    resolve,
)

PLAN = ts.TrainingPlan.make(train_batch_size=8, gpu_batch_size_limit=4, world_size=2, epochs=3, dataset_length=41)

LEAVES = st.sampled_from(
    [(NUM_EPOCHS, 3), (STEPS_PER_EPOCH, 6), (NUM_UPDATE_STEPS_PER_EPOCH, 6), (TOTAL_STEPS, 18)]
) | st.integers(-20, 20).map(lambda number: (number, number))
BINARY = st.sampled_from([operator.add, operator.sub, operator.mul, operator.truediv, operator.floordiv])
UNARY = st.sampled_from([operator.neg, round, math.floor, math.ceil])


def both(function: Callable[..., Any], *pairs: tuple[Any, Any]) -> tuple[Any, Any]:
    """The same arithmetic on the lazy and on the known operands."""
    try:
        known = function(*(known for _, known in pairs))
    except ZeroDivisionError:
        known = math.nan
    if all(not isinstance(lazy, placeholders.Lazy) for lazy, _ in pairs):
        return known, known
    return function(*(lazy for lazy, _ in pairs)), known


def _touches_nan(known: Any) -> bool:
    return isinstance(known, float) and not math.isfinite(known)


@pytest.mark.spec("PA-15", "F212")
@given(pair=st.builds(both, BINARY, LEAVES, LEAVES) | st.builds(both, UNARY, LEAVES))
def test_one_operation_has_the_same_result_as_with_the_numbers(pair: tuple[Any, Any]) -> None:
    lazy, known = pair
    if _touches_nan(known):
        if isinstance(lazy, placeholders.Lazy):
            with pytest.raises(ts.ConfigurationError, match="cannot be computed with the numbers of this run"):
                resolve(lazy, PLAN)
    else:
        assert resolve(lazy, PLAN) == known


@pytest.mark.spec("PA-15", "F212")
@given(data=st.data())
def test_nested_arithmetic_has_the_same_result_as_with_the_numbers(data: st.DataObject) -> None:
    tree = data.draw(st.recursive(LEAVES, lambda inner: st.tuples(BINARY, inner, inner), max_leaves=8))

    def lazily(node: Any) -> Any:
        return node[0](lazily(node[1]), lazily(node[2])) if len(node) == 3 else node[0]

    def known(node: Any) -> Any:
        return node[0](known(node[1]), known(node[2])) if len(node) == 3 else node[1]

    try:
        expected = known(tree)
    except ZeroDivisionError:
        return
    result = resolve(lazily(tree), PLAN)

    assert result == expected
    assert type(result) is type(expected)


@pytest.mark.spec("PA-15", "F212")
def test_both_orders_of_the_operands_and_brackets_work() -> None:
    assert resolve(2 * NUM_EPOCHS, PLAN) == resolve(NUM_EPOCHS * 2, PLAN) == 6
    assert resolve((NUM_EPOCHS + 1) * 2, PLAN) == 8
    assert resolve(100 - TOTAL_STEPS, PLAN) == 82
    assert resolve(100 / NUM_EPOCHS, PLAN) == 100 / 3
    assert resolve(100 // NUM_EPOCHS, PLAN) == 33
    assert resolve(round(0.1 * TOTAL_STEPS), PLAN) == 2
    assert resolve(round(TOTAL_STEPS / 7, 2), PLAN) == 2.57


class Pair(NamedTuple):
    first: Any
    second: Any


@pytest.mark.spec("PA-15", "F212")
def test_nested_placeholders_are_resolved_and_other_values_kept() -> None:
    thing = object()
    nested = {
        "partial": functools.partial(dict, [("a", NUM_EPOCHS)], b={"c": (1, [TOTAL_STEPS * 2])}, d="TOTAL_STEPS"),
        "pair": Pair(STEPS_PER_EPOCH, thing),
    }
    found = resolve(nested, PLAN)

    assert found["partial"]() == {"a": 3, "b": {"c": (1, [36])}, "d": "TOTAL_STEPS"}
    assert found["pair"] == Pair(6, thing)
    assert nested["pair"] == Pair(STEPS_PER_EPOCH, thing)


@pytest.mark.parametrize(
    "use",
    [int, float, bool, range, lambda x: x > 3, lambda x: x >= 3, lambda x: [1, 2][x], lambda x: max(1, x), math.trunc],
)
def test_a_placeholder_that_is_used_early_raises_an_error(use: Callable[[Any], Any]) -> None:
    with pytest.raises(ts.ConfigurationError, match=r"NUM_EPOCHS \* 2 has no value before the run's plan exists"):
        use(NUM_EPOCHS * 2)


def test_a_torch_scheduler_refuses_an_unresolved_placeholder() -> None:
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)

    with pytest.raises(ts.ConfigurationError, match="TOTAL_STEPS has no value before the run's plan exists"):
        torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=TOTAL_STEPS)  # type: ignore[arg-type]


def test_operands_other_than_numbers_are_refused() -> None:
    for wrong in ("2", None, [1], True):
        with pytest.raises(TypeError, match=r"unsupported operand|can only concatenate"):
            NUM_EPOCHS + wrong


def test_an_unknown_length_is_an_error_with_a_correction() -> None:
    sizes = {"train_batch_size": 8, "gpu_batch_size_limit": 4, "epochs": 3, "max_steps_per_epoch": 3}
    plan = ts.TrainingPlan.make(**sizes)

    assert resolve(NUM_EPOCHS, plan) == 3
    with pytest.raises(ts.ConfigurationError, match=r"TOTAL_STEPS has no value.*loader has no length.*set max_steps"):
        resolve(TOTAL_STEPS // 2, plan)
    with pytest.raises(ts.ConfigurationError, match=r"STEPS_PER_EPOCH has no value.*Define its __len__, [^,]*\.$"):
        resolve(STEPS_PER_EPOCH, plan)
    assert resolve(TOTAL_STEPS, ts.TrainingPlan.make(**sizes, max_steps=7)) == 7
    assert resolve(STEPS_PER_EPOCH, ts.TrainingPlan.make(**sizes, loader_length=8)) == 3


def test_placeholders_can_be_printed_copied_and_pickled() -> None:
    expression = round((NUM_EPOCHS + 1) * 2 - 0.1 * TOTAL_STEPS, 3)

    assert repr(expression) == "round(((NUM_EPOCHS + 1) * 2) - (0.1 * TOTAL_STEPS), 3)"
    assert copy.deepcopy(expression) == expression
    assert resolve(pickle.loads(pickle.dumps(expression)), PLAN) == 6.2
