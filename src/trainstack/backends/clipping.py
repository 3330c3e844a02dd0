"""Gradient clipping by norm or value without a device synchronisation."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from trainstack.backends.fast_paths import fast_clamp, fast_clipping_fits, fast_limit_norm, fast_total_norm
from trainstack.backends.workload import Clipping


def clip_gradients(parameters: Iterable[nn.Parameter], clipping: Clipping, *, fast_paths: bool = True) -> Tensor | None:
    """Limit the gradients of `parameters` in place, with the functions of `fast_paths.py` if `fast_paths`.

    Returns:
        The joint L2 norm before clipping, a 0-dim tensor on the gradients' device that has not been read: inf or nan
        where a gradient is. None if nothing has a gradient, or if nothing is clipped or measured.
    """
    if clipping.kind == "none" and not clipping.measured:
        return None
    gradients = [p.grad for p in parameters if p.grad is not None]
    if not gradients:
        return None
    fast = fast_paths and fast_clipping_fits(gradients)
    if fast:
        norm = fast_total_norm(gradients)
    else:  # a sparse gradient counts by its values after its repeated rows are summed
        norm = torch.nn.utils.get_total_norm([g.coalesce().values() if g.is_sparse else g for g in gradients])
    if clipping.kind == "norm" and fast:
        fast_limit_norm(gradients, norm, clipping.limit)
    elif clipping.kind == "norm":  # the same bits as `torch.nn.utils.clip_grads_with_norm_`, which takes parameters
        scale = torch.clamp(clipping.limit / (norm + 1e-6), max=1.0)  # 1e-6 is torch's constant
        for gradient in gradients:
            gradient.mul_(scale.to(gradient.device))
    elif clipping.kind == "value":
        _limit_values(gradients, clipping.limit, fast_paths)
    return norm


def _limit_values(gradients: list[Tensor], limit: float, fast_paths: bool) -> None:
    """Clamp each value. The values of a sparse gradient are the sums over its repeated rows, as optimizers use them."""
    fast_clamp([gradient for gradient in gradients if not gradient.is_sparse], limit, enabled=fast_paths)
    for gradient in gradients:
        if gradient.is_sparse:
            summed = gradient.coalesce()
            summed.values().clamp_(-limit, limit)
            if summed is not gradient:
                gradient.copy_(summed)


def scale_gradients(parameters: Iterable[nn.Parameter], factor: float) -> None:
    """Multiply the gradients of `parameters` by `factor` in place."""
    for parameter in parameters:
        if parameter.grad is not None:
            parameter.grad.mul_(factor)
