"""Per-record gradients for each kind of parameter use.

Each use keeps the layer's input `A` and is later given the gradient `G` of the summed losses with respect to the
layer's output. From these follow the norm of each record's gradient and any weighted sum of the gradients, mostly
without any per-record gradient in memory (Goodfellow 2015, arXiv 1510.01799; Li et al. 2021, arXiv 2110.05679; Bu et
al. 2022, arXiv 2210.00038). Everything is float32.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Container, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.graph import GradientEdge

from trainstack.backends.dp.arguments import SMALLEST_LIMIT


class ParamUse(ABC):
    """One use of a weight, a bias or both.

    Attributes:
        weight, bias: numbers of the parameters; None where it has none or it is not trained.
        parameters: those of the two that are not None.
        edge: the place in the graph at which the gradient of the output arrives.
    """

    weight: int | None
    bias: int | None
    parameters: tuple[int, ...]

    def __init__(self, weight: int | None, bias: int | None) -> None:
        self.weight, self.bias = weight, bias
        self.parameters = tuple(i for i in (weight, bias) if i is not None)
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

    def add_weighted(self, rows: Sequence[Tensor], sums: Sequence[Tensor], skip: Container[int] = ()) -> None:
        """Add `weighted(rows)` to `sums`, one tensor of each parameter's shape, but for parameters in `skip`."""
        for which, total in self.weighted(rows).items():
            if which not in skip:
                sums[which] += total.view(sums[which].shape) if total.is_contiguous() else total

    @abstractmethod
    def drop(self, dropped: Tensor) -> None:
        """Make the gradients of these records zero."""


class DirectUse(ParamUse):
    """Keeps per-record gradients, `(records, numel)`, in `_rows`, by the number of the parameter."""

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


class NormUse(DirectUse):
    """LayerNorm, RMSNorm (`spatial=0`) and GroupNorm: `y = normalised * weight + bias`.

    Args:
        shared: the number of trailing dimensions of the weight; None if it is along dimension 1.
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


class ElementwiseUse(DirectUse):
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


_EXACT, _ROUNDING = 1e-4, 5e-7
"""A squared norm that is a sum of products of either sign is used down to the first share of the largest possible sum;
below, the share is used instead. The second one is the share of a bound of the sum of all terms that is added, because
rounding would make a record with cancelling positions too short, by up to 2e-7 of it (torch 2.13.0)."""


class ProductUse(DirectUse):
    """Linear maps: a record's gradient is the sum over its positions of `g a^T`, with `A` `(records, positions, in)`.

    Where there are few positions for the size of the weight, the norm comes from the positions' inner products; else
    the per-record gradients are computed, and used again for the sum.
    """

    _gradient: Tensor

    def receive(self, gradient: Tensor, records: int) -> None:
        g = self._gradient = gradient.reshape(records, -1, gradient.shape[-1])
        if self.bias is not None:
            self._rows[self.bias] = g[:, 0] if g.shape[1] == 1 else g.sum(1)
        if self.weight is not None:
            self._input = self._input.reshape(records, -1, self._input.shape[-1]).float()

    def squares(self) -> dict[int, Tensor]:
        found = super().squares()
        if self.weight is not None and self.weight not in found:
            a, g = self._input, self._gradient
            positions = a.shape[1]
            if positions == 1:
                own = squared_norms(g[:, 0]) if self.bias is None else found[self.bias]
                inputs = squared_norms(a[:, 0])
                found[self.weight] = _with_lost(inputs * own, inputs, own, a, g)
            elif 2 * positions * positions <= a.shape[2] * g.shape[2]:
                found[self.weight] = squared_norms_by_position(a, g)
            else:
                found[self.weight] = squared_norms(self.per_record()[self.weight])
        return found

    def per_record(self) -> dict[int, Tensor]:
        if self.weight is not None and self.weight not in self._rows:
            self._rows[self.weight] = torch.bmm(self._gradient.mT, self._input).flatten(1)
        return self._rows

    def weighted(self, rows: Sequence[Tensor]) -> dict[int, Tensor]:
        found = super().weighted(rows)
        if self.weight is not None and self.weight not in found:
            found[self.weight] = self._scaled(rows).t() @ self._input.flatten(0, 1)
        return found

    def add_weighted(self, rows: Sequence[Tensor], sums: Sequence[Tensor], skip: Container[int] = ()) -> None:
        for which, row in self._rows.items():
            if which not in skip:
                sums[which].view(-1).addmv_(row.t(), rows[which])
        if self.weight is not None and self.weight not in skip and self.weight not in self._rows:
            sums[self.weight].addmm_(self._scaled(rows).t(), self._input.flatten(0, 1))

    def _scaled(self, rows: Sequence[Tensor]) -> Tensor:
        assert self.weight is not None
        return (self._gradient * rows[self.weight][:, None, None]).flatten(0, 1)

    def drop(self, dropped: Tensor) -> None:
        super().drop(dropped)
        self._gradient = self._gradient.masked_fill(dropped[:, None, None], 0.0)
        if self.weight is not None:
            self._input = self._input.masked_fill(dropped[:, None, None], 0.0)


_LONG_RUN = 32
"""So many numbers in a row are copied about as fast as more."""
_PATCHES = 1 << 20
"""Numbers in the patches that are made at a time: 4 MiB."""


class ConvUse(DirectUse):
    """Convolutions: the product of `G` with the patches that each output position saw, for each group.

    Args:
        stride, padding, dilation: one number for each dimension; `padding` as pairs (before, after).
    """

    def __init__(
        self,
        weight: int | None,
        bias: int | None,
        *,
        kernel: Sequence[int],
        stride: Sequence[int],
        padding: Sequence[tuple[int, int]],
        dilation: Sequence[int],
        groups: int,
    ) -> None:
        super().__init__(weight, bias)
        self._kernel, self._stride, self._padding = tuple(kernel), tuple(stride), tuple(padding)
        self._dilation, self._groups = tuple(dilation), groups

    def receive(self, gradient: Tensor, records: int) -> None:
        g = gradient.flatten(2)
        if self.bias is not None:
            self._rows[self.bias] = g.sum(2)
        if self.weight is not None:
            self._rows[self.weight] = self._products(g, tuple(gradient.shape[2:]))
        del self._input

    def _products(self, g: Tensor, output: tuple[int, ...]) -> Tensor:
        """Per-record gradients, `(records, numel)`, with channels after the kernel; patches are made of a few records
        at a time, so that they stay in a cache."""
        records, positions = len(g), g.shape[2]
        self._channels = self._input.shape[1] // self._groups
        columns = torch.Size(self._kernel).numel() * self._channels
        by_group = g.reshape(records, self._groups, -1, positions)
        products = g.new_empty(*by_group.shape[:3], columns)
        few = max(1, _PATCHES // (self._groups * positions * columns))
        parts = (torch.split(whole, few) for whole in (self._input, by_group, products))
        for x, part, out in zip(*parts, strict=True):
            torch.bmm(part.flatten(0, 1), self._patches(x, output).flatten(0, 1), out=out.flatten(0, 1))
        return products.reshape(records, -1)

    def per_record(self) -> dict[int, Tensor]:
        return {which: self._as_parameter(which, rows) for which, rows in self._rows.items()}

    def weighted(self, rows: Sequence[Tensor]) -> dict[int, Tensor]:
        return {which: self._as_parameter(which, total[None]) for which, total in super().weighted(rows).items()}

    def _as_parameter(self, which: int, rows: Tensor) -> Tensor:
        """`rows` with channels before the kernel, as in the weight; they are last in patches."""
        if which != self.weight or self._channels == 1:
            return rows
        size = torch.Size(self._kernel).numel()
        return rows.reshape(len(rows), -1, size, self._channels).transpose(2, 3).flatten(1)

    def _patches(self, x: Tensor, output: tuple[int, ...]) -> Tensor:
        """Of some records, `(records, groups, positions, kernel * channels of a group)`.

        Copies are fast where neighbours in a patch are neighbours in the input. So channels come last; and where
        they are few, the last dimension is unfolded first, so that the other ones are copied in longer runs.
        """
        x = x.float()
        if any(before or after for before, after in self._padding):
            x = F.pad(x, [side for pair in reversed(self._padding) for side in pair])
        x = x.reshape(x.shape[0], self._groups, -1, *x.shape[2:]).movedim(2, -1).contiguous()
        front, steps, channels = x.shape[:2], x.stride(), x.shape[-1]
        moves = [step * stride for step, stride in zip(steps[2:-1], self._stride, strict=True)]
        inner = [step * dilation for step, dilation in zip(steps[2:-1], self._dilation, strict=True)]
        positions, kernel = torch.Size(output).numel(), self._kernel
        if len(kernel) > 1 and channels * kernel[-1] < _LONG_RUN:
            size = (*front, output[-1], *x.shape[2:-2], kernel[-1], channels)
            by_last = torch.as_strided(x, size, (*steps[:2], moves[-1], *steps[2:-2], inner[-1], 1))
            x = by_last.reshape(*size[:-2], -1)
            steps, channels = x.stride(), x.shape[-1]
            moves = [step * stride for step, stride in zip(steps[3:-1], self._stride, strict=False)] + [steps[2]]
            inner = [step * dilation for step, dilation in zip(steps[3:-1], self._dilation, strict=False)]
            kernel = kernel[:-1]
        patches = torch.as_strided(x, (*front, *output, *kernel, channels), (*steps[:2], *moves, *inner, steps[-1]))
        return patches.reshape(*front, positions, -1)


class EmbeddingUse(ParamUse):
    """Embedding: a record's gradient has in row `v` the sum of `G` over the positions that hold token `v`.

    Args:
        shape: of the table.
        padding: the row that is not trained; None if all are.
    """

    def __init__(self, weight: int, shape: torch.Size, padding: int | None) -> None:
        super().__init__(weight, None)
        self._which, self._shape, self._padding = weight, shape, padding
        self._gradient: Tensor

    def receive(self, gradient: Tensor, records: int) -> None:
        tokens = self._input.reshape(records, -1)
        gradient = gradient.reshape(records, -1, self._shape[1])
        if self._padding is not None:
            gradient = gradient.masked_fill((tokens == self._padding % self._shape[0])[:, :, None], 0.0)
        self._input, self._gradient = tokens, gradient

    def squares(self) -> dict[int, Tensor]:
        records, positions = self._input.shape
        if positions == 1:
            return {self._which: squared_norms(self._gradient[:, 0])}
        owner = torch.arange(records, device=self._input.device).unsqueeze(1)
        keys, place = torch.unique(self._input + owner * self._shape[0], return_inverse=True)
        summed = self._gradient.new_zeros(len(keys), self._shape[1])
        summed.index_add_(0, place.flatten(), self._gradient.flatten(0, 1))
        squares = self._gradient.new_zeros(records).index_add_(0, keys // self._shape[0], squared_norms(summed))
        return {self._which: squares}

    def per_record(self) -> dict[int, Tensor]:
        index = self._input[:, :, None].expand_as(self._gradient)
        tables = self._gradient.new_zeros(len(self._input), *self._shape).scatter_add_(1, index, self._gradient)
        return {self._which: tables.flatten(1)}

    def weighted(self, rows: Sequence[Tensor]) -> dict[int, Tensor]:
        scaled = self._gradient * rows[self._which][:, None, None]
        total = scaled.new_zeros(self._shape).index_add_(0, self._input.flatten(), scaled.flatten(0, 1))
        return {self._which: total}

    def drop(self, dropped: Tensor) -> None:
        self._gradient = self._gradient.masked_fill(dropped[:, None, None], 0.0)


def squared_norms_by_position(a: Tensor, g: Tensor) -> Tensor:
    """`||sum_t g_t a_t^T||^2` as the sum over all pairs of positions of `<g_t, g_s> <a_t, a_s>`."""
    inputs, gradients = torch.bmm(a, a.mT), torch.bmm(g, g.mT)
    diagonals = inputs.diagonal(dim1=1, dim2=2).clamp(min=0.0), gradients.diagonal(dim1=1, dim2=2).clamp(min=0.0)
    longest = (diagonals[0] * diagonals[1]).sqrt().sum(1).square()
    inputs, gradients = inputs.flatten(1), gradients.flatten(1)
    of_a, of_g = diagonals[0].sum(1), diagonals[1].sum(1)
    sizes = (torch.linalg.vector_norm(products, dim=1) for products in (inputs, gradients))  # inf from 4e9 on
    size_a, size_g = (torch.minimum(size, trace) for size, trace in zip(sizes, (of_a, of_g), strict=True))
    terms = of_a * size_g + of_g * size_a
    squares: Tensor = torch.linalg.vecdot(inputs, gradients) + _ROUNDING * terms
    return _with_lost(torch.maximum(squares, _EXACT * longest), of_a, of_g, a, g)


def _with_lost(squares: Tensor, inputs: Tensor, gradients: Tensor, a: Tensor, g: Tensor) -> Tensor:
    """`squares`, larger by what they may lack because float32 has no squares of numbers below 1e-19.

    A record with so small an input and a gradient of 1e19 would otherwise be clipped too little. `inputs` and
    `gradients` are the squared norms of `a` and `g`, `(records, positions, width)`.
    """
    tiny = float(torch.finfo(torch.float32).tiny) * a.shape[1]
    lost = tiny * a.shape[2] * gradients + tiny * g.shape[2] * inputs
    return torch.where(lost > 1e-7 * squares.clamp(min=SMALLEST_LIMIT**2), squares + lost, squares)
