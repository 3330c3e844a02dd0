"""A batch is cut into records, or refused with the place that cannot be cut."""

from __future__ import annotations

from collections import UserDict, namedtuple
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.utils.rnn import pack_padded_sequence

from trainstack.backends.dp.modes.base import Unsupported, rows_of
from trainstack.backends.dp.sampling import count_records
from trainstack.errors import PrivacyError

Pair = namedtuple("Pair", "x y")


def same(left: Any, right: Any) -> bool:
    if isinstance(left, torch.Tensor | np.ndarray):
        return type(left) is type(right) and left.shape == right.shape and bool((left == right).all())
    if isinstance(left, dict | UserDict):
        return left.keys() == right.keys() and all(same(left[key], right[key]) for key in left)
    if isinstance(left, list | tuple):
        return len(left) == len(right) and all(map(same, left, right))
    return bool(left == right)


X, Y = torch.arange(6).view(3, 2), torch.arange(3)


@pytest.mark.parametrize(
    ("batch", "first"),
    [
        (X, X[:1]),
        ((X, Y), (X[:1], Y[:1])),
        ([X, Y, None], [X[:1], Y[:1], None]),
        (Pair(X, Y), Pair(X[:1], Y[:1])),
        ({"x": X, "text": ["a", "b", "c"]}, {"x": X[:1], "text": ["a"]}),
        ({"x": {"deep": (X, ("a", "b", "c"))}}, {"x": {"deep": (X[:1], ("a",))}}),
        (UserDict(x=X), UserDict(x=X[:1])),
        (X.numpy(), X[:1].numpy()),
        ([X, X, X], [X[:1], X[:1], X[:1]]),  # three columns, not three records
    ],
)
def test_a_record_is_a_batch_of_one_with_equal_structure(batch: Any, first: Any) -> None:
    cut = rows_of(batch, 3, slice(0, 1))
    assert type(cut) is type(batch)
    assert same(cut, first)


def test_two_columns_of_two_records_are_columns() -> None:
    batch = [X[:2], ["a", "b"]]
    assert same(rows_of(batch, 2, slice(1, 2)), [X[1:2], ["b"]])


@pytest.mark.parametrize(
    ("batch", "named"),
    [
        ((X, torch.tensor(3)), r"batch\[1\] has shape \(\)"),
        ({"x": X, "y": torch.zeros(4)}, r"batch\['y'\] has shape \(4,\)"),
        ({"x": X, "longest": 7}, r"batch\['longest'\] is a int"),
        ((X, ["a", "b"]), r"batch\[1\]\[0\] is a str"),
        ((X, [torch.zeros(2), torch.zeros(5), torch.zeros(1)]), r"batch\[1\]\[0\] has shape \(2,\)"),
        (pack_padded_sequence(torch.zeros(3, 2, 1), [2, 1, 1], batch_first=True), "PackedSequence"),
    ],
)
def test_values_that_belong_to_no_particular_record_are_refused(batch: Any, named: str) -> None:
    with pytest.raises(Unsupported, match=named):
        rows_of(batch, 3, slice(0, 1))


@pytest.mark.parametrize(
    ("batch", "records"),
    [
        (X, 3),
        ((X, Y), 3),
        ([["a", "b", "c"], X], 3),
        ([X, ["a", "b"]], 3),
        ({"inner": [["a", "b", "c"], X]}, 3),
        ({"n": 7, "text": ["a", "b"]}, 2),
        (["a", "b"], 2),
        ([["a"], ["b"], ["c"]], 3),
    ],
)
def test_the_first_item_of_a_batch_counts_its_records(batch: Any, records: int) -> None:
    assert count_records(batch) == records


@pytest.mark.parametrize("batch", [7, "text", {"n": 7}, torch.tensor(1.0)])
def test_a_batch_without_rows_has_no_number_of_records(batch: Any) -> None:
    with pytest.raises(PrivacyError, match="cannot tell how many records"):
        count_records(batch)
