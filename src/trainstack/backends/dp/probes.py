"""Experiments on a few records before training begins: is a record's influence really bounded?

The neighbour probe compares the clipped sum over a batch with that over the same batch without one record, as the
loader would have collated it. Their difference must be no longer than the clipping norm, whatever the record. It is
made with a norm so small that every gradient is clipped: then the smallest coupling between records shows, but for one
that only changes how long gradients are. That shows without clipping: the sum over records must be that of each alone.
The idea is that of record-level testing in Re:cord-play (arXiv 2602.17454).
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from trainstack.backends.dp.clipping import FlatClipper
from trainstack.backends.dp.modes.base import GradientMode, Run
from trainstack.backends.dp.modes.probing import Plain, undisturbed
from trainstack.backends.dp.modes.records import rows_of
from trainstack.backends.dp.records import check_records
from trainstack.backends.sampling import TrainingSet
from trainstack.backends.single_process import move_to_device

TOLERANCE = 1e-3
"""By how much more than the clipping norm a record may move the sum, and by what part of their size gradients may
differ together from alone: rounding, and nothing else."""

_INSTEAD = (
    "Let the loss be a mean over records that depend on themselves alone: no statistics over the batch, no division by "
    "what the batch holds or by the length to which it was padded. Random numbers that collate_fn draws, or a data set "
    "from generators of its own, look like that too: draw them in train_step, or in the data set from the global ones."
)
_NO_LIMIT = float(torch.finfo(torch.float32).max) ** 0.5


def neighbour_problems(mode: GradientMode, run: Run, data: TrainingSet, index: Tensor) -> Iterator[str]:
    """What the neighbour probe finds on the records `index`, in sentences; nothing if each has a bounded influence."""
    clipper = mode.clipper
    try:
        in_full = _Summing(mode, lambda model, batch: run(Plain(model), batch), data)
        yield from _problems(_Summing(mode, run, data), in_full, index)
    finally:
        mode.take()
        mode.clipper = clipper


def _problems(sum_of: _Summing, in_full: _Summing, index: Tensor) -> Iterator[str]:
    alone = torch.stack([in_full(index[i : i + 1], _NO_LIMIT) for i in range(len(index))])
    limit = _limit_that_clips(alone)
    if limit == 0.0:
        yield (
            "no record has a gradient by itself: the loss is nan or inf, or it only compares records with each other. "
            "Write a loss that is a mean over the records, each of which counts by itself."
        )
        return
    whole = sum_of(index, limit)
    for left_out in range(len(index)):
        others = torch.cat([index[:left_out], index[left_out + 1 :]])
        moved = float((whole - sum_of(others, limit)).norm()) / limit
        if moved > 1 + TOLERANCE:
            yield (
                f"the gradients of other records change when one is left out (its influence is {moved:.3f} times the "
                f"clipping norm), so clipping does not bound it. {_INSTEAD}"
            )
            return
    apart = float((in_full(index, _NO_LIMIT) - alone.sum(0)).norm() / alone.norm())
    if apart > TOLERANCE:
        yield (
            f"records have other gradients together than each by itself (their sum differs by {apart:.3f} times its "
            f"size), so clipping does not bound what one changes. {_INSTEAD}"
        )


def _limit_that_clips(gradients: Tensor) -> float:
    """A hundredth of the shortest gradient among the records that have one."""
    norms = gradients.norm(dim=1)
    return min((float(norm) for norm in norms if norm > 0), default=0.0) / 100


class _Summing:
    """The sum of clipped gradients of some records, as training would have it."""

    def __init__(self, mode: GradientMode, run: Run, data: TrainingSet) -> None:
        self._mode, self._run, self._data = mode, run, data

    def __call__(self, index: Tensor, limit: float) -> Tensor:
        self._mode.clipper = FlatClipper(limit)
        batch = move_to_device(self._data.fetch(index), self._mode.trained[0].device)
        check_records(batch, len(index))
        with undisturbed(self._mode.module) as states:
            if self._mode.one_by_one:
                for i in range(len(index)):
                    states.restore()  # with the same random numbers, however many records come before it
                    self._mode.add(self._run, rows_of(batch, len(index), slice(i, i + 1)), 1)
            else:
                self._mode.add(self._run, batch, len(index))
        return torch.cat([part.flatten() for part in self._mode.take()])
