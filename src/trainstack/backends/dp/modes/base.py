"""`GradientMode`: one micro-batch in, the sum of clipped per-record gradients out."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from trainstack.backends.dp.clipping import Clipper
from trainstack.backends.dp.modes.precision import full_float32
from trainstack.errors import ConfigurationError

Run = Callable[[nn.Module, Any], Any]
"""`run(model, batch)` calls `model(stage=..., global_step=..., batch=batch, device=...)` the way the layers inside do,
autocast included, and returns what `train_step` returned."""


class Unsupported(ConfigurationError):
    """A gradient mode cannot give this module's per-record gradients; the message names where and what to write."""


class GradientMode(ABC):
    """Computes clipped per-record gradients of `train_step` and sums them up over micro-batches.

    Args:
        module: the user's module, never wrapped.
        trained: the parameters whose gradients are wanted, float32, each once, all of `module`.
        clipper: bounds what one record adds.

    Attributes:
        sums: for each of `trained` the sum since `take`, float32, of its shape.
    """

    name: ClassVar[str] = ""
    one_by_one: ClassVar[bool] = False
    """Whether a record's gradient is computed from it alone, whatever the module does."""

    def __init__(self, module: nn.Module, trained: Sequence[nn.Parameter], clipper: Clipper) -> None:
        self.module, self.trained, self.clipper = module, tuple(trained), clipper
        self.sums = self._zeros()
        names = {id(parameter): name for name, parameter in module.named_parameters()}
        foreign = [tuple(p.shape) for p in self.trained if id(p) not in names]
        if foreign:
            raise ConfigurationError(
                f"the optimizers hold parameters of shape {foreign} that are not the module's. Assign them to an "
                "attribute of the module."
            )
        self.names = tuple(names[id(parameter)] for parameter in self.trained)

    @abstractmethod
    def add(self, run: Run, batch: Any, records: int) -> Any:
        """Run a micro-batch forwards and backwards, and add its clipped gradients to `sums`.

        Args:
            run: see `Run`.
            batch: `records` examples along dimension 0 of each tensor.
            records: at least 1.

        Returns:
            What `train_step` returned for the micro-batch, detached. Its loss is 0-dim and requires a gradient, as
            one does that is to be run backwards, but leads nowhere: everything is done.

        Raises:
            Unsupported: this mode cannot give the per-record gradients of this module.
            Exception: whatever `train_step` raises, as it is. The mode can go on after that.
        """

    def explained(self, error: Exception) -> str:
        """What it means that `add` raised `error` when the mode was tried on data with which `train_step` works."""
        return f"grad_mode={self.name!r} fails: {type(error).__name__}: {error}. Write grad_mode='vmap'."

    def take(self) -> list[Tensor]:
        """`sums`, which begin at zero again."""
        sums, self.sums = self.sums, self._zeros()
        return sums

    def close(self) -> None:  # noqa: B027 - most modes leave nothing behind
        """Leave the module as it was found."""

    def _zeros(self) -> list[Tensor]:
        return [torch.zeros_like(p, dtype=torch.float32, requires_grad=False) for p in self.trained]

    def _add_rows(self, gradients: Sequence[Tensor | None], records: int) -> None:
        """Clip and add per-record gradients, `(records, *shape)` each; None is zero."""
        with torch.no_grad(), full_float32():
            rows = [None if g is None else g.detach().reshape(records, -1).float() for g in gradients]
            nothing = self.sums[0].new_zeros(records)
            squares = [nothing if row is None else torch.linalg.vector_norm(row, dim=1).square() for row in rows]
            factors = self.clipper.factors(torch.stack(squares))
            for total, row, factor in zip(self.sums, rows, factors.rows, strict=True):
                if row is not None:
                    if factors.dropped is not None:
                        row = row.masked_fill(factors.dropped[:, None], 0.0)
                    total.view(-1).addmv_(row.t(), factor)
