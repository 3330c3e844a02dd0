"""Two trees of state are called the same only if every bit of them is."""

from __future__ import annotations

import math
from collections import defaultdict, deque
from typing import Any

import numpy as np
import pytest
import torch

from trainstack.checkpointing.difference import differences


def filled(value: float) -> torch.Tensor:
    """Zeros whose text is abbreviated, and `value` in the middle."""
    tensor = torch.zeros(5000)
    tensor[2500] = value
    return tensor


def words(one: Any, other: Any) -> list[str]:
    return [str(row) for row in differences({"x": one}, {"x": other})]


@pytest.mark.parametrize("container", [list, tuple, deque, lambda items: deque(items, maxlen=3)])
def test_a_tensor_is_compared_in_every_bit_in_each_container(container: Any) -> None:
    assert words(container([filled(0)]), container([filled(7)])) == [
        "x[0]: 1 elements differ, by at most 7 (float32 [5000])"
    ]
    assert words(container([torch.ones(1)]), container([torch.ones(1) + 1e-7])) != []
    assert words(container([filled(math.nan)]), container([filled(math.nan)])) == []


def test_two_deques_of_other_lengths_or_limits_differ() -> None:
    assert words(deque([1, 2]), deque([1])) == ["x[1]: 2 | absent"]
    assert words(deque([1], maxlen=2), deque([1])) == ["x.maxlen: 2 | None"]


def test_two_defaultdicts_with_other_factories_differ() -> None:
    assert words(defaultdict(int, a=1), defaultdict(int, a=1)) == []
    assert words(defaultdict(int, a=1), defaultdict(list, a=1)) == ["x.default_factory: <class 'int'> | <class 'list'>"]


@pytest.mark.parametrize("kind", [set, frozenset])
def test_sets_are_the_same_in_any_order_of_insertion(kind: Any) -> None:
    forth, back = [set(), set()]
    for number in (0, 8, 16):
        forth.add(number)
    for number in (16, 8, 0):
        back.add(number)
    assert list(forth) != list(back), "the sets must iterate in different orders"
    assert words(kind(forth), kind(back)) == []
    assert words(kind({math.nan}), kind({float("nan")})) == []
    assert words(kind({0, 8}), kind({0, 9})) == ["x[1]: 8 | 9"]
    assert words(kind({1}), kind({True})) == ["x[0]: 1 | True"]
    assert words(kind({filled(0)}), kind({filled(7)})) != []


def test_arrays_of_text_in_other_shapes_differ() -> None:
    array = np.array([["a", "b", "c"], ["d", "e", "f"]])
    assert words(array, array.copy()) == []
    assert words(array, array.reshape(3, 2)) == ["x: numpy <U1 [2, 3] | numpy <U1 [3, 2]"]
