"""Limiting gradients without reading anything back from an accelerator."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch
from torch import Tensor, nn

from trainstack.backends.workload import Clipping


def clip_gradients(parameters: Iterable[nn.Parameter], clipping: Clipping) -> Tensor | None:
    """Limit the gradients of `parameters` in place.

    Returns:
        The joint L2 norm before clipping, a 0-dim tensor on the gradients' device that has not been read: inf or nan
        where a gradient is. None if nothing has a gradient, or if nothing is clipped or measured.
    """
    if clipping.kind == "none" and not clipping.measured:
        return None
    gradients = [p.grad for p in parameters if p.grad is not None]
    if not gradients:
        return None
    uniform = _is_uniform(gradients)
    norm = _joint_norm(gradients, uniform)
    if clipping.kind == "norm":
        _limit_norm(gradients, norm, clipping.limit, uniform)
    elif clipping.kind == "value":
        _limit_values(gradients, clipping.limit, uniform)
    return norm


def _is_uniform(gradients: list[Tensor]) -> bool:
    first = gradients[0]
    device, dtype = first.device, first.dtype
    return all(g.dtype is dtype and g.layout is torch.strided and g.device == device for g in gradients)


def _joint_norm(gradients: list[Tensor], uniform: bool) -> Tensor:
    """The same bits as `torch.nn.utils.get_total_norm`, at a fraction of its cost in the usual case."""
    if uniform:
        norm: Tensor = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(gradients)))
        return norm
    dense = [g.coalesce().values() if g.is_sparse else g for g in gradients]
    return torch.nn.utils.get_total_norm(dense)


def _limit_norm(gradients: list[Tensor], norm: Tensor, limit: float, uniform: bool) -> None:
    """The same bits as `torch.nn.utils.clip_grads_with_norm_`."""
    if uniform and norm.dtype is torch.float32 and norm.device.type == "cpu" and limit < MOST_ON_HOST:
        factor = _factor_on_host(norm.item(), limit)
        if factor != 1.0:
            torch._foreach_mul_(gradients, factor)
        return
    scale = torch.clamp(limit / (norm + 1e-6), max=1.0)
    if uniform:
        torch._foreach_mul_(gradients, scale)
        return
    for gradient in gradients:
        gradient.mul_(scale.to(gradient.device))


def _limit_values(gradients: list[Tensor], limit: float, uniform: bool) -> None:
    """Clamp each value; a sparse gradient's are those of the sum that it stands for, as an optimizer takes them."""
    dense = gradients if uniform else [gradient for gradient in gradients if not gradient.is_sparse]
    if dense:
        torch._foreach_clamp_min_(dense, -limit)
        torch._foreach_clamp_max_(dense, limit)
    for gradient in gradients if len(dense) < len(gradients) else ():
        if gradient.is_sparse:
            summed = gradient.coalesce()
            summed.values().clamp_(-limit, limit)
            if summed is not gradient:
                gradient.copy_(summed)


def _factor_on_host(norm: float, limit: float) -> float:
    """`torch.clamp(limit / (norm + 1e-6), max=1.0)` in float32, where four operations on tensors cost more."""
    factor = _ONE / (np.float32(norm) + _TINY) * np.float32(limit)
    return float(factor) if not factor >= 1.0 else 1.0


_ONE, _TINY = np.float32(1.0), np.float32(1e-6)
MOST_ON_HOST = 1e30
"""Beyond this limit numpy would warn of an overflow."""
