"""Comparison of the loss of a batch with the losses of its records, for modes that run all records together.

Equal values do not prove equal gradients, so the derivatives along a random direction of the parameters are compared
too: gradients that differ have the same derivative along it with probability 0.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import jvp, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel

from trainstack.backends.dp.modes.base import Run, Unsupported, full_float32, suppress_warning
from trainstack.backends.dp.modes.custom_ops import CustomOpGuard
from trainstack.backends.dp.modes.loop import one_loss_value
from trainstack.backends.dp.modes.probing import DisableRandomness, NoAutocast
from trainstack.backends.dp.modes.vmap import NOT_VECTORISED, FunctionalModule, explain_vmap_error, one_record_batches
from trainstack.backends.losses import find_loss
from trainstack.errors import ConfigurationError, PrivacyError

TOLERANCE = 1e-3
"""Allowed difference, relative to the largest value among the records."""

_CANCELLED = 1e-2
"""The terms of a slope of which this share or less is left have lost digits that the tolerance needs."""


def allowed_error(norms: Tensor, limit: float) -> Tensor:
    """The tolerated distance of gradients with these norms, `(records,)`, from those of autograd, clipped to `limit`.

    A gradient that is small because terms cancel is mostly rounding, so errors are allowed that are small compared with
    the limit or the longest gradient.
    """
    return TOLERANCE * (norms + 0.1 * norms.max() + 0.1 * limit)


class LossCheck:
    """Costs two forward passes, one of them with derivatives, and a backward pass.

    Args:
        module: the user's module.
        names: of the trained parameters.
        trained: the trained parameters.
        begin_pass: is called before each forward pass.
    """

    def __init__(
        self,
        module: nn.Module,
        names: Sequence[str],
        trained: Sequence[nn.Parameter],
        begin_pass: Callable[[], None] = lambda: None,
    ) -> None:
        self._module, self._names, self._trained = module, tuple(names), tuple(trained)
        self._begin_pass = begin_pass
        self._direction, self._slopes = tuple[Tensor, ...](), torch.zeros(0)
        numbers = {id(p): i for i, p in enumerate(self._trained)}
        self._padding = [
            (numbers[id(part.weight)], part.padding_idx)
            for part in module.modules()
            if isinstance(part, nn.Embedding) and part.padding_idx is not None and id(part.weight) in numbers
        ]

    def check(self, run: Run, batch: Any, records: int) -> Tensor | None:
        """Compare.

        Returns:
            The losses of the records, `(records,)`, without a graph; None where one of them, or its slope, is not
            finite, so that nothing can be compared.

        Raises:
            PrivacyError: the loss of the batch is not made of the losses of its records. The message names no record.
            Unsupported: `train_step` cannot be run under `vmap`.
        """
        # Not from the generators of the run, and not by torch: modes replace its random numbers.
        draw = np.random.default_rng(secrets.randbits(128))
        direction = tuple(
            torch.as_tensor(draw.standard_normal(tuple(p.shape), np.float32)).to(p) for p in self._trained
        )
        for number, row in self._padding:  # forward-mode derivatives of torch 2.13.0 do not leave it out
            direction[number][row] = 0.0
        weights = torch.as_tensor(draw.standard_normal(records, np.float32)).to(self._trained[0])
        # torch 2.13.0 compiles its derivatives with deprecated functions.
        deprecated = suppress_warning("`torch.jit.script")
        with full_float32(), DisableRandomness(), deprecated, suppress_warning("Full backward hook is firing"):
            # First, so that an exception of `train_step` comes as it is.
            together, slope, rounding, weights = self._together(run, batch, records, direction, weights)
            losses, slopes = self._alone(run, batch, records, direction)
            if not bool((losses.isfinite() & slopes.isfinite()).all()):
                return None
        self._direction, self._slopes = direction, slopes
        expected = losses if together.dim() else losses.mean()
        size = losses.abs().max() + 1e-6
        fits = ((together - expected).abs() <= TOLERANCE * size).all()
        steep = (weights * slopes).abs().sum() + rounding + 1e-6
        fits = fits & ((slope - (weights * slopes).sum()).abs() <= TOLERANCE * steep)
        if not bool(fits):
            raise PrivacyError(
                "the batch loss is not the mean of the losses of its records, so clipping does not bound the "
                "influence of a record. Write grad_mode='auto', or return one loss for each record that depends on no "
                "other record."
            )
        return losses

    def wrong_row(self, rows: Sequence[Tensor | None], norms: Tensor, limit: float) -> int | None:
        """Compare the gradients of the records of the last `check` with the slopes of their losses.

        Args:
            rows: for each parameter the gradients of the records, `(records, *parameter.shape)`; None for zero.
            norms: their joint norms, `(records,)`.
            limit: see `allowed_error`.

        Returns:
            The number of a record whose gradient is not that of its loss; None if there is none.
        """
        slopes = torch.zeros_like(self._slopes)
        for row, part in zip(rows, self._direction, strict=True):
            if row is not None:
                slopes += (row.detach().flatten(1) @ part.flatten()).to(slopes)
        # A random direction: the difference of two gradients has a slope about as large as the difference is long.
        excess = (slopes - self._slopes).abs() - allowed_error(norms, limit)
        return int(excess.argmax()) if bool((excess > 0).any()) else None

    def norms_alone(self, run: Run, batch: Any) -> Tensor:
        """The norm of the gradient of each parameter, `(parameters,)`, for a batch of one record, by autograd."""
        self._begin_pass()
        quiet = suppress_warning("Full backward hook is firing")
        with full_float32(), DisableRandomness(), torch.enable_grad(), quiet:
            loss = find_loss(run(NoAutocast(self._module), batch), 1).sum()
            gradients = torch.autograd.grad(loss, self._trained, allow_unused=True)
        return torch.stack([loss.new_zeros(()) if g is None else g.norm() for g in gradients]).float()

    def _alone(self, run: Run, batch: Any, records: int, direction: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
        self._begin_pass()
        columns, make = one_record_batches(batch, records)
        values = tuple(p.detach() for p in self._trained)

        def loss_and_slope(*row: Tensor) -> tuple[Tensor, Tensor]:
            def loss(*parameters: Tensor) -> Tensor:
                model = FunctionalModule(self._module, dict(zip(self._names, parameters, strict=True)))
                return one_loss_value(run(NoAutocast(model), make(row)))

            value, slope = jvp(loss, values, direction)  # type: ignore[misc]
            return value, slope

        try:
            with suppress_warning(NOT_VECTORISED), CustomOpGuard(), sdpa_kernel(SDPBackend.MATH), torch.no_grad():
                return vmap(loss_and_slope)(*columns)
        except (torch.OutOfMemoryError, ConfigurationError):
            raise
        except Exception as error:
            reason = explain_vmap_error(error)
            if reason is None:
                raise
            raise Unsupported(
                f"the losses of single records cannot be compared with those of the batch: {reason}"
            ) from error

    def _together(
        self, run: Run, batch: Any, records: int, direction: tuple[Tensor, ...], weights: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The loss or losses, the slope of their weighted sum, a share of the terms of which it is the sum, and the
        weights, which a mean has already.
        """
        self._begin_pass()
        with torch.enable_grad():
            loss = find_loss(run(NoAutocast(self._module), batch), records)
            if loss.dim() == 0:
                weights = torch.full_like(weights, 1.0 / records)
            total = (loss * weights).sum() if loss.dim() else loss
            gradients = torch.autograd.grad(total, self._trained, allow_unused=True)
        slope = terms = loss.new_zeros(())
        for gradient, part in zip(gradients, direction, strict=True):
            if gradient is not None:
                product = gradient * part
                slope, terms = slope + product.sum(), terms + product.abs().sum()
        return loss.detach(), slope, _CANCELLED * terms, weights
