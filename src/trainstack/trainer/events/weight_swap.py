"""Temporary replacement of the trained weights, for example by their average."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain

from torch import Tensor, nn

from trainstack.trainer.core.shards import kept_values, set_values


class WeightSwap:
    """Keeps the trained weights while the module has other weights, such as averages, until training continues.

    Attributes:
        is_active: whether trained weights are kept here.
    """

    is_active: bool

    def __init__(self) -> None:
        self.is_active = False
        self._kept: list[tuple[Tensor, Tensor]] = []

    def swap_in(self, module: nn.Module) -> None:
        """Keep the weights, so that parameters and buffers may be changed in place. A second call has no effect."""
        if self.is_active:
            return
        self._kept = [(tensor, kept_values(tensor)) for tensor in chain(module.parameters(), module.buffers())]
        for tensor, data in self._kept:
            set_values(tensor, data.clone())
        self.is_active = True

    @contextmanager
    def original_weights(self) -> Iterator[None]:
        """Context manager in which the module has the trained weights; for checkpoints."""
        others = [kept_values(tensor) for tensor, _ in self._kept]
        for tensor, data in self._kept:
            set_values(tensor, data)
        try:
            yield
        finally:
            for (tensor, _), data in zip(self._kept, others, strict=True):
                set_values(tensor, data)

    def swap_out(self) -> None:
        """Restore the trained weights of the module."""
        for tensor, data in self._kept:
            set_values(tensor, data)
        self.drop()

    def drop(self) -> None:
        """Forget the kept weights, because other weights were loaded into the module."""
        self._kept, self.is_active = [], False
