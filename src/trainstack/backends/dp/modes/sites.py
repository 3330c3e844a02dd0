"""Sites: places of a forward pass where a trained parameter is used in a way whose per-record gradient is known.

Each site keeps the layer's input `A` and is later given the gradient `G` of the summed losses with respect to the
layer's output. From these follow the norm of each record's gradient and any weighted sum of the gradients, mostly
without any per-record gradient in memory (Goodfellow 2015, arXiv 1510.01799; Li et al. 2021, arXiv 2110.05679; Bu et
al. 2022, arXiv 2210.00038). Everything is float32. `product_sites` has those of the large layers.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge


class Site(ABC):
    """One use of a weight, a bias or both.

    Attributes:
        weight, bias: numbers of the parameters; None where it has none or it is not trained.
        edge: where in the graph the gradient of the output arrives.
    """

    def __init__(self, weight: int | None, bias: int | None) -> None:
        self.weight, self.bias = weight, bias
        self.edge: GradientEdge
        self._version = 0
        self._input: Tensor

    def keep(self, x: Tensor) -> None:
        """Remember the input."""
        self._input, self._version = x.detach(), x._version

    @property
    def was_changed(self) -> bool:
        """Whether the input was changed in place since."""
        return self._input._version != self._version

    @abstractmethod
    def receive(self, gradient: Tensor, records: int) -> None:
        """Take `G`, of the output's shape."""

    @abstractmethod
    def squares(self) -> dict[int, Tensor]:
        """For each parameter the squared norm of each record's gradient, `(records,)`."""

    @abstractmethod
    def per_record(self) -> dict[int, Tensor]:
        """For each parameter its per-record gradients, `(records, numel)`."""

    @abstractmethod
    def weighted(self, rows: Sequence[Tensor]) -> dict[int, Tensor]:
        """For each parameter the sum of its per-record gradients times `rows[parameter]`, in any shape."""

    @abstractmethod
    def drop(self, dropped: Tensor) -> None:
        """Make the gradients of these records zero."""


class DirectSite(Site):
    """Keeps per-record gradients: for small parameters, and for what another use shares its parameter with."""

    def __init__(self, weight: int | None, bias: int | None) -> None:
        super().__init__(weight, bias)
        self._rows: dict[int, Tensor] = {}

    def squares(self) -> dict[int, Tensor]:
        return {which: squared_norms(row) for which, row in self._rows.items()}

    def per_record(self) -> dict[int, Tensor]:
        return self._rows

    def weighted(self, rows: Sequence[Tensor]) -> dict[int, Tensor]:
        return {which: rows[which] @ row for which, row in self._rows.items()}

    def drop(self, dropped: Tensor) -> None:
        self._rows = {which: row.masked_fill(dropped[:, None], 0.0) for which, row in self._rows.items()}


class NormSite(DirectSite):
    """LayerNorm, RMSNorm (`spatial=0`) and GroupNorm: `y = normalised * weight + bias`.

    Args:
        shared: how many trailing dimensions the weight has; None if it lies along dimension 1.
    """

    def __init__(self, weight: int | None, bias: int | None, shared: int | None) -> None:
        super().__init__(weight, bias)
        self._shared = shared

    def receive(self, gradient: Tensor, records: int) -> None:
        if self.weight is not None:
            self._rows[self.weight] = self._summed(gradient * self._input.float(), records)
        if self.bias is not None:
            self._rows[self.bias] = self._summed(gradient, records)
        del self._input

    def _summed(self, products: Tensor, records: int) -> Tensor:
        if self._shared is None:
            return products.flatten(2).sum(2) if products.dim() > 2 else products
        size = products.shape[products.dim() - self._shared :].numel()
        return products.reshape(records, -1, size).sum(1)


class ElementwiseSite(DirectSite):
    """A parameter of which every record was given a copy: `G` of the copies are the per-record gradients.

    Args:
        shape: of the parameter as it was copied: 1 along dimension 0, and 1 wherever else it was repeated.
    """

    def __init__(self, weight: int, shape: tuple[int, ...]) -> None:
        super().__init__(weight, None)
        self._which, self._shape = weight, shape

    def receive(self, gradient: Tensor, records: int) -> None:
        self._rows[self._which] = gradient.sum_to_size(records, *self._shape[1:]).reshape(records, -1)


def squared_norms(rows: Tensor) -> Tensor:
    """Of each row of a matrix."""
    squares: Tensor = torch.linalg.vector_norm(rows, dim=1).square()
    return squares
