"""Which records a module is tried out on before training begins: some that differ as much as records of the data do."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trainstack.backends.dp.torch_names import pytree
from trainstack.backends.sampling import TrainingSet

_RECORDS, _EXTREMES = 6, 4
_LOOKED_AT, _SECONDS = 300, 1.0
"""How many records are loaded to choose among, and how long that may take."""


def probe_records(data: TrainingSet, count: int = _RECORDS) -> Tensor:
    """Some records: indices, int64.

    Some hundreds, drawn by the operating system, are loaded one by one. The longest of them is taken, the shortest, and
    two that differ most from those in size, in what is not zero and in value: what couples records shows only where
    they differ, and one record in a thousand may be longer than all others. The rest is taken as drawn.
    """
    assert data.length is not None
    drawn = secrets.SystemRandom().sample(range(data.length), min(_LOOKED_AT, data.length))
    traits = _traits_of(data, drawn, min(count, data.length))
    chosen = _extremes(traits)[:count]
    others = [place for place in range(len(drawn)) if place not in chosen]
    return torch.tensor(sorted(drawn[place] for place in [*chosen, *others][:count]))


def _traits_of(data: TrainingSet, drawn: list[int], at_least: int) -> list[list[float]]:
    """What tells records apart, for as many of `drawn` as time allows; the first number of each is its size."""
    until = time.monotonic() + _SECONDS
    traits: list[list[float]] = []
    for index in drawn:
        if len(traits) >= at_least and time.monotonic() > until:
            break
        leaves = [list(_of_leaf(leaf)) for leaf in pytree.tree_leaves(data.fetch(torch.tensor([index])))]
        traits.append([sum(leaf[0] for leaf in leaves), *(trait for leaf in leaves for trait in leaf)])
    return traits


def _of_leaf(leaf: Any) -> Iterator[float]:
    """Its size, how much of it is not zero, and its mean."""
    if isinstance(leaf, np.ndarray) and leaf.dtype.kind in "biuf":
        leaf = torch.from_numpy(leaf)
    if isinstance(leaf, Tensor) and leaf.layout is torch.strided and not leaf.is_complex():
        values = leaf.detach().double()
        yield from (leaf.numel(), int(values.count_nonzero()), float(values.mean()) if leaf.numel() else 0.0)
    elif isinstance(leaf, int | float):
        yield from (1, leaf != 0, float(leaf))
    else:
        size = len(leaf) if hasattr(leaf, "__len__") else 0
        yield from (size, size, 0.0)


def _extremes(traits: list[list[float]]) -> list[int]:
    """The places of the largest, of the smallest, and then of what is farthest from all those before."""
    width = max(map(len, traits))
    table = torch.tensor([[*row, *[0.0] * (width - len(row))] for row in traits], dtype=torch.float64).nan_to_num()
    span = table.amax(0) - table.amin(0)
    table = (table - table.amin(0)) / torch.where(span > 0, span, 1.0)
    chosen = list(dict.fromkeys([int(table[:, 0].argmax()), int(table[:, 0].argmin())]))
    while len(chosen) < _EXTREMES:
        apart = torch.cdist(table, table[chosen]).amin(1)
        if float(apart.max()) == 0.0:
            break
        chosen.append(int(apart.argmax()))
    return chosen
