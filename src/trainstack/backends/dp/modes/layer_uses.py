"""Uses of parameters that are another use in a changed form."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from trainstack.backends.dp.modes.param_uses import DirectUse, ParamUse


class FoldedUse(DirectUse):
    """A layer whose batch holds several items of each record: a record's gradient is the sum over them.

    Args:
        inner: the use for items.
        each: items of a record, which lie next to each other.
    """

    def __init__(self, inner: ParamUse, each: int) -> None:
        super().__init__(inner.weight, inner.bias)
        self._inner, self._each = inner, each

    def keep(self, x: Tensor) -> None:
        self._inner.keep(x)

    @property
    def was_changed(self) -> bool:
        return self._inner.was_changed

    def receive(self, gradient: Tensor, records: int) -> None:
        if self._each:
            self._inner.receive(gradient, records * self._each)
            items = self._inner.per_record()
            self._rows = {which: rows.reshape(records, self._each, -1).sum(1) for which, rows in items.items()}
        del self._inner


class TransposedUse(ParamUse):
    """A use of the transpose of a matrix.

    Args:
        inner: the use as if the transpose were the parameter.
        weight: the number of the parameter.
        shape: of the parameter.
    """

    def __init__(self, inner: ParamUse, weight: int, shape: torch.Size) -> None:
        super().__init__(weight, None)
        self._inner, self._weight, self._transposed = inner, weight, (shape[1], shape[0])

    def keep(self, x: Tensor) -> None:
        self._inner.keep(x)

    @property
    def was_changed(self) -> bool:
        return self._inner.was_changed

    def receive(self, gradient: Tensor, records: int) -> None:
        self._inner.receive(gradient, records)

    def squares(self) -> dict[int, Tensor]:
        return self._inner.squares()

    def per_record(self) -> dict[int, Tensor]:
        rows = self._inner.per_record()[self._weight]
        return {self._weight: rows.view(-1, *self._transposed).transpose(1, 2).flatten(1)}

    def weighted(self, rows: Sequence[Tensor]) -> dict[int, Tensor]:
        return {self._weight: self._inner.weighted(rows)[self._weight].reshape(self._transposed).t()}

    def drop(self, dropped: Tensor) -> None:
        self._inner.drop(dropped)
