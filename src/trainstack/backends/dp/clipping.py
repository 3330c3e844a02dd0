"""Clipping factors for per-record gradients.

All arithmetic is in float32. A record whose gradient is not finite gets the factor zero, and users of the factors must
omit its row: a product of zero and inf would be nan.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from trainstack.errors import ConfigurationError

_GUARD = 1e-6
"""Share that is added to a norm before dividing by it, so that a clipped gradient is never longer than the limit.
float32 rounds factors by up to 6e-8 of them, and norms by a few times that."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Factors:
    """The factors of a micro-batch.

    Attributes:
        rows: for each trained parameter its factors, float32 of shape `(records,)`; parameters that are clipped
            together share one tensor.
        dropped: bool of shape `(records,)`, True where a record contributes nothing because its gradient is not
            finite; None if there is certainly no such record.
        norms: the joint norms before clipping, float32 of shape `(records,)`.
    """

    rows: tuple[Tensor, ...]
    dropped: Tensor | None
    norms: Tensor


class Clipper(ABC):
    """Turns the norms of per-record gradients into factors."""

    @property
    @abstractmethod
    def sensitivity(self) -> float:
        """The largest L2 norm that one record can add to the sum over all parameters."""

    def factors(self, squares: Tensor) -> Factors:
        """Factors for records whose gradients have these squared norms.

        Args:
            squares: float32 of shape `(parameters, records)`.
        """
        joint = squares.sum(0).sqrt()
        # A sum of norms is finite only where all are, and is cheaper than to look at each.
        if not joint.is_cuda and math.isfinite(float(joint.sum())):
            rows = self._rows(squares, joint, torch.ones_like(joint, dtype=torch.bool))
            return Factors(rows=rows, dropped=None, norms=joint)
        finite = torch.isfinite(joint)
        # On a GPU the question would stall the device, so rows are always replaced there.
        rows = self._rows(squares, joint, finite)
        replaced = {id(row): torch.where(finite, row, 0.0) for row in rows}
        return Factors(rows=tuple(replaced[id(row)] for row in rows), dropped=~finite, norms=joint)

    @abstractmethod
    def _rows(self, squares: Tensor, joint: Tensor, finite: Tensor) -> tuple[Tensor, ...]:
        """Factors for each parameter; `joint` is the norm over all parameters."""


class FlatClipper(Clipper):
    """All parameters together: `min(1, limit / norm)`, 1e-6 of it less, Abadi et al. 2016 (arXiv 1607.00133)."""

    limit: float

    def __init__(self, limit: float) -> None:
        self.limit = _positive("max_grad_norm", limit)

    @property
    def sensitivity(self) -> float:
        return self.limit

    def _rows(self, squares: Tensor, joint: Tensor, finite: Tensor) -> tuple[Tensor, ...]:
        return (_at_most(self.limit, joint),) * len(squares)


class PerLayerClipper(Clipper):
    """Groups of parameters, each with a separate limit; together `sqrt(sum of squares)`.

    Args:
        groups: for each parameter the number of its group.
        limits: for each group its limit.
    """

    limits: tuple[float, ...]

    def __init__(self, groups: Sequence[int], limits: Sequence[float]) -> None:
        self.limits = tuple(_positive("max_grad_norm", limit) for limit in limits)
        self._groups = tuple(groups)
        if sorted(set(self._groups)) != list(range(len(self.limits))):
            raise ConfigurationError(
                f"groups {self._groups} with {len(self.limits)} limits: number the groups from 0, one limit each."
            )

    @property
    def sensitivity(self) -> float:
        return math.sqrt(sum(limit**2 for limit in self.limits))

    def _rows(self, squares: Tensor, joint: Tensor, finite: Tensor) -> tuple[Tensor, ...]:
        members = torch.tensor(self._groups, device=squares.device)
        grouped = squares.new_zeros(len(self.limits), squares.shape[1]).index_add_(0, members, squares).sqrt()
        rows = [_at_most(limit, norm) for limit, norm in zip(self.limits, grouped, strict=True)]
        return tuple(rows[group] for group in self._groups)


class AutomaticClipper(FlatClipper):
    """Every gradient is normalised: `limit / (norm + stability)`, Bu et al. 2022 (arXiv 2206.07136).

    There is no threshold to tune: `limit` only scales the learning rate, and the noise with it.
    """

    stability: float

    def __init__(self, limit: float = 1.0, stability: float = 0.01) -> None:
        super().__init__(limit)
        self.stability = _positive("stability", stability)

    def _rows(self, squares: Tensor, joint: Tensor, finite: Tensor) -> tuple[Tensor, ...]:
        return (self.limit / ((joint + self.stability) * (1 + _GUARD)),) * len(squares)


class AdaptiveClipper(FlatClipper):
    """`FlatClipper` that also counts, so that its limit can follow a quantile: Andrew et al. 2019 (arXiv 1905.03871).

    Attributes:
        limit: may be set between steps.
        counts: float32, 0-dim: the sum over records of `1[norm <= limit] - 1/2`. A record changes it by 1/2; it is
            private until noise was added. A record that is not finite counts for 0.
    """

    counts: Tensor

    def __init__(self, limit: float) -> None:
        super().__init__(limit)
        self.counts = torch.zeros(())

    def pop_counts(self) -> Tensor:
        """`counts`, which begin at zero again."""
        counts, self.counts = self.counts, torch.zeros(())
        return counts

    def _rows(self, squares: Tensor, joint: Tensor, finite: Tensor) -> tuple[Tensor, ...]:
        below = (joint <= self.limit).float() - 0.5
        self.counts = self.counts.to(joint.device) + torch.where(finite, below, 0.0).sum()
        return super()._rows(squares, joint, finite)


def per_layer_clipper(names: Sequence[str], limits: float | Sequence[float]) -> PerLayerClipper:
    """A clipper with one limit for each parameter, or for each top-level module.

    Args:
        names: of the trained parameters, as in `named_parameters()`.
        limits: one number `C` gives each parameter the limit `C / sqrt(parameters)`, so that the whole is bounded by
            `C`; as many numbers as parameters, or as top-level modules, are the limits themselves.

    Raises:
        ConfigurationError: there are as many limits as neither.
    """
    if isinstance(limits, int | float):
        limits = [_positive("max_grad_norm", limits) / math.sqrt(len(names))] * len(names)
    tops = list(dict.fromkeys(name.split(".")[0] for name in names))
    if len(limits) == len(names):
        return PerLayerClipper(range(len(names)), limits)
    if len(limits) == len(tops):
        return PerLayerClipper([tops.index(name.split(".")[0]) for name in names], limits)
    raise ConfigurationError(
        f"per-layer clipping with {len(limits)} limits: there are {len(names)} trained parameters and {len(tops)} "
        f"top-level modules ({', '.join(tops)}). Give one limit each of the former or the latter, or a single number."
    )


def _at_most(limit: float, norms: Tensor) -> Tensor:
    return (limit / (norms * (1 + _GUARD))).clamp(max=1.0)


def _positive(name: str, value: float) -> float:
    if not (value > 0 and math.isfinite(value)):
        raise ConfigurationError(f"{name} is {value}: write a number above 0.")
    return float(value)
