"""Records that two datasets have in common."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import ConcatDataset, Dataset, Subset, TensorDataset

from trainstack.trainer.data.record_sources import most_repeats, shares_records

FULL = TensorDataset(torch.arange(40.0).view(20, 2), torch.arange(20))
TRAINING = Subset(FULL, range(15))


class Wrapped(Dataset[Any]):
    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def __len__(self) -> int:
        return len(self.inner)


@pytest.mark.parametrize(
    ("other", "shares"),
    [
        (TRAINING, True),
        (FULL, True),
        (Subset(FULL, range(15, 20)), False),
        (Subset(FULL, torch.tensor([14, 19])), True),
        (Subset(FULL, np.array([-1, -6])), True),
        (Subset(FULL, [-1, -2]), False),
        (Subset(TRAINING, [2]), True),
        (TensorDataset(*FULL.tensors), True),
        (TensorDataset(*(tensor[15:] for tensor in FULL.tensors)), False),
        (TensorDataset(*(tensor[14:16] for tensor in FULL.tensors)), True),
        (ConcatDataset([Subset(FULL, [19]), Subset(FULL, [0])]), True),
        (Wrapped(Wrapped(TRAINING)), True),
        (Wrapped(Subset(FULL, [19])), False),
        (TensorDataset(torch.zeros(20, 2)), False),
        (Subset(FULL, range(14, 20, 5)), True),
        (Subset(FULL, range(15, 20, 2)), False),
        (Subset(FULL, range(19, 13, -1)), True),
        (Subset(Subset(FULL, range(1, 20, 3)), range(5, 7)), False),
        (Subset(Subset(FULL, range(1, 20, 3)), [4, 6]), True),
        (Subset(ConcatDataset([FULL, Wrapped(FULL)]), range(19, 40, 2)), False),
        (Subset(ConcatDataset([Wrapped(FULL), FULL]), range(19, 40, 2)), True),
    ],
)
def test_common_records_are_found_through_wrappers_and_memory(other: Any, shares: bool) -> None:
    assert shares_records(other, TRAINING) is shares


@pytest.mark.parametrize(
    ("dataset", "times"),
    [
        (FULL, 1),
        (Subset(FULL, [1, 2, 1, -19]), 3),
        (ConcatDataset([TRAINING, FULL]), 2),
        (ConcatDataset([TRAINING, Subset(FULL, range(15, 20))]), 1),
        (Subset(ConcatDataset([FULL, FULL]), [0, 21]), 1),
        (TensorDataset(torch.zeros(1, 2).expand(5, 2)), 1),
        (Wrapped(FULL), 1),
        (Subset(FULL, []), 0),
        (Subset(FULL, range(0, 20, 3)), 1),
        (Subset(ConcatDataset([FULL, FULL]), range(0, 40, 20)), 2),
    ],
)
def test_repeats_of_a_record_are_counted(dataset: Any, times: int) -> None:
    assert most_repeats(dataset) == times


class Virtual(Dataset[Any]):
    def __len__(self) -> int:
        return 10**12


def test_data_sets_of_any_length_are_compared_at_once() -> None:
    training = Subset(HUGE, range(10**12 - 10))

    assert most_repeats(training) == 1
    assert shares_records(Subset(HUGE, range(10**12 - 11, 10**12)), training)
    assert not shares_records(Subset(HUGE, range(10**12 - 10, 10**12)), training)
    assert shares_records(Subset(HUGE, [5, 10**12 - 1]), training)
    assert not shares_records(Subset(HUGE, [10**12 - 1]), Subset(HUGE, range(0, 10**12, 2)))
    assert not shares_records(Subset(HUGE, range(1, 10**12, 2)), Subset(HUGE, range(0, 10**12, 2)))
    assert shares_records(ConcatDataset([Virtual(), HUGE]), training)


HUGE = Virtual()
